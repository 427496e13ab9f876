"""Is a run of the store still at work? What its last attempt left behind, held against the clock and its processes.

The one check that looks beyond the records, so it is not the engine's: it is made last, and only for a run whose logs
lie on this machine. A run whose logs were all closed says the same for ever.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from runhealth.diagnose.findings import Alarm, Finding, Missing
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.history import History
from runhealth.diagnose.robust import median
from runhealth.diagnose.verdicts import fact_of
from runhealth.storage.records import EventKind
from runhealth.storage.writers import Writer, Writers, writers_of

SILENT_S = 60.0
SILENT_STEPS = 5.0  # so many median steps without one are silence
STEP_FRAMES = 64  # that the median is taken over
STACKS = Missing(signal="stacks", would_tell="which rank is behind, and where it waits (py-spy dump --pid PID)")
LOGS = Missing(signal="rank_output", would_tell="why it ended: also look at the kernel log and the scheduler")
FAILURES = (EventKind.EXCEPTION, "hang", "dead_rank", "out_of_memory")


def check(run_path: str, history: History, now_ns: int) -> Finding | None:
    """The finding `crash`, `dead_rank` or `hang` for a run of the store that is not at work any more, though no end
    of it is on record; None for one that is, that has ended, or that left no logs here."""
    writers = writers_of(run_path)
    if writers is None:
        return None
    ranks = [log for log in writers.logs if log.rank is None or log.rank >= 0]
    if not ranks or all(log.closed for log in ranks) or _told(history, writers.attempt):
        return None
    dead = [log for log in ranks if log.dead and not log.closed]
    if dead:
        return _gone(ranks, dead, history, writers)
    return _silent(ranks, history, writers, now_ns)


def _told(history: History, attempt: int) -> bool:
    """The end of the attempt is on record by itself."""
    return any(event.attempt == attempt and event.kind in FAILURES for event in history.events)


def _gone(ranks: Sequence[Writer], dead: Sequence[Writer], history: History, writers: Writers) -> Finding:
    whole = len(dead) == sum(not log.closed for log in ranks)
    lasts = _last_steps(history, writers.attempt)
    if whole:
        behind = _behind(lasts)
        message = f"attempt {writers.attempt} ended without a word: {_gone_text(len(dead))}"
        kind = "crash"
    else:
        behind = tuple(sorted(log.rank for log in dead if log.rank is not None))
        message = f"attempt {writers.attempt} lost {_names(behind) or 'a node'}: the process is gone, others live"
        kind = "dead_rank"
    message += f", last step {_last(history):,}"
    if whole and behind:
        message += f"; {_names(behind)} had come least far, to step {lasts[behind[0]]:,}"
    finding = _finding(kind, behind, message, history, writers.attempt)
    return replace(finding, missing=(LOGS,))


def _silent(ranks: Sequence[Writer], history: History, writers: Writers, now_ns: int) -> Finding | None:
    frames = [frame for frame in history.frames if frame.attempt == writers.attempt]
    heard_ns = max([history.last_ts_ns, *(frame.ts_ns for frame in frames[-1:])]) or writers.touched_ns
    if not frames:
        heard_ns = max(heard_ns, writers.touched_ns)  # it may still be starting
    if (now_ns - heard_ns) / 1e9 <= max(SILENT_S, SILENT_STEPS * _step_s(frames)):
        return None
    lasts = _last_steps(history, writers.attempt)
    stopped = tuple(sorted(log.rank for log in ranks if log.stopped and log.rank is not None))
    behind = stopped or _behind(lasts)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(heard_ns // 1_000_000_000))
    message = f"attempt {writers.attempt} writes no more: nothing after step {_last(history):,} since {since}"
    if stopped:
        pids = ", ".join(str(log.pid) for log in ranks if log.rank in stopped)
        message += f"; {_names(stopped)} is suspended (process {pids}; kill -CONT lets it go on)"
    elif behind:
        message += f"; {_names(behind)} is behind, at step {lasts[behind[0]]:,}"
    elif not all(log.here for log in ranks):
        message += "; its processes run on another host, where it may also have died"
    else:
        message += ", while its processes live"
    finding = _finding("hang", behind, message, history, writers.attempt)
    return finding if stopped else replace(finding, missing=(STACKS,))


def _finding(kind: str, ranks: tuple[int, ...], message: str, history: History, attempt: int) -> Finding:
    step = _last(history)
    return fact_of(
        Alarm(
            detector="liveness",
            kind=kind,
            signal="",
            attempt=attempt,
            step=step,
            onset_step=step,
            score=1.0,
            value=0.0,
            baseline=0.0,
            ranks=ranks,
            message=message,
        )
    )


def _last(history: History) -> int:
    return history.lasts[max(history.lasts)] if history.lasts else 0


def _last_steps(history: History, attempt: int) -> dict[int, int]:
    """Rank -> its last step in the attempt, as far as the ring of frames goes."""
    lasts: dict[int, int] = {}
    for frame in history.frames:
        if frame.attempt == attempt:
            lasts.update(dict.fromkeys(frame.ranks, frame.step))
    return lasts


def _behind(lasts: dict[int, int]) -> tuple[int, ...]:
    """The ranks whose last step is lowest; none if all have come as far."""
    if len(set(lasts.values())) < 2:
        return ()
    lowest = min(lasts.values())
    return tuple(sorted(rank for rank, step in lasts.items() if step == lowest))


def _step_s(frames: Sequence[Frame]) -> float:
    stamps = [frame.ts_ns for frame in frames[-STEP_FRAMES:] if frame.ts_ns]
    gaps = [(after - before) / 1e9 for before, after in pairwise(stamps) if after > before]
    return median(sorted(gaps)) if gaps else 0.0


def _gone_text(count: int) -> str:
    return "the process that wrote it is gone" if count == 1 else f"the {count} processes that wrote it are gone"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
