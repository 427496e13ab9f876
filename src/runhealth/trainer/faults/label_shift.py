"""Labels that are not the next tokens on one rank: a bug in what packs the samples of a shard."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor


class LabelShift(Fault):
    """For `steps` steps from `step` on, the labels of a share `severity` of the rows of `rank` are shifted by one more
    position."""

    name = "label_shift"

    def __init__(
        self, context: FaultContext, *, step: int = 200, steps: int = 20, rank: int = 1, severity: float = 1.0
    ) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault label_shift: expected 0 < severity <= 1, met {severity}")
        self.step, self.steps, self.rank, self.severity = step, steps, rank, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="bad_shard",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=(self.rank,),
        )

    def tokens(self, step: int, inputs: "Tensor", labels: "Tensor") -> "tuple[Tensor, Tensor]":
        if not self.step <= step < self.step + self.steps or self.context.rank != self.rank:
            return inputs, labels
        shifted = labels.clone()
        rows = round(self.severity * len(labels))
        shifted[:rows] = labels[:rows].roll(-1, dims=-1)
        return inputs, shifted


FAULT = LabelShift
