"""How far each rank came in each group's sequence of collectives, and who is behind. Importable without torch.

torch's Flight Recorder keeps the last collectives of a process in a ring (TORCH_FR_BUFFER_SIZE entries). With gloo its
dump has neither times of start and end nor the groups' members, so the analyser that torch ships cannot read it; what
it does have is, for every group, the number of the last collective that was enqueued. All members of a group enqueue
the same collectives in the same order: the member with the lowest number is the one the others wait for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runhealth.trainer.launch import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """One process group as one rank saw it. `op` and `sizes` are those of its last collective; `waiting`: it had not
    come back from it."""

    enqueued: int
    completed: int
    op: str = ""
    sizes: str = ""
    waiting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank was doing: its step, its main thread's place and stack, and its groups by name."""

    rank: int
    ts_ns: int
    step: int = -1
    where: str = ""
    stack: tuple[str, ...] = ()
    groups: Mapping[str, GroupState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Ranks that had not entered a collective in which others waited, and the words for it."""

    ranks: tuple[int, ...] = ()
    text: str = ""


def trace_file(launch: Path, rank: int) -> Path:
    return launch.with_name(f"{launch.stem}.r{rank:05d}.trace.json")


def write_trace(launch: Path, trace: RankTrace) -> None:
    """Raises OSError."""
    write_json(trace_file(launch, trace.rank), asdict(trace))


def read_traces(launch: Path, world: int) -> list[RankTrace]:
    """Of the ranks that left one."""
    found = []
    for rank in range(world):
        try:
            raw = json.loads(trace_file(launch, rank).read_text())
            groups = {str(name): GroupState(**state) for name, state in raw.pop("groups").items()}
            found.append(RankTrace(**{**raw, "stack": tuple(raw["stack"]), "groups": groups}))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # it could not write one, or was ended while it did
    return found


def groups_of(dump: Mapping[str, Any]) -> dict[str, GroupState]:
    """The state of each group out of a dump (`_dump_fr_trace_json`, parsed). Fields that a release of torch leaves
    out are taken as unknown."""
    status = dump.get("pg_status") or {}
    last: dict[str, Mapping[str, Any]] = {}
    waiting: set[str] = set()
    for entry in dump.get("entries") or ():
        name = str((entry.get("process_group") or ["?"])[0])
        held = last.get(name)
        if held is None or int(entry.get("record_id", 0)) >= int(held.get("record_id", 0)):
            last[name] = entry
        if not entry.get("retired", True):
            waiting.add(name)
    found = {}
    for name in sorted({*map(str, status), *last}):
        counts = status.get(name) or {}
        entry = last.get(name, {})
        sequence = max(int(entry.get("collective_seq_id", 0)), int(counts.get("last_enqueued_collective", 0)))
        found[name] = GroupState(
            enqueued=sequence,
            completed=int(counts.get("last_completed_collective", 0)),
            op=str(entry.get("profiling_name", "")),
            sizes=json.dumps(entry.get("input_sizes", [])),
            waiting=name in waiting,
        )
    return found


def behind(traces: Sequence[RankTrace]) -> Behind:
    """The ranks with the lowest number of collectives in a group where others came further.

    A rank may be behind because it waits for a third one in another group: if some of those behind wait in no
    collective themselves, they alone are named.
    """
    late: dict[int, str] = {}
    for name in sorted({name for trace in traces for name in trace.groups}):
        members = {trace.rank: trace.groups[name] for trace in traces if name in trace.groups}
        furthest = max(state.enqueued for state in members.values())
        ahead = next(state for state in members.values() if state.enqueued == furthest)
        for rank, state in members.items():
            if state.enqueued < furthest:
                what = f": {ahead.op.removeprefix('gloo:')} {ahead.sizes}" if ahead.op else ""
                late.setdefault(
                    rank, f"at collective {state.enqueued} of group {name}, the others wait in {furthest}{what}"
                )
    busy = {trace.rank for trace in traces if any(state.waiting for state in trace.groups.values())}
    ranks = tuple(sorted(set(late) - busy)) or tuple(sorted(late))
    return Behind(ranks=ranks, text=late[ranks[0]] if ranks else "")
