"""Numbers of a replay: which channel is scored, in which steps, how far a replay is from the record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runhealth.diagnose.findings import Finding
from runhealth.diagnose.replays import VANISHED_BELOW
from runhealth.diagnose.robust import median
from runhealth.storage.errors import ReplayError
from runhealth.storage.reader import RunReader

BEFORE_STEPS = 16  # before the onset: their median is the baseline
LEAST_BEFORE = 3
LOOK_STEPS = 48  # after the onset at most; a slower climb is cut there
SCORED_STEPS, GAP_STEPS = 4, 3
AFTER_STEPS = 2  # the replay goes on at least so long after the onset
HALF = 0.5  # scored are the steps in which the record is over half its largest excess
HUGE_NATS = 10.0  # excess of a value that is not finite
ODD_FACTOR = 2.0  # a rank whose excess is so many times the largest of the others is where it happens
EXACT_SIGNALS = ("loss", "grad_norm", "grad_norm_rank")

Row = Mapping[str, Any]  # signal -> value
Steps = dict[int, dict[int, Row]]  # step -> rank -> row
CHANNELS: Mapping[str, tuple[str, str]] = {
    "loss_spike": ("loss", "nats"),
    "loss_divergence": ("loss", "nats"),
    "data_corrupt": ("loss", "nats"),
    "non_finite": ("non_finite", "of the steps"),
    "loss_scale_collapse": ("step_skipped", "of the steps"),
    "fp_overflow": ("overflow_count", "log elements"),
    "clip_breach": ("grad_norm", "log units"),
    "gradient_spike": ("grad_norm", "log units"),
    "update_jump": ("update_ratio", "log units"),
    "rank_outlier": ("rank_gap", "log units"),
}


def read_steps(reader: RunReader, first: int, last: int, attempt: int | None = None) -> Steps:
    """The rows of steps `first` to `last` as the attempt met them: each step of the newest attempt up to `attempt` that
    has it. Where an attempt began, the steps that an older one had made from there on are of a past it never saw."""
    rows = reader.sql(
        "SELECT * FROM steps WHERE step BETWEEN ? AND ? AND attempt <= ? ORDER BY attempt, step, rank",
        (first, last, attempt if attempt is not None else 1 << 30),
    )
    found: Steps = {}
    newest: int | None = None
    for row in rows.iter_rows(named=True):
        step, rank = row["step"], row["rank"]
        if row["attempt"] != newest:
            newest = row["attempt"]
            found = {older: ranks for older, ranks in found.items() if older < step}
        ranks = found.setdefault(step, {})
        if rank >= 0:
            ranks[rank] = row
    return dict(sorted(found.items()))


def value_of(rows: Mapping[int, Row], channel: str) -> float | None:
    """One number for a step, or None if it was not recorded. Non-finite values stay what they are."""
    if channel == "non_finite":
        seen = [v for name in ("loss", "grad_norm") for v in _values(rows, name)]
        return float(any(not math.isfinite(v) for v in seen)) if seen else None
    if channel == "rank_gap":
        norms = sorted(v for v in _values(rows, "grad_norm_rank") if v > 0)
        return math.log(norms[-1] / norms[0]) if len(norms) > 1 else None
    values = _values(rows, channel)
    if not values:
        return None
    if channel == "overflow_count":
        return math.log1p(sum(values))
    if channel == "step_skipped":
        return max(values)
    mean = sum(values) / len(values)
    return mean if channel == "loss" or not mean > 0 else math.log(mean)


def _values(rows: Mapping[int, Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows.values() if row.get(name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is scored: `steps` of the record in which `channel` was far over its `baseline`. `rank_baselines` are those
    of the loss of each rank, `record_ranks` its scores, `odd_rank` the one on which it happened, if it is one."""

    channel: str
    unit: str
    baseline: float
    score: float
    steps: tuple[int, ...]
    rank_baselines: Mapping[int, float]
    record_ranks: Mapping[int, float] = field(default_factory=dict)
    odd_rank: int | None = None
    ranks: frozenset[int] = frozenset()  # that recorded the scored steps

    def excess(self, rows: Mapping[int, Row]) -> float:
        return _over(value_of(rows, self.channel), self.baseline)

    def score_of(self, played: Steps) -> float:
        """Raises ReplayError if a step is missing, or a rank in it: a replay of which a part was lost proves nothing,
        and the part that is left may well look healthy."""
        for step in self.steps:
            lost = sorted(self.ranks - played.get(step, {}).keys())
            if lost or step not in played:
                of = f" of rank {', '.join(map(str, lost))}" if lost else ""
                raise ReplayError(
                    f"expected step {step:,}{of} in the telemetry of the replay, met none: it was not written whole;"
                    " is the disk full?"
                )
        return sum(self.excess(played[step]) for step in self.steps) / len(self.steps)

    def rank_scores(self, played: Steps) -> dict[int, float]:
        """Mean excess of each rank's loss in the scored steps."""
        return {
            rank: sum(_over(_loss(played.get(step, {}).get(rank)), before) for step in self.steps) / len(self.steps)
            for rank, before in self.rank_baselines.items()
        }

    def moved(self, played: Steps, ranks: int) -> bool:
        """Whether, with the lanes swapped, the trouble went along: rank r now reads what rank r + 1 read."""
        if self.odd_rank is None:
            return False
        before, now = self.record_ranks[self.odd_rank], self.rank_scores(played)
        new_home = (self.odd_rank - 1) % ranks
        limit = VANISHED_BELOW * before
        return now.get(new_home, 0.0) >= limit > now.get(self.odd_rank, 0.0)


