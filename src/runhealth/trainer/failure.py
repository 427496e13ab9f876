"""Why an attempt ended and which rank is at fault. Importable without torch.

Three sources, in the order of their worth: how the processes ended, as their own parent saw it (`RankExit`); the
exception that a rank wrote before it left (`RankError`); and what the others were doing at that moment (`RankTrace`:
step, stack, place in each group's sequence of collectives). A rank that was killed or stopped leaves no exception, and
those of its peers only say that somebody is missing.
"""

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runhealth.storage.errors import RunhealthError
from runhealth.trainer.flight_recorder import RankTrace, behind, read_traces
from runhealth.trainer.launch import write_json

LATE_S = 3.0  # ranks that wait in the same collective give up together
STALLED = "StalledError"  # the class of what a rank's own watch writes when no step ends
_TIMED_OUT = re.compile(r"timed out|timeout|StalledError", re.IGNORECASE)
# what a rank says when it is a peer that is gone or late (gloo and NCCL): never the cause itself
_PEER = re.compile(
    r"timed out|timeout|StalledError|connection (?:closed|reset|refused)|broken pipe|failed to pass monitoredBarrier"
    r"|connectFullMesh|NCCL communicator was aborted|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"\[/\S*/(?=[^/\]\s]+\])")  # the folder of a C++ file in a message of gloo
_WRAPPED = re.compile(r"^(?:\w+: Got the following error when running the callback: )+")  # torch futures, nested


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank's process ended. `code` is its exit code, or minus the signal that ended it. `ordered`: the
    supervisor had asked it to."""

    rank: int
    pid: int
    code: int
    ts_ns: int
    ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The exception of one rank. `checkpoint`: it could not load this one (relative to the run)."""

    rank: int
    ts_ns: int
    message: str  # type and first line
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one attempt when it has failed. `stopped`: rank -> when it was suspended (SIGSTOP), if it still
    is. `lost`: ranks of each node whose agent ended."""

    world: int
    exits: Sequence[RankExit] = ()
    errors: Sequence[RankError] = ()
    traces: Sequence[RankTrace] = ()
    stopped: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    other_size: bool = False  # gloo met a message of another size than it expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`kind`: `crash` (an exception, a wrong exit), `dead_rank` (a process or node that is gone), `hang`. `ranks`:
    those at fault, as far as it can be known. `step`: the step that was under way, -1 if nobody said."""

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    checkpoint: str = ""
    step: int = -1

    @property
    def signature(self) -> tuple[str, str, tuple[int, ...], int]:
        """Equal for failures that are the same one again; numbers in the message (pids, times) do not count."""
        return (self.kind, re.sub(r"\d+", "#", self.message), self.ranks, self.step)


def _error_file(launch: Path, rank: int) -> Path:
    return launch.with_name(f"{launch.stem}.r{rank:05d}.error.json")


def write_error(launch: str, rank: int, error: BaseException, checkpoint: str = "") -> None:
    """Leave the exception of a rank for the supervisor. Raises nothing: the exception itself is on its way."""
    message = _said(_root(error))
    if _root(error) is not error:
        message += f" ({_said(error).rstrip(':')})"
    message = message[:500]
    raw = {"rank": rank, "ts_ns": time.time_ns(), "message": message, "checkpoint": checkpoint}
    try:
        write_json(_error_file(Path(launch), rank), raw)
    except OSError:
        return  # a full disk; the traceback is in the log of the attempt


def _root(error: BaseException) -> BaseException:
    """The exception that another one was raised from: a pipeline wraps what happened in a stage, the time-out of its
    receive as well. Our own errors say all that is known by themselves."""
    while error.__cause__ is not None and not isinstance(error, RunhealthError):
        error = error.__cause__
    return error


def _said(error: BaseException) -> str:
    """Type and first line."""
    lines = str(error).strip().splitlines() or [""]
    return _SOURCE.sub("[", _WRAPPED.sub("", f"{type(error).__name__}: {lines[0]}"))


def read_errors(launch: Path, world: int) -> list[RankError]:
    """In the order in which the ranks failed."""
    found = []
    for rank in range(world):
        try:
            found.append(RankError(**json.loads(_error_file(launch, rank).read_text())))
        except (OSError, ValueError, TypeError):
            continue  # it has none, or was killed while it wrote one
    return sorted(found, key=lambda error: error.ts_ns)


def failure_of(
    launch: Path,
    world: int,
    exits: Sequence[RankExit],
    stopped: Mapping[int, int] | None = None,
    lost: Mapping[str, tuple[int, ...]] | None = None,
) -> Failure:
    """Read what the ranks of an attempt left beside its launch file, and name the failure."""
    return name_failure(
        Evidence(
            world=world,
            exits=exits,
            errors=read_errors(launch, world),
            traces=read_traces(launch, world),
            stopped=stopped or {},
            lost=lost or {},
            other_size=_met_another_size(launch.with_suffix(".log")),
        )
    )


def _met_another_size(log: Path) -> bool:
    """gloo does not raise then, it aborts the process, and says so in what the ranks print."""
    try:
        return b"gloo::EnforceNotMet" in log.read_bytes()
    except OSError:
        return False


