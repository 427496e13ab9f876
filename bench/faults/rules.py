"""Spike rules of other projects as baselines on the same runs, written anew from their published formulas and defaults.

- OLMo-core, `SkipStepOptimizer`: loss - mean > 6 sigma of the last 128 losses, or the same of the gradient norm; after
  max(20, 64) steps. https://github.com/allenai/OLMo-core
- Lightning, `SpikeDetection`: not better than the last value and further than 2 x the mean of the last 10 from it, or
  not finite; spikes do not enter the mean. https://github.com/Lightning-AI/pytorch-lightning
- llm-foundry, `KillLossSpike`: over 2 x the mean of the last 100 in 5 steps in a row. https://github.com/mosaicml/llm-foundry
- Megatron-LM, `RerunStateMachine.is_unexpectedly_large`: at least 10 x the largest of the first 100.
  https://github.com/NVIDIA/Megatron-LM
- trainscope 1.8.1, its default (CUSUM on robust z of the last 200, slack 1, threshold 6), its z-score (3.5 over the
  last 200) and its percentile band (1 % and 99 %). All are two-sided. https://pypi.org/project/trainscope/
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Series = Mapping[int, float]
Update = Callable[[float], bool]
WARM_STEPS = 48  # alarms before are not counted, of no rule and not of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`make` gives a fresh detector: a function of the next value that says whether it raises an alarm."""

    name: str
    make: Callable[[], Update]
    norm: bool = False  # looks at the gradient norm as well

    def alarms(self, losses: Series, norms: Series) -> list[int]:
        """The steps at which the rule fires."""
        update = self.make()
        found = {step for step in sorted(losses) if update(losses[step])}
        if self.norm:
            update = self.make()
            found |= {step for step in sorted(norms) if update(norms[step])}
        return sorted(step for step in found if step >= WARM_STEPS)


def olmo_core() -> Update:
    values: deque[float] = deque(maxlen=128)

    def update(value: float) -> bool:
        fired = False
        if len(values) >= 63:
            fired = not value - statistics.fmean(values) <= 6 * _deviation(values)
        values.append(value)
        return fired

    return update


def lightning() -> Update:
    values: deque[float] = deque(maxlen=10)

    def update(value: float) -> bool:
        if not math.isfinite(value):
            return True
        if values and value > values[-1]:
            mean = statistics.fmean(values)
            if abs(value - mean) >= 2 * abs(mean):
                return True
        values.append(value)
        return False

    return update


def llm_foundry() -> Update:
    values: deque[float] = deque(maxlen=100)
    outliers = 0

    def update(value: float) -> bool:
        nonlocal outliers
        if len(values) == 100:
            outliers = outliers + 1 if value > 2 * statistics.fmean(values) else 0
        values.append(value)
        return outliers > 4

    return update


def megatron() -> Update:
    count, largest = 0, 0.0

    def update(value: float) -> bool:
        nonlocal count, largest
        if not math.isfinite(value):
            return False
        if count < 100:
            count, largest = count + 1, max(largest, abs(value))
            return False
        return abs(value) >= 10 * largest

    return update


def trainscope_cusum() -> Update:
    values: deque[float] = deque(maxlen=200)
    high = low = 0.0

    def update(value: float) -> bool:
        nonlocal high, low
        if len(values) < 30:
            values.append(value)
            return False
        center = float(np.median(values))
        sigma = max(1.4826 * float(np.median(np.abs(np.fromiter(values, float) - center))), 1e-12)
        z = (value - center) / sigma
        high, low = max(0.0, high + z - 1.0), min(0.0, low + z + 1.0)
        values.append(value)
        if high < 6.0 and -low < 6.0:
            return False
        high = low = 0.0
        return True

    return update


def trainscope_z() -> Update:
    values: deque[float] = deque(maxlen=200)

    def update(value: float) -> bool:
        fired = False
        if len(values) >= 30:
            deviation = _deviation(values)
            fired = deviation > 0 and abs(value - statistics.fmean(values)) > 3.5 * deviation
        values.append(value)
        return fired

    return update


def trainscope_percentile() -> Update:
    values: deque[float] = deque(maxlen=200)

    def update(value: float) -> bool:
        fired = False
        if len(values) >= 30:
            low, high = np.percentile(np.fromiter(values, float), (1.0, 99.0))
            fired = bool(value < low or value > high)
        values.append(value)
        return fired

    return update


def _deviation(values: deque[float]) -> float:
    array = np.fromiter(values, float)
    with np.errstate(invalid="ignore"):
        return float(array.std(ddof=1))


RULES = (
    Rule(name="OLMo-core", make=olmo_core, norm=True),
    Rule(name="Lightning", make=lightning),
    Rule(name="llm-foundry", make=llm_foundry),
    Rule(name="Megatron-LM", make=megatron),
    Rule(name="trainscope (CUSUM)", make=trainscope_cusum),
    Rule(name="trainscope (z-score)", make=trainscope_z),
    Rule(name="trainscope (percentile)", make=trainscope_percentile),
)
