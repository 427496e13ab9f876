"""Whether the cause of an incident is still at work: a loss that came back under it may leave again."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from runhealth.diagnose.case import Case
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median

LAST_FRAMES = 16
BAD_BATCHES = "bad_batches"  # counted from the batches, no signal
LEAST_FRAMES = 4
LR_FACTOR = 1.4
RATIO_FACTOR = 1.7
CLIP_FACTOR, NORM_FACTOR = 5.0, 3.0
LEAST_ELEMENTS, COUNT_FACTOR = 16.0, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The cause lasts while the median of `signal` over the last frames is over `above`."""

    signal: str
    above: float
    sentence: str


def limit_of(verdict: str, case: Case) -> Limit | None:
    """What a cause must come under to be over; None for a cause that is over by itself, or was not measured."""
    if verdict == "lr_change":
        jumps = [a for a in case.alarms("lr") if a.value > a.baseline > 0]
        if jumps:
            first = min(jumps, key=lambda a: a.onset_step)
            return Limit(
                signal="lr",
                above=LR_FACTOR * first.baseline,
                sentence=f"the learning rate is still off: its course led to {first.baseline:.3g}",
            )
    elif verdict == "fp_overflow" and case.has("overflow_count"):
        habit = Baseline(512, least=8)
        habit.extend(float(t) for f in case.before if (t := f.total("overflow_count")) is not None)
        usual = habit.quantile(0.98) if habit.ready else 0.0
        return Limit(
            signal="overflow_count",
            above=max(LEAST_ELEMENTS, COUNT_FACTOR * usual),
            sentence="values still overflow",
        )
    elif verdict in ("optimizer_state", "adam_staleness"):
        ratio = case.baseline("update_ratio")
        if ratio.ready and ratio.center > 0:
            above = RATIO_FACTOR * ratio.center
            return Limit(signal="update_ratio", above=above, sentence="updates are still too large")
    elif verdict == "bad_shard":
        return Limit(signal=BAD_BATCHES, above=0.5, sentence="bad batches are still being read")
    elif verdict == "clip_breach":
        habit = case.baseline("grad_norm")
        thresholds = [float(t) for f in case.before if (t := f.get("clip_threshold")) is not None]
        if habit.ready and thresholds:
            above = max(CLIP_FACTOR * thresholds[-1], NORM_FACTOR * habit.center)
            return Limit(signal="grad_norm", above=above, sentence="the gradient norm is still far over the threshold")
    return None


def lasts(limit: Limit | None, frames: Iterable[Frame], attempt: int) -> str:
    """A sentence that says the cause is still there; empty if it is over or too little is known."""
    if limit is None:
        return ""
    values: list[float] = []
    for frame in frames:
        value: float | None
        if limit.signal == BAD_BATCHES:
            value = sum(o.strong for o in frame.outliers) if frame.batches else None
        else:
            value = frame.total(limit.signal) if limit.signal == "overflow_count" else frame.get(limit.signal)
        if frame.attempt == attempt and value is not None and math.isfinite(value):
            values.append(float(value))
    last = values[-LAST_FRAMES:]
    if len(last) < LEAST_FRAMES or median(sorted(last)) <= limit.above:
        return ""
    return limit.sentence