def name_failure(evidence: Evidence) -> Failure:
    """The earliest thing that is no mere echo of another: a lost node, a signal that nobody of us sent, an exception
    that is not about a peer. If all that is left are ranks that waited in vain, the one they waited for."""
    step = max((trace.step for trace in evidence.traces), default=-1)
    own = [error for error in evidence.errors if not _PEER.search(error.message)]
    killed = sorted((e for e in evidence.exits if e.code < 0 and not e.ordered), key=lambda e: e.ts_ns)
    if evidence.lost:
        return _lost(evidence, step)
    if killed and not (own and own[0].ts_ns < killed[0].ts_ns):
        return _killed(killed, step, evidence.other_size)
    if own:
        message = f"rank {own[0].rank}: {own[0].message}"
        return Failure(kind="crash", message=message, ranks=(own[0].rank,), checkpoint=own[0].checkpoint, step=step)
    if evidence.errors and _TIMED_OUT.search(evidence.errors[0].message):
        return _hung(evidence, step)
    if evidence.stopped:
        return _hung(evidence, step)
    silent = _silent_exits(evidence)
    if silent:
        said = "; ".join(f"rank {e.rank} ended with exit code {e.code} and without a word" for e in silent)
        return Failure(kind="crash", message=said, ranks=tuple(sorted({e.rank for e in silent})), step=step)
    if evidence.errors:
        first = evidence.errors[0]
        return Failure(kind="crash", message=f"rank {first.rank}: {first.message}", ranks=(first.rank,), step=step)
    return Failure(kind="crash", message="the ranks ended, and nothing says why", step=step)


def _lost(evidence: Evidence, step: int) -> Failure:
    said = "; ".join(
        f"node {name} was lost with {_named(ranks)}" if ranks else f"node {name} was lost before it started a rank"
        for name, ranks in sorted(evidence.lost.items())
    )
    ranks = tuple(sorted({rank for members in evidence.lost.values() for rank in members}))
    return Failure(kind="dead_rank", message=said, ranks=ranks, step=step)


def _killed(killed: Sequence[RankExit], step: int, other_size: bool) -> Failure:
    """Those that died together with the first; a later one may be an echo (gloo aborts on a torn message)."""
    first = killed[0]
    together = [e for e in killed if e.ts_ns - first.ts_ns <= 50_000_000 and e.code == first.code]
    said = "; ".join(f"rank {e.rank} was killed (signal {-e.code}{_signal_name(-e.code)})" for e in together)
    if other_size and first.code == -signal.SIGABRT:
        said += ": a message of another size arrived there; it, or a peer, ran another collective than the others"
    return Failure(kind="dead_rank", message=said, ranks=tuple(sorted(e.rank for e in together)), step=step)


def _silent_exits(evidence: Evidence) -> list[RankExit]:
    """Ranks that left by themselves with a wrong exit code and no exception."""
    wrote = {error.rank for error in evidence.errors}
    return sorted(
        (e for e in evidence.exits if e.code > 0 and not e.ordered and e.rank not in wrote), key=lambda e: e.ts_ns
    )


def _hung(evidence: Evidence, step: int) -> Failure:
    first = evidence.errors[0] if evidence.errors else None
    after = f"; rank {first.rank}: {first.message}" if first else ""
    if evidence.stopped:
        ranks = tuple(sorted(evidence.stopped))
        said = f"{_named(ranks)} {'is' if len(ranks) == 1 else 'are'} suspended (SIGSTOP){after}"
        return Failure(kind="hang", message=said, ranks=ranks, step=step)
    start_ns = first.ts_ns if first else 0
    waited = {error.rank for error in evidence.errors if error.ts_ns - start_ns <= LATE_S * 1e9}
    absent = tuple(rank for rank in range(evidence.world) if rank not in waited)
    stalled = tuple(sorted(error.rank for error in evidence.errors if error.message.startswith(STALLED)))
    if stalled and first and first.message.startswith(STALLED):  # nobody waited for anybody
        message = f"{_named(stalled)} stood still{_where(evidence.traces, stalled)}; {first.message}"
        return Failure(kind="hang", message=message, ranks=stalled, step=step)
    late = behind(evidence.traces)
    ranks = tuple(rank for rank in absent if rank in late.ranks) or absent or late.ranks
    if not ranks:
        return Failure(kind="hang", message=f"all ranks waited for each other{after}", step=step)
    where = _where(evidence.traces, ranks)
    place = f" ({late.text})" if late.text and set(ranks) <= set(late.ranks) else ""
    return Failure(
        kind="hang", message=f"{_named(ranks)} never joined the others{place}{where}{after}", ranks=ranks, step=step
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _where(traces: Sequence[RankTrace], ranks: Sequence[int]) -> str:
    found = [f"rank {trace.rank} is in {trace.where}" for trace in traces if trace.rank in ranks and trace.where]
    return f"; {', '.join(found)}" if found else ""


def _signal_name(number: int) -> str:
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""
