"""Low precision: counters of fp8/fp16 modules, the loss scale, and steps that the scaler skipped.

A module takes part by having `runhealth_precision_stats()`. It returns, by tensor name (such as `x`, `w`, `g`):

    {"amax": largest |value| of the latest tensor before the cast,
     "amax_believed": the amax that the latest scale was chosen for,
     "overflow_count": elements beyond the range before the cast,          counted since the module was made
     "underflow_count": non-zero elements that the cast turned into zero,  counted since the module was made
     "elements": elements that were cast,                                  counted since the module was made}

Every key is optional, every value a number or a tensor of one element; leave tensors on their device. The counters
never go back, so any number of readers may read them: a reader takes differences. A counter that did go back (the
module was made anew or loaded) counts from zero.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.layers import clean_name
from runhealth.instrument.scalars import Fetched

COUNTERS = ("overflow_count", "underflow_count", "elements")
LEVELS = ("amax", "amax_believed")


@runtime_checkable
class HasPrecisionStats(Protocol):
    def runhealth_precision_stats(self) -> Mapping[str, Mapping[str, Tensor | float]]: ...


class PrecisionProbe(Probe):
    """Layer samples are written every `layers_every` steps, and for a tensor that overflows in this step."""

    name = "precision"

    def __init__(self, model: nn.Module | None, layers_every: int) -> None:
        named = () if model is None else model.named_modules()
        self._modules: list[tuple[str, HasPrecisionStats]] = [
            (clean_name(name), module) for name, module in named if isinstance(module, HasPrecisionStats)
        ]
        self._every = layers_every
        self._read: dict[tuple[str, str], Fetched | float] = {}
        # the first reading is the zero: counts of an earlier attempt or of a warm-up are not this step's
        self._before: dict[tuple[str, str], float] = {}
        self._baseline_taken = False

    def begin(self, draft: Draft) -> None:
        if self._baseline_taken or not self._modules:
            return
        self._baseline_taken = True
        self._read_all(draft)
        draft.scalars.fetch()
        for (tensor, key), value in self._numbers().items():
            if key in COUNTERS:
                self._before[tensor, key] = value

    def collect(self, draft: Draft) -> None:
        self._read_all(draft)

    def _read_all(self, draft: Draft) -> None:
        self._read = {}
        for name, module in self._modules:
            for tensor, stats in module.runhealth_precision_stats().items():
                for key, value in stats.items():
                    if key in COUNTERS or key in LEVELS:
                        kept = draft.scalars.put(value) if isinstance(value, Tensor) else float(value)
                        self._read[f"{name}.{tensor}" if name else tensor, key] = kept

    def _numbers(self) -> dict[tuple[str, str], float]:
        return {at: value.value if isinstance(value, Fetched) else value for at, value in self._read.items()}

    def finish(self, draft: Draft) -> None:
        if not self._read:
            return
        samples: dict[str, dict[str, float | int]] = {}
        totals = dict.fromkeys(COUNTERS, 0)
        seen: set[str] = set()
        for (tensor, key), value in self._numbers().items():
            sample = samples.setdefault(tensor, {})
            seen.add(key)
            if key in LEVELS:
                sample[key] = value
                continue
            before = self._before.get((tensor, key), 0.0)
            self._before[tensor, key] = value
            sample[key] = int(value - before if value >= before else value)
            totals[key] += int(sample[key])
        ratios = [
            sample["amax"] / sample["amax_believed"]
            for sample in samples.values()
            if "amax" in sample and sample.get("amax_believed", 0) > 0
        ]
        for key in ("overflow_count", "underflow_count"):
            if key in seen:
                draft.values[key] = totals[key]
        if ratios:
            draft.values["amax_ratio"] = math.nan if any(map(math.isnan, ratios)) else max(ratios)
        on_cadence = self._every and draft.number % self._every == 0
        for tensor, sample in samples.items():
            if on_cadence or sample.get("overflow_count", 0) > 0:
                draft.layer(tensor).update(sample)

    def close(self) -> None:
        self._modules = []


class LossScaleProbe(Probe):
    """loss_scale is the scale that this step's loss was multiplied with. step_skipped is 1 if the scaler found a
    non-finite gradient and left the optimizer step out."""

    name = "loss_scale"

    def __init__(self, scaler: torch.amp.GradScaler | None, *, leader: bool) -> None:
        self._scaler = scaler if scaler is not None and leader and scaler.is_enabled() else None
        self._scale: Fetched | float | None = None
        self._skipped: list[Fetched | int] = []

    def begin(self, draft: Draft) -> None:
        self._skipped = []
        if self._scaler is not None:
            self._scale = self._current(draft)

    def before_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        """The hook of a step that takes place. Fused optimizers are called anyway and skip on their own."""
        if self._scaler is None:
            return
        found = getattr(optimizer, "found_inf", None)
        self._skipped.append(draft.scalars.put(found) if isinstance(found, Tensor) else 0)

    def collect(self, draft: Draft) -> None:
        if self._scaler is not None and not self._skipped:
            after = self._current(draft)
            self._fell: Callable[[], bool] = lambda: _number(after) < _number(self._scale)

    def finish(self, draft: Draft) -> None:
        if self._scaler is None:
            return
        draft.values["loss_scale"] = _number(self._scale)
        if self._skipped:
            draft.values["step_skipped"] = int(any(_number(skipped) > 0 for skipped in self._skipped))
        else:  # no optimizer step was seen: the scaler skipped it if, and only if, it lowered the scale
            draft.values["step_skipped"] = int(self._fell())

    def _current(self, draft: Draft) -> Fetched | float:
        assert self._scaler is not None
        scale = getattr(self._scaler, "_scale", None)  # get_scale() would wait for the device
        return draft.scalars.put(scale) if isinstance(scale, Tensor) else float(self._scaler.get_scale())

    def close(self) -> None:
        self._scaler = None


def _number(value: Fetched | float | None) -> float:
    if isinstance(value, Fetched):
        return value.value
    return math.nan if value is None else float(value)
