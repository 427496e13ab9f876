"""The log does not say what happened: a loss of 0, an old mean or nothing in the place of NaN.

What it hides is real: from `step` on the weights hold a NaN.
"""

import math
from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.storage.records import Scalar
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn

_MODES = ("zero", "mean", "absent", "repeat")


class LyingLog(Fault):
    """A non-finite loss is logged as 0 (mode zero), as the mean of the losses before (mean), not at all (absent), or as
    the last one again (repeat)."""

    name = "lying_log"

    def __init__(self, context: FaultContext, *, step: int = 200, mode: str = "zero") -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault lying_log: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        self.step, self.mode = step, mode
        self._sum, self._count, self._last = 0.0, 0, 0.0

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="reporting_artifact",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def before_step(self, step: int, model: "nn.Module") -> None:
        if step != self.step:
            return
        import torch

        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        with torch.no_grad():
            vectors[-1][0] = math.nan  # the scale of a norm: every token meets it

    def logged(self, step: int, values: dict[str, Scalar]) -> dict[str, Scalar]:
        del step
        loss = values.get("loss")
        if loss is None:
            return values
        if math.isfinite(loss):
            self._sum, self._count, self._last = self._sum + loss, self._count + 1, float(loss)
        elif self.mode == "absent":
            del values["loss"]
        else:
            mean = self._sum / max(1, self._count)
            values["loss"] = {"zero": 0.0, "mean": mean, "repeat": self._last}[self.mode]
        return values


FAULT = LyingLog
