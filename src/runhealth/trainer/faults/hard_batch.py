"""Benign: a few batches of one rank are hard but clean text of another kind."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel
from runhealth.trainer.faults.curriculum import mixed


class HardBatch(Fault):
    """For `steps` steps from `step` on, a share `severity` of the samples of `rank` comes from `shard`, which must be
    in the data's manifest."""

    name = "hard_batch"

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 2,
        rank: int = 1,
        shard: int = 0,
        severity: float = 1.0,
    ) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault hard_batch: expected 0 < severity <= 1, met {severity}")
        self.step, self.steps, self.rank, self.shard, self.severity = step, steps, rank, shard, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=(self.rank,),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        active = self.step <= step < self.step + self.steps and self.context.rank == self.rank
        return mixed(parts, self.shard, self.severity) if active else parts


FAULT = HardBatch
