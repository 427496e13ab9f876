"""What the engine says: alarms, incidents, evidence, findings, verdicts. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from runhealth.diagnose.plans import RollbackPlan
from runhealth.diagnose.replays import Replayed
from runhealth.storage.records import SourceInfo

UNDETERMINED = "undetermined"


def probability_text(probability: float) -> str:
    """Two digits, and never the certainty that rounding would claim: 0.93, >0.99, <0.01."""
    if probability > 0.995:
        return ">0.99"
    return "<0.01" if probability < 0.005 else f"{probability:.2f}"


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def level(self) -> int:
        return ("info", "warning", "error").index(self.value)


class Outcome(StrEnum):
    """How an incident ended. `ONGOING`: the data ends before it can be told."""

    TRANSIENT = "transient"
    RECOVERING = "recovering"
    NON_RECOVERING = "non_recovering"
    ONGOING = "ongoing"
    NONE = "none"


class Status(StrEnum):
    IMPLICATED = "implicated"
    EXONERATED = "exonerated"
    INCONCLUSIVE = "inconclusive"
    NOT_OBSERVED = "not_observed"  # the signals it needs were not recorded
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One detector, one channel, one moment. `onset_step` is where the channel first left its habit."""

    detector: str
    kind: str
    signal: str
    attempt: int
    step: int
    onset_step: int
    score: float
    value: float
    baseline: float
    ranks: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    message: str = ""
    severity: Severity | None = None  # set for facts, which have no outcome to derive it from
    end_step: int | None = None
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Alarms of one cause. The onset is that of the earliest channel."""

    id: str
    attempt: int
    onset_step: int
    alarms: tuple[Alarm, ...]
    last_alarm_step: int

    @property
    def kind(self) -> str:
        return self.alarms[0].kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One claim of a suspect. `weight_nats` is a log-likelihood ratio: positive speaks for the suspect, negative
    against it. `query` recomputes `value` from `run.duckdb`; it is empty for imported logs."""

    claim: str
    weight_nats: float
    steps: tuple[int, int] | None = None
    ranks: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    value: float | None = None
    baseline: float | None = None
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    signal: str
    would_tell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectResult:
    suspect: str
    status: Status
    probability: float
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[Missing, ...] = ()
    error: str = ""  # the traceback's last line, when it crashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """`action`: rollback_and_skip, rollback_and_repair, continue, repair, evict_rank, investigate or none."""

    action: str
    reason: str = ""
    plan: RollbackPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one incident, or one fact about the log, comes to. `suspects` is sorted by probability and holds
    `undetermined`; it is empty for findings without a cause to look for."""

    id: str
    code: str
    kind: str
    severity: Severity
    outcome: Outcome
    attempt: int
    onset_step: int
    peak_step: int
    end_step: int | None
    summary: str
    count: int = 1
    ranks: tuple[int, ...] | None = None
    signals: tuple[str, ...] = ()
    lead_steps: Mapping[str, int] = field(default_factory=dict)  # channel -> steps before the loss moved
    suspects: tuple[SuspectResult, ...] = ()
    verdict: str = UNDETERMINED
    remedy: Remedy = Remedy(action="none")
    missing: tuple[Missing, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)
    offered: RollbackPlan | None = None  # a plan that is possible but not advised: training came back by itself
    replay: Replayed | None = None  # what `diagnose replay` showed of it, if it was called


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSummary:
    attempt: int
    first_step: int
    last_step: int
    superseded_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything `diagnose` prints. `curves` are short, decimated series for sparklines and charts, by signal."""

    source: SourceInfo
    attempts: tuple[AttemptSummary, ...]
    findings: tuple[Finding, ...]
    missing: tuple[Missing, ...]
    first_step: int | None
    last_step: int | None
    last_ts_ns: int = 0
    curves: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    late_records: int = 0  # records that came after their step had been judged
    window: tuple[int, int] | None = None  # first and last step of the stretch that was judged; None: all
