"""One run, live: verdict, curves, ranks, findings. The URL carries run, attempt and window."""

import os
import time

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from runhealth.dashboard import controls, sections
from runhealth.dashboard.launch import RUN_ENV, STORE_ENV
from runhealth.dashboard.live import LiveRun
from runhealth.dashboard.queries import Progress
from runhealth.dashboard.views import states
from runhealth.dashboard.views.palette import Palette, palette
from runhealth.dashboard.views.verdict import RunState, run_state, verdict
from runhealth.dashboard.window import Window
from runhealth.storage.errors import AmbiguousRunError, RunhealthError, RunNotFoundError
from runhealth.storage.store import Store

POLL_S = 2.0
IDLE_POLL_S = 10.0  # a run that ended may still get a new attempt
FIRST_DIAGNOSIS_S = 1.5  # a small run shows its verdict at once
STRIP_GROWTH = 0.03  # the overview strip is redrawn when the run has grown by this share


def page() -> None:
    """The whole page. Everything below the controls redraws itself."""
    sections.page_style()
    colours = palette(st.context.theme.type)
    store = os.environ.get(STORE_ENV) or None
    try:
        infos = sorted(Store(store).runs(), key=lambda info: (info.bundled, -info.created_ns))
        names = [info.name for info in infos]
    except RunhealthError as error:
        sections.empty(states.unreadable_store(store or "./runs", error), colours)
        _retry()
        return
    if not names:
        sections.empty(states.no_runs(store or "./runs"), colours)
        _retry()
        return
    unknown = _resolve(names, store)
    top = st.container()  # the verdict, above the controls although it redraws itself with the charts
    row = st.container(horizontal=True)
    name = controls.run_picker(row, names)
    if name is None:
        sections.empty(unknown or states.choose_run(), colours)
        return
    try:
        with st.spinner("Opening the run…", show_time=True):
            live = open_run(store, name)
            progress = live.progress()
    except RunhealthError as error:
        open_run.clear(store, name)
        sections.empty(states.unreadable_run(name, error, store), colours)
        _retry()
        return
    if progress is None:
        sections.empty(states.no_telemetry(name, store), colours)
        _retry()
        return
    attempt = controls.attempt_picker(row, progress)
    window = controls.window_picker(row)
    sections.overview_strip(live, progress, progress.shown(window, attempt), colours)
    every_s = _pace_s(live, progress, time.time_ns())
    st.fragment(_live, run_every=every_s)(top, live, store, attempt, window, progress, every_s, colours)


@st.cache_resource(max_entries=8, show_spinner=False, on_release=lambda live: live.close())
def open_run(store: str | None, name: str) -> LiveRun:
    """One reader a run and server, shared by all sessions."""
    return LiveRun(name, store)


def _resolve(names: list[str], store: str | None) -> states.EmptyState | None:
    """Decide on the run before its picker is drawn: the URL's, the command line's, else the newest. A name that is no
    run's is taken as a prefix, a path or `latest`; what remains unknown is returned as a state."""
    fresh = controls.RUN not in st.session_state
    asked = st.query_params.get(controls.RUN) if fresh else st.session_state[controls.RUN]
    asked = asked or (os.environ.get(RUN_ENV) or names[0] if fresh else None)
    if asked is None or asked in names:
        if fresh:
            st.session_state[controls.RUN] = asked
        return None
    try:
        found = Store(store).resolve(asked).name
    except (RunNotFoundError, AmbiguousRunError) as error:
        st.session_state[controls.RUN] = None
        return states.unknown_run(asked, error, tuple(names))
    if found not in names:  # a path to a run outside of the store
        names.insert(0, asked)
        found = asked
    st.session_state[controls.RUN] = found
    return None


def _live(
    top: DeltaGenerator, live: LiveRun, store: str | None, attempt: int | None, window: Window, drawn: Progress,
    every_s: float, colours: Palette,
) -> None:  # fmt: skip
    """What redraws itself. `drawn` is what the controls above were drawn for: when the run outgrows it, the whole page
    is drawn again."""
    if st.session_state.pop("_reopen", False):
        st.rerun()
    now_ns = time.time_ns()
    try:
        progress = live.progress()
        if progress is None or _outgrown(drawn, progress):
            st.rerun()
        ended = run_state(progress, now_ns) is not RunState.RUNNING
        live.diagnosis.request(progress, ended=ended, wait_s=FIRST_DIAGNOSIS_S if live.diagnosis.updates == 0 else 0.0)
        snapshot = live.snapshot(progress, window, attempt)
        report = live.diagnosis.report
        shown = verdict(progress, report, now_ns, run=live.name, store=store)
        diagnosing = live.diagnosis.busy
        with top:
            sections.bar(shown, colours, diagnosing=diagnosing, problem=live.diagnosis.problem)
        moved = sections.new_steps(window.newer_steps(progress.span))
        sections.charts(snapshot, report, attempt, colours)
        sections.heat(live, snapshot, attempt, colours)
        moved |= sections.finding_list(report, progress, colours)
        sections.exports(live, snapshot, report, attempt)
    except RunhealthError as error:
        open_run.clear(store, live.name)  # and with it the diagnosis: the next look opens the run anew
        st.session_state["_reopen"] = True
        sections.empty(states.unreadable_run(live.name, error, store), colours)
        return
    if moved or _pace_s(live, progress, now_ns) != every_s:
        st.rerun()


def _pace_s(live: LiveRun, progress: Progress, now_ns: int) -> float:
    """How often to look: a run that ended and was diagnosed seldom changes."""
    settled = live.diagnosis.updates > 0 and not live.diagnosis.busy
    return IDLE_POLL_S if settled and run_state(progress, now_ns) is not RunState.RUNNING else POLL_S


def _outgrown(drawn: Progress, now: Progress) -> bool:
    """Whether the controls and the overview no longer fit the run."""
    grown = now.span.hi - drawn.span.hi > max(20, STRIP_GROWTH * drawn.span.steps)
    return grown or [a.attempt for a in now.attempts] != [a.attempt for a in drawn.attempts]


@st.fragment(run_every=POLL_S)
def _retry() -> None:
    """Draw the page again a little later: the run, or the store, may be there then."""
    if st.session_state.get("_retry_drawn"):
        st.session_state["_retry_drawn"] = False
        st.rerun()
    st.session_state["_retry_drawn"] = True
