"""The loss that is logged is the right one times a constant: a mean became a sum, or is taken twice.

After an upgrade the loss of a run with gradient accumulation was reported as many times too high as there were
micro-batches, with the same gradients: github.com/huggingface/transformers/issues/34263 and pull/35207.
"""

from runhealth.storage.errors import ConfigError
from runhealth.storage.records import Scalar
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class ScaledLog(Fault):
    """From `step` on, the training loss is logged as `factor` times what it is, on all ranks."""

    name = "scaled_log"

    def __init__(self, context: FaultContext, *, step: int = 200, factor: float = 4.0) -> None:
        super().__init__(context)
        if factor <= 0 or factor == 1:
            raise ConfigError(f"fault scaled_log: expected a factor > 0 other than 1, met {factor}")
        self.step, self.factor = step, factor

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="reporting_artifact",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def logged(self, step: int, values: dict[str, Scalar]) -> dict[str, Scalar]:
        if step >= self.step and "loss" in values:
            values["loss"] *= self.factor
        return values


FAULT = ScaledLog
