"""Reduced gradients of the step before are used again: the reduce reads or returns a buffer before it was written.

A reduction stream that does not wait for the stream that fills the bucket, or the reverse:
github.com/deepspeedai/DeepSpeed/issues/5523, 5606 and 8061. All ranks get the same wrong result, so replicas agree.
"""

import random
from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn

_SHARE = 0.7  # of the steps lose the race


class StaleBucket(Fault):
    """From `step` on, for `steps` steps (0: for good), in most of the steps the last share `severity` of each bucket
    of reduced gradients (without buckets: of the parameters) is what the reduce gave in the step before."""

    name = "stale_bucket"

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 0, severity: float = 0.5) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault stale_bucket: expected 0 < severity <= 1, met {severity}")
        self.step, self.steps, self.severity = step, steps, severity
        self._last: dict[int, tuple[int, Tensor]] = {}  # bucket -> step, what the reduce gave

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="silent_corruption",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
        )

    def loses(self, step: int) -> bool:
        """Whether the race is lost at a step; alike on all ranks."""
        if step < self.step or (self.steps and step >= self.step + self.steps):
            return False
        return step == self.step or random.Random(self.context.config.seed * 1_000_003 + step).random() < _SHARE

    def reduced(self, step: int, bucket: int, buffer: "Tensor") -> None:
        self._race(step, bucket, buffer, buffer.numel() - max(1, round(self.severity * buffer.numel())))

    def after_backward(self, step: int, model: "nn.Module") -> None:
        if self.context.replicated:
            return  # the buckets were met by `reduced`
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        first = len(gradients) - max(1, round(self.severity * len(gradients)))
        for index, gradient in enumerate(gradients[first:], start=first):
            self._race(step, index, gradient, 0)

    def _race(self, step: int, key: int, now: "Tensor", first: int) -> None:
        """Put the values of the step before in the place of those from element `first` on."""
        if step < self.step - 1:
            return
        kept = now.clone()
        at, last = self._last.get(key, (-1, kept))
        if self.loses(step) and at == step - 1 and last.shape == now.shape:
            now.view(-1)[first:] = last.view(-1)[first:]
        self._last[key] = step, kept


FAULT = StaleBucket
