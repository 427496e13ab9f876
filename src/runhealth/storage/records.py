"""The records that flow from a training loop to a verdict.

Every record is keyed by (attempt, step, rank). `attempt` counts restarts of the run: after a rollback or a resume the
same steps come again under a higher attempt, so nothing is overwritten. The run itself is not part of a record: a log,
a reader and an engine each belong to one run.

Values are Python floats and ints. NaN and infinities are legal values and mean what was measured; an absent key means
not measured. Hashes and counters are ints, never floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The scalars of one training step on one rank.

    `values` maps signal names of `storage.signals` (or free-form names) to numbers. Signals of scope `global` are
    written by rank 0 only.
    """

    attempt: int
    step: int
    rank: int
    ts_ns: int = 0
    values: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSample:
    """Per-layer measurements of one step on one rank: norms, amax, overflow counts. `layer` is a parameter-group or
    module name such as `blocks.3.attn`."""

    attempt: int
    step: int
    rank: int
    layer: str
    ts_ns: int = 0
    values: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """Where one micro-batch came from and what its tokens look like.

    Samples are numbered within their shard; `first_sample` and `last_sample` are inclusive and bound the ids that were
    read, `samples` counts them. `content_hash` is xxh3_64 of the token bytes as the rank read them. `shard_hash` is
    xxh3_64 of the whole shard as the rank read it, `manifest_hash` what the data manifest says it must be; both are
    None when not known.
    """

    attempt: int
    step: int
    rank: int
    micro_batch: int = 0
    ts_ns: int = 0
    shard: str = ""
    first_sample: int = -1
    last_sample: int = -1
    samples: int = 0
    content_hash: int | None = None
    shard_hash: int | None = None
    manifest_hash: int | None = None
    values: Mapping[str, Scalar] = field(default_factory=dict)


class CheckpointStatus(StrEnum):
    SAVED = "saved"  # the manifest is committed
    VERIFIED = "verified"  # sizes and hashes were read back and agree, and all values are finite
    FAILED = "failed"  # the save or the verification failed; `reason` says why
    LOADED = "loaded"  # training resumed from it


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """One thing that happened to one checkpoint. `step` counts the optimizer steps that it contains, so a run that
    loads it continues with step number `step`."""

    attempt: int
    step: int
    rank: int
    path: str
    status: CheckpointStatus
    ts_ns: int = 0
    seconds: float = 0.0
    size_bytes: int = 0
    reason: str = ""


class EventKind(StrEnum):
    """Kinds of run events. Importers and hooks may use further names; an event's `kind` is a plain string."""

    RUN_START = "run_start"
    ATTEMPT_START = "attempt_start"
    ATTEMPT_END = "attempt_end"
    CONFIG = "config"
    RESUME = "resume"
    ROLLBACK = "rollback"
    SKIP = "skip"
    EXCEPTION = "exception"
    FAULT_INJECTED = "fault_injected"  # written by trainer/faults for the bench and the demo; suspects never read it
    TELEMETRY_LOST = "telemetry_lost"
    EVAL_PAUSE = "eval_pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened once. `data` holds JSON values."""

    attempt: int
    step: int
    rank: int
    kind: str
    message: str = ""
    ts_ns: int = 0
    data: Mapping[str, object] = field(default_factory=dict)


Record = StepRecord | LayerSample | BatchRecord | CheckpointRecord | RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A line of a foreign log, or a frame of our own, that could not be read. `line` is 1-based; for binary files it
    is the byte offset."""

    line: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """Where records come from and how well they could be read (`run` in the JSON report)."""

    name: str
    source: str
    format: str
    signals: tuple[str, ...] = ()
    rows_read: int = 0
    rows_kept: int = 0
    rows_rejected: int = 0
    rejected: tuple[Rejected, ...] = ()  # the first 20
    notes: tuple[str, ...] = ()  # unknown columns that were kept, guesses that were made
