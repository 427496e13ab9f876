"""What can be seen in a run or log, how completely, what cannot, and what each missing signal would tell."""

import json
from collections import Counter
from dataclasses import dataclass, field

from runhealth.diagnose.explain import absent_for, checked_kinds
from runhealth.diagnose.report.json import SCHEMA_VERSION
from runhealth.diagnose.report.plain import Style, safe
from runhealth.diagnose.suspect import EXTRA_TELLS, load_suspects, would_tell
from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.records import BatchRecord, LayerSample, Record, SourceInfo, StepRecord
from runhealth.storage.signals import BATCH_SIGNALS, STEP_SIGNALS, lookup
from runhealth.storage.source import RecordSource

# What tells most, first: the report of a finding asks for these.
FIRST_ASKED = ("loss", "grad_norm", "lr", "update_ratio", "grad_norm_rank", "t_step_s", "token_entropy", "shard_hash")
MOST_NOTES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How completely a signal was recorded. `share` is the part of the steps, 0 to 1, on the rank (and layer) that has
    most of them."""

    signal: str
    share: float
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """A suspect or kind, and what it would need; empty `needs`: it can be judged. `optional` would show it more."""

    name: str
    needs: str
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    info: SourceInfo
    steps: int
    ranks: tuple[int, ...]
    recorded: tuple[Coverage, ...]
    missing: tuple[tuple[str, str], ...]  # signal, what it would tell
    suspects: tuple[Lacking, ...]
    kinds: tuple[Lacking, ...]


@dataclass(slots=True)
class _Counts:
    """Records by the names they hold: a run has few such patterns however long it is."""

    patterns: Counter[tuple[int, str, tuple[str, ...]]] = field(default_factory=Counter)
    steps: int = 0
    _last: tuple[int, int] | None = None

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.add_step(record.attempt, record.step)
            self.patterns[record.rank, "", tuple(record.values)] += 1
        elif isinstance(record, LayerSample):
            self.patterns[record.rank, record.layer, tuple(f"layer.{name}" for name in record.values)] += 1
        elif isinstance(record, BatchRecord) and record.micro_batch == 0:
            names = [*record.values]
            names += ["shard"] if record.shard else []
            names += ["shard_hash"] if record.shard_hash is not None else []
            self.patterns[record.rank, "", tuple(names)] += 1

    def add_block(self, block: StepBlock) -> None:
        if block.batches is not None or block.layers is not None:
            for record in block.records():
                self.add(record)
            return
        self.steps += len(block) - ((block.attempt, int(block.steps[0])) == self._last)
        self._last = (block.attempt, int(block.steps[-1]))
        for at, rank in enumerate(block.ranks):
            self.patterns[rank, "", ()] += len(block)
            for name, column in block.columns.items():
                count = len(block) if column.present is None else int(column.present[:, at].sum())
                if count:
                    self.patterns[rank, "", (name,)] += count

    def add_step(self, attempt: int, step: int) -> None:
        if (attempt, step) != self._last:
            self._last = (attempt, step)
            self.steps += 1


def examine(source: RecordSource) -> Examination:
    """Read everything once. Raises NoUsableDataError when not a single step was read."""
    counts = _Counts()
    for item in source.blocks() if isinstance(source, BlockSource) else source.records():
        if isinstance(item, StepBlock):
            counts.add_block(item)
        else:
            counts.add(item)
    info = source.describe()
    if not counts.steps:
        raise NoUsableDataError(f"{info.source}: expected at least one training step, met none")
    recorded = _coverage(counts)
    known = frozenset(coverage.signal for coverage in recorded)
    asked = dict.fromkeys((*FIRST_ASKED, *STEP_SIGNALS, *BATCH_SIGNALS, *EXTRA_TELLS))
    return Examination(
        info=info,
        steps=counts.steps,
        ranks=tuple(sorted({rank for rank, _, _ in counts.patterns})),
        recorded=recorded,
        missing=tuple((s, would_tell(s)) for s in asked if s not in known and _tells(s)),
        suspects=tuple(_suspects(known)),
        kinds=tuple(Lacking(name=kind, needs=absent_for(kind, known)) for kind in checked_kinds()),
    )


def _tells(signal: str) -> bool:
    entry = lookup(signal)
    return signal in EXTRA_TELLS or (entry is not None and bool(entry.would_tell))


def _coverage(counts: _Counts) -> tuple[Coverage, ...]:
    by_place: dict[str, Counter[tuple[int, str]]] = {}
    for (rank, layer, names), count in counts.patterns.items():
        for name in names:
            by_place.setdefault(name, Counter())[rank, layer] += count
    order = {name: position for position, name in enumerate((*STEP_SIGNALS, *BATCH_SIGNALS, *EXTRA_TELLS))}
    return tuple(
        Coverage(
            signal=name,
            share=min(1.0, max(places.values()) / counts.steps),
            ranks=tuple(sorted({rank for rank, _ in places})),
        )
        for name, places in sorted(by_place.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
    )


def _suspects(known: frozenset[str]) -> list[Lacking]:
    found = []
    for suspect in load_suspects():
        needs = suspect.needs
        absent = [s for s in needs.all if s not in known]
        if needs.any and known.isdisjoint(needs.any):
            absent.append(f"one of {', '.join(needs.any)}")
        optional = tuple(s for s in needs.optional if s not in known)
        found.append(Lacking(name=suspect.name, needs=" and ".join(absent), optional=optional))
    return found


def render_json(seen: Examination) -> str:
    info = seen.info
    body = {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "name": info.name,
            "source": info.source,
            "format": info.format,
            "steps": seen.steps,
            "ranks": list(seen.ranks),
            "rows_read": info.rows_read,
            "rows_kept": info.rows_kept,
            "rows_rejected": info.rows_rejected,
            "rejected": [{"line": r.line, "why": r.why} for r in info.rejected],
            "notes": list(info.notes),
        },
        "signals": [
            {
                "signal": c.signal,
                "known": _catalogued(c.signal),
                "share_of_steps": round(c.share, 6),
                "ranks": list(c.ranks),
            }
            for c in seen.recorded
        ],
        "missing": [{"signal": signal, "would_tell": tells} for signal, tells in seen.missing],
        "suspects": [
            {"suspect": s.name, "can_look": not s.needs, "needs": s.needs or None, "optional": list(s.optional)}
            for s in seen.suspects
        ],
        "kinds": [{"kind": k.name, "can_judge": not k.needs, "needs": k.needs or None} for k in seen.kinds],
    }
    return json.dumps(body, indent=2) + "\n"


def _catalogued(signal: str) -> bool:
    return lookup(signal.removeprefix("layer.")) is not None or signal in EXTRA_TELLS


def render(seen: Examination, style: Style) -> str:
    info = seen.info
    yes, no = ("✓", "–") if style.unicode else ("yes", "no ")
    rows = f"{info.rows_kept:,} of {info.rows_read:,} rows kept"
    ranks = f"{len(seen.ranks)} rank{'s' if len(seen.ranks) != 1 else ''}"
    lines = [f"{safe(info.name)}  {safe(info.format)}  {seen.steps:,} steps, {ranks}, {rows}"]
    lines += [f"  line {rejected.line:,}: {safe(rejected.why)}" for rejected in info.rejected[:MOST_NOTES]]
    lines += [f"  note: {safe(note)}" for note in info.notes[:MOST_NOTES]]
    lines += ["", "Recorded: share of the steps, and on which ranks"]
    lines += [f"  {yes} {safe(c.signal):22} {_percent(c.share):>6}  {_ranks(c, seen)}" for c in seen.recorded]
    lines += ["", "Not recorded: it would tell"]
    lines += [f"  {no} {signal:22} {tells}" for signal, tells in seen.missing]
    lines += ["", "Suspects"]
    for suspect in seen.suspects:
        if suspect.needs:
            lines.append(f"  {no} {suspect.name}: cannot look, needs {suspect.needs}")
        else:
            more = f" (would see more with {', '.join(suspect.optional)})" if suspect.optional else ""
            lines.append(f"  {yes} {suspect.name}{more}")
    blind = [k for k in seen.kinds if k.needs]
    lines += ["", f"Findings: {len(seen.kinds) - len(blind)} of {len(seen.kinds)} kinds can be judged"]
    lines += [f"  {no} {kind.name}: needs {kind.needs}" for kind in blind]
    return "".join(row + "\n" for line in lines for row in style.wrap(line, hanging=4))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share in (0.0, 1.0) or 0.01 <= share <= 0.99 else f"{share:.1%}"


def _ranks(coverage: Coverage, seen: Examination) -> str:
    free = "" if _catalogued(coverage.signal) else "  (name not in the catalogue: shown, not judged)"
    if len(seen.ranks) == 1:
        return free.strip()
    if coverage.ranks == seen.ranks:
        return "all ranks" + free
    shown = ", ".join(str(rank) for rank in coverage.ranks[:8])
    more = f" and {len(coverage.ranks) - 8} more" if len(coverage.ranks) > 8 else ""
    return f"rank {shown}{more}{free}"
