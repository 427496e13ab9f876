"""The controls that a page's URL carries: run, attempt, window. A control's key is the name of its query parameter."""

from collections.abc import Sequence

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from runhealth.dashboard.queries import Progress
from runhealth.dashboard.views import overview
from runhealth.dashboard.views.text import plain
from runhealth.dashboard.window import Window

RUN, ATTEMPT, FIRST, LAST, TAIL = "run", "attempt", "from", "to", "tail"
ALL = "all"  # options are written to the URL as they are shown
TAILS = {"all steps": None, "last 500": 500, "last 2000": 2000, "last 10000": 10000}


def set_window(window: Window) -> None:
    """Only from a widget callback: the widgets of the window may not exist yet in this run of the script."""
    st.session_state[FIRST] = window.first
    st.session_state[LAST] = window.last


def forget_window() -> None:
    """Back to what a fresh link shows: all attempts, the whole run, following it."""
    set_window(Window())
    st.session_state[TAIL] = next(iter(TAILS))
    st.session_state[ATTEMPT] = ALL


def run_picker(slot: DeltaGenerator, names: Sequence[str]) -> str | None:
    return slot.selectbox(
        "Run", names, index=None, key=RUN, bind="query-params", format_func=plain, on_change=forget_window,
        placeholder="Choose a run", width=320,
    )  # fmt: skip


def attempt_picker(slot: DeltaGenerator, progress: Progress) -> int | None:
    """None means all attempts, stitched."""
    options = [ALL, *(str(a.attempt) for a in reversed(progress.attempts))]
    if st.session_state.get(ATTEMPT, ALL) not in options:
        st.session_state[ATTEMPT] = ALL
    spans = "\n".join(f"- {a.attempt}: steps {a.first_step:,} to {a.last_step:,}" for a in progress.attempts[-8:])
    meaning = "`all` is one stitched curve; superseded steps, which a later attempt trained again, are faint."
    chosen = slot.selectbox(
        "Attempt", options, key=ATTEMPT, bind="query-params", disabled=len(progress.attempts) == 1, width=130,
        help=f"{meaning}\n\n{spans}",
    )  # fmt: skip
    return None if chosen is None or chosen == ALL else int(chosen)


def window_picker(slot: DeltaGenerator) -> Window:
    """A step in `to` freezes the window; without one it follows the run."""
    lo = slot.number_input(
        "From step", value=None, min_value=0, step=1, key=FIRST, bind="query-params", placeholder="first", width=170
    )
    hi = slot.number_input(
        "To step", value=None, min_value=0, step=1, key=LAST, bind="query-params", placeholder="newest", width=170
    )
    fixed = lo is not None or hi is not None
    newest = slot.selectbox(
        "Follow", list(TAILS), key=TAIL, bind="query-params", disabled=fixed, width=170,
        help="Counts while both step fields are empty.",
    )  # fmt: skip
    return Window(
        first=None if lo is None else int(lo),
        last=None if hi is None else int(hi),
        tail=None if fixed or newest is None else TAILS[newest],
    )


def use_selection(key: str) -> None:
    """Callback of the overview: what was dragged over becomes the window."""
    steps = overview.selected(st.session_state.get(key))
    if steps is not None:
        set_window(Window(first=max(0, steps[0]), last=max(0, steps[1])))