def target_of(finding: Finding, record: Steps) -> Target:
    """What to score of an incident. `record` are its steps and those before.

    Raises:
        ReplayError: a kind that no replay can show, or too little was recorded.
    """
    if finding.kind not in CHANNELS:
        raise ReplayError(
            f"{finding.id} is a {finding.kind.replace('_', ' ')}: a replay answers what loss, gradients and updates do,"
            f" that is {', '.join(kind.replace('_', ' ') for kind in CHANNELS)}"
        )
    channel, unit = CHANNELS[finding.kind]
    onset = finding.onset_step
    before = [step for step in record if step < onset][-BEFORE_STEPS:]
    usual = sorted(v for step in before if (v := value_of(record[step], channel)) is not None and math.isfinite(v))
    if len(usual) < LEAST_BEFORE:
        raise ReplayError(
            f"{finding.id}: expected {channel} in at least {LEAST_BEFORE} steps before the onset at step {onset:,},"
            f" met {len(usual)}: there is no level to compare with"
        )
    baseline = median(usual)
    excesses = {
        step: _over(value_of(rows, channel), baseline)
        for step, rows in record.items()
        if onset <= step <= onset + LOOK_STEPS
    }
    largest = max(excesses.values(), default=0.0)
    spread = median(sorted(abs(v - baseline) for v in usual))
    if not largest > max(2.0 * spread, 1e-6):
        raise ReplayError(
            f"{finding.id}: {channel} stays within {largest:.2g} {unit} of its level in the {LOOK_STEPS} steps after"
            " the onset: there is nothing that could vanish"
        )
    scored = _together([step for step, excess in excesses.items() if excess >= HALF * largest])
    ranks = sorted({rank for step in scored for rank, row in record[step].items() if _loss(row) is not None})
    rank_baselines = {
        rank: median(sorted(v for step in before if (v := _loss(record[step].get(rank))) is not None and v == v))
        for rank in ranks
    }
    target = Target(
        channel=channel,
        unit=unit,
        baseline=baseline,
        score=sum(excesses[step] for step in scored) / len(scored),
        steps=scored,
        rank_baselines={rank: value for rank, value in rank_baselines.items() if math.isfinite(value)},
        ranks=frozenset(rank for step in scored for rank in record[step]),
    )
    by_rank = target.rank_scores(record)
    return replace(target, record_ranks=by_rank, odd_rank=_odd(by_rank))


def _together(steps: Sequence[int]) -> tuple[int, ...]:
    """The first ones, as far as they belong together: a later burst may be another one, that any change would move."""
    kept = list(steps[:1])
    for step in steps[1:SCORED_STEPS]:
        if step - kept[-1] > GAP_STEPS:
            break
        kept.append(step)
    return tuple(kept)


def last_step(target: Target, onset: int, recorded: int) -> int:
    """Where a replay may end."""
    return min(recorded, max(target.steps[-1], onset + AFTER_STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How a replay compares with the record from its first step on."""

    equal_steps: int
    parted_step: int | None
    parted_ranks: tuple[int, ...]
    band: float  # largest difference of the loss before `onset`, nats


def compare(record: Steps, played: Steps, onset: int) -> Match:
    """Bit by bit, over all ranks, in the signals of `EXACT_SIGNALS` that both have."""
    equal, band = 0, 0.0
    parted: int | None = None
    ranks: tuple[int, ...] = ()
    for step in sorted(played):
        theirs = record.get(step, {})
        different = tuple(rank for rank, row in played[step].items() if not _same(theirs.get(rank), row))
        if step < onset:
            band = max([band, *(_gap(theirs.get(rank), row) for rank, row in played[step].items())])
        if different and parted is None:
            parted, ranks = step, different
        equal += parted is None
    return Match(
        equal_steps=equal, parted_step=parted, parted_ranks=_first_to_part(record, played, parted, ranks), band=band
    )


def _first_to_part(record: Steps, played: Steps, step: int | None, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks whose own loss or own gradient differs, where not all do: what is reduced differs on all at once."""
    if step is None:
        return ()
    own = (
        tuple(
            rank
            for rank in ranks
            if not all(_equal(record[step][rank].get(n), played[step][rank].get(n)) for n in ("loss", "grad_norm_rank"))
        )
        if step in record and all(rank in record[step] for rank in ranks)
        else ()
    )
    return own or ranks


def _same(recorded: Row | None, played: Row) -> bool:
    if recorded is None:
        return False
    return all(_equal(recorded.get(name), played.get(name)) for name in EXACT_SIGNALS)


def _equal(one: Any, other: Any) -> bool:
    return one == other or (one is not None and other is not None and one != one and other != other)


def _gap(recorded: Row | None, played: Row) -> float:
    one, other = _loss(recorded), _loss(played)
    if one is None or other is None or _equal(one, other):
        return 0.0
    gap = abs(one - other)
    return gap if math.isfinite(gap) else HUGE_NATS


def _loss(row: Row | None) -> float | None:
    value = row.get("loss") if row is not None else None
    return float(value) if value is not None else None


def _over(value: float | None, baseline: float) -> float:
    if value is None:
        return 0.0
    return min(HUGE_NATS, value - baseline) if math.isfinite(value) else HUGE_NATS


def _odd(scores: Mapping[int, float]) -> int | None:
    ranked: Sequence[tuple[float, int]] = sorted(((score, rank) for rank, score in scores.items()), reverse=True)
    if len(ranked) < 2 or ranked[0][0] <= 0:
        return None
    return ranked[0][1] if ranked[0][0] >= ODD_FACTOR * max(ranked[1][0], 0.0) else None
