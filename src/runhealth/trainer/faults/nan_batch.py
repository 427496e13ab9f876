"""One rank's batch holds a NaN: a feature or a sample weight that was never finite."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor


class NanBatch(Fault):
    """At `step`, the gain of `severity` samples of `rank` is NaN, and so are their embedded inputs."""

    name = "nan_batch"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: int = 1) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault nan_batch: expected a rank below {context.config.world}, met {rank}")
        self.step, self.rank, self.severity = step, rank, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name, cause="bad_shard", onset_step=self.step, last_step=self.step, ranks=(self.rank,)
        )

    def gain(self, step: int, gain: "Tensor") -> "Tensor":
        if step != self.step or self.context.rank != self.rank:
            return gain
        gain = gain.clone()
        gain[: self.severity] = float("nan")
        return gain


FAULT = NanBatch
