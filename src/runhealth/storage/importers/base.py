"""What an importer is, what it yields, and how it says what it could not read.

An importer turns bytes into `Row`s and `Mark`s in the order of the file and knows nothing of attempts, merging or
ordering: that is `assemble.py`, once for all formats.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO, Protocol

from runhealth.storage.blocks import Column, Ints
from runhealth.storage.importers.linemap import LineMap
from runhealth.storage.records import Rejected, Scalar

REJECTED_SHOWN = 20
NOTES_SHOWN = 40
MET_SHOWN = 40
# A detector reads at least one of these; a log without any of them cannot be diagnosed.
USABLE = frozenset(
    {"loss", "eval_loss", "grad_norm", "grad_norm_rank", "loss_scale", "step_skipped", "t_step_s", "t_forward_s",
     "t_wait_s", "t_data_s", "nonfinite_count", "overflow_count", "update_ratio", "weight_norm", "logit_max"}
)  # fmt: skip

TRAINING = "train"  # rows that drive the step counter
EVALUATION = "eval"  # rows that repeat a training step, or lag behind it
EXTRA = "extra"  # rows without any signal of the catalogue: kept, but never the sign of a restart


@dataclass(slots=True)
class Row:
    """The numbers of one line, with names and units of the signal catalogue.

    `series` separates step counters that may lag behind one another: only a step that goes back within its own series
    and rank opens a new attempt. `total` is the planned number of steps if the line states it, `attempt` the attempt
    if the log numbers them itself.
    """

    line: int
    step: int
    values: dict[str, Scalar]
    rank: int = 0
    ranked: bool = False  # the log names the rank, so others may follow
    series: str = TRAINING
    total: int | None = None
    attempt: int | None = None
    ts_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Mark:
    """Something a log tells besides numbers. It is stamped with the attempt and the last step before it, unless
    `step` is known. `path` and `status` are set for checkpoints only."""

    line: int
    kind: str
    message: str = ""
    step: int | None = None
    data: dict[str, object] = field(default_factory=dict)
    path: str | None = None
    status: str | None = None
    rank: int = 0


@dataclass(slots=True, kw_only=True)
class Rows:
    """n training rows of rank 0, one after the other, as columns: what `rows()` yields. Steps ascend strictly.

    `lines`, `steps`, `ts_ns` and the columns are (n,). `ranked`: the log names the rank.
    """

    lines: Ints
    steps: Ints
    ts_ns: Ints
    columns: dict[str, Column]
    total: int | None = None
    ranked: bool = False

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, first: int, last: int) -> "Rows":
        """The rows from `first` up to, and without, `last`."""
        columns = {
            name: Column(
                values=column.values[first:last],
                present=None if column.present is None else column.present[first:last],
            )
            for name, column in self.columns.items()
        }
        return Rows(
            lines=self.lines[first:last],
            steps=self.steps[first:last],
            ts_ns=self.ts_ns[first:last],
            columns=columns,
            total=self.total,
            ranked=self.ranked,
        )

    def rows(self) -> Iterator[Row]:
        """The same, one by one."""
        columns = [
            (name, column.values.tolist(), None if column.present is None else column.present.tolist())
            for name, column in self.columns.items()
        ]
        places = zip(self.lines.tolist(), self.steps.tolist(), self.ts_ns.tolist(), strict=True)
        for at, (line, step, ts_ns) in enumerate(places):
            values = {name: value[at] for name, value, present in columns if present is None or present[at]}
            yield Row(line, step, values, ranked=self.ranked, total=self.total, ts_ns=ts_ns)


Item = Row | Mark | Rows


class Tally:
    """Counts what was read, kept and rejected, and collects the notes of one reading."""

    def __init__(self) -> None:
        self.rows_read = 0
        self.rows_kept = 0
        self.rows_rejected = 0
        self.rejected: list[Rejected] = []
        self.notes: dict[str, None] = {}
        self.signals: set[str] = set()
        self.met: dict[str, None] = {}  # foreign names of rows that were rejected as a whole
        self.lines = LineMap()
        self.format: str | None = None  # a special case of the importer's format, once it was recognised

    def reject(self, line: int, why: str) -> None:
        """Count a line that looked like data and could not be kept."""
        self.rows_rejected += 1
        if len(self.rejected) < REJECTED_SHOWN:
            self.rejected.append(Rejected(line=line, why=why[:300]))

    def meet(self, names: Iterable[str]) -> None:
        """Remember names of a rejected row, for the message that nothing could be read; their number is bounded."""
        if len(self.met) < MET_SHOWN:
            self.met.update(dict.fromkeys(name[:60] for name in islice(names, MET_SHOWN)))

    def note(self, text: str) -> None:
        """Say something about the reading once; the number of notes is bounded."""
        if len(self.notes) < NOTES_SHOWN:
            self.notes.setdefault(text[:400], None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """What an importer is given besides the bytes. `mapping` maps signals to the names the file uses."""

    tally: Tally
    mapping: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None  # which of the runs, where a file holds several
    bulk: bool = False  # whether `Rows` may be yielded


class Importer(Protocol):
    """One foreign format. `sniff` looks at a name and at up to a mebibyte of content and answers how sure it is,
    0 (not mine) to 1; the name alone never suffices. `read` yields items and raises nothing about the content: what
    it cannot read goes to `context.tally`."""

    @property
    def name(self) -> str: ...

    def sniff(self, name: str, head: bytes) -> float: ...

    def read(self, stream: BinaryIO, context: ReadContext) -> Iterator[Item]: ...
