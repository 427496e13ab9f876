"""Why an attempt ended: what its ranks left behind, and what torchrun says of them. Importable without torch.

A rank that fails writes its exception into a file of its own beside the launch file: torchrun's report is text for
people, and a rank that was killed writes nothing at all, which is telling as well.
"""

import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from runhealth.trainer.launch import write_json

LATE_S = 3.0  # ranks that wait in the same collective give up together
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_KILLED = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*:\s*-(\d+)")
_WRAPPED = re.compile(r"^(?:\w+: Got the following error when running the callback: )+")  # torch futures, nested


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The exception of one rank. `checkpoint`: it could not load this one (relative to the run)."""

    rank: int
    ts_ns: int
    message: str  # type and first line
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`ranks`: those at fault, as far as it can be known."""

    message: str
    ranks: tuple[int, ...] = ()
    checkpoint: str = ""


def _error_file(launch: Path, rank: int) -> Path:
    return launch.with_name(f"{launch.stem}.r{rank:05d}.error.json")


def write_error(launch: str, rank: int, error: BaseException, checkpoint: str = "") -> None:
    """Leave the exception of a rank for the supervisor. Raises nothing: the exception itself is on its way."""
    lines = str(error).strip().splitlines() or [""]
    message = _WRAPPED.sub("", f"{type(error).__name__}: {lines[0]}")[:500]
    raw = {"rank": rank, "ts_ns": time.time_ns(), "message": message, "checkpoint": checkpoint}
    try:
        write_json(_error_file(Path(launch), rank), raw)
    except OSError:
        return  # a full disk; the traceback is in the log of the attempt


def read_errors(launch: Path, world: int) -> list[RankError]:
    """In the order in which the ranks failed."""
    found = []
    for rank in range(world):
        try:
            found.append(RankError(**json.loads(_error_file(launch, rank).read_text())))
        except (OSError, ValueError, TypeError):
            continue  # it has none, or was killed while it wrote one
    return sorted(found, key=lambda error: error.ts_ns)


def failure_of(launch: Path, code: int, output: str, world: int) -> Failure:
    """`code` is torchrun's exit code, `output` the end of what it and the ranks printed."""
    ended = {int(match[1]): int(match[2]) for match in _KILLED.finditer(output)}
    # SIGTERM is how torchrun ends the ranks that are left: no rank is at fault for it
    killed = {rank: number for rank, number in ended.items() if number != signal.SIGTERM}
    if killed:
        said = "; ".join(f"rank {rank} was killed (signal {number})" for rank, number in sorted(killed.items()))
        return Failure(message=said, ranks=tuple(sorted(killed)))
    errors = read_errors(launch, world)
    if not errors:
        silent = tuple(rank for rank in range(world) if rank not in ended)
        if ended and silent:
            names = ", ".join(map(str, silent))
            return Failure(message=f"rank {names} ended without a word; torchrun then ended the others", ranks=silent)
        if code < 0:
            return Failure(message=f"torchrun, which runs the ranks, was killed (signal {-code})")
        return Failure(message=f"torchrun ended with exit code {code}")
    first = errors[0]
    message = f"rank {first.rank}: {first.message}"
    if first.checkpoint:
        return Failure(message=message, ranks=(first.rank,), checkpoint=first.checkpoint)
    if _TIMED_OUT.search(first.message):
        waited = {error.rank for error in errors if error.ts_ns - first.ts_ns <= LATE_S * 1e9}
        absent = tuple(rank for rank in range(world) if rank not in waited)
        if absent:
            names = ", ".join(map(str, absent))
            return Failure(message=f"rank {names} never joined the others; {message}", ranks=absent)
    return Failure(message=message, ranks=(first.rank,))
