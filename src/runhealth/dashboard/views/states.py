"""What is shown instead of a run: nothing there, not found, not readable. Each state names the next command."""

from dataclasses import dataclass

from runhealth.dashboard.views.palette import Palette
from runhealth.dashboard.views.text import command, escape, plain
from runhealth.storage.errors import AmbiguousRunError, RunNotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyState:
    """`title`, `body` and `names` are plain text and may hold untrusted names; `action` is a shell command."""

    title: str
    body: str
    action: str
    tone: str = "info"  # info | warning | error
    names: tuple[str, ...] = ()


def no_runs(store: str) -> EmptyState:
    return EmptyState(
        title="No runs yet",
        body=f"The store {plain(store)} holds no run. The command below trains a small model with a fault in its data "
        "and fills the store; your own loop needs five lines (docs: Monitor).",
        action=command("runhealth", "demo"),
    )


def unreadable_store(store: str, error: Exception) -> EmptyState:
    return EmptyState(
        title="The store cannot be read",
        body=f"{plain(store)}: {plain(error)}",
        action=command("runhealth", "dashboard", "--store", "runs"),
        tone="error",
    )


def unknown_run(name: str, error: Exception, names: tuple[str, ...]) -> EmptyState:
    """`names` are the runs that exist; the nearest ones come from the error."""
    nearest = error.nearest if isinstance(error, RunNotFoundError) else ()
    some = nearest or names[:8]
    problem = "fits more than one run" if isinstance(error, AmbiguousRunError) else "is not in the store"
    return EmptyState(
        title=f"Run {plain(name, 80)} {problem}",
        body="Choose one in the list above" + (", for instance:" if some else "."),
        action=command("runhealth", "dashboard", "--run", some[0] if some else "latest"),
        tone="warning",
        names=some,
    )


def unreadable_run(name: str, error: Exception, store: str | None) -> EmptyState:
    where = ("--store", store) if store is not None else ()
    return EmptyState(
        title=f"Run {plain(name, 80)} cannot be read",
        body=f"{plain(error)} The command below rebuilds the published database from the rank logs, which are left "
        "as they are. This page tries again by itself.",
        action=command("runhealth", "compact", name, *where),
        tone="error",
    )


def no_telemetry(name: str, store: str | None) -> EmptyState:
    where = ("--store", store) if store is not None else ()
    return EmptyState(
        title="Waiting for the first step",
        body=f"Run {plain(name, 80)} exists, and no rank has written a step yet. This page goes on by itself when one "
        "arrives. If training already runs, the command below says what its ranks record.",
        action=command("diagnose", "doctor", "--run", name, *where),
    )


def choose_run() -> EmptyState:
    return EmptyState(
        title="Choose a run",
        body="The list above holds every run of the store.",
        action=command("runhealth", "dashboard", "--run", "latest"),
    )


def state_html(state: EmptyState, palette: Palette) -> str:
    colour = {"error": palette.error, "warning": palette.warning}.get(state.tone, palette.info)
    names = "".join(f"<li>{escape(name, 80)}</li>" for name in state.names)
    return (
        f'<div style="border:1px solid rgba(128,128,128,.28);border-left:6px solid {colour};border-radius:.5rem;'
        'padding:1rem 1.2rem;margin-top:.5rem;overflow-wrap:anywhere">'
        f'<div style="font-size:1.15rem;font-weight:650;margin-bottom:.35rem">{escape(state.title)}</div>'
        f"<div>{escape(state.body, 800)}</div>{f'<ul>{names}</ul>' if names else ''}</div>"
    )
