"""A slow link: transfers take longer in one group of ranks, whatever these compute."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class CommStraggler(Fault):
    """From `step` on, for `steps` steps (0: for good), collectives take ranks `rank` and `rank` + 1 `severity` seconds
    longer: both ends of one link."""

    name = "comm_straggler"
    transient = True

    def __init__(
        self, context: FaultContext, *, step: int = 200, steps: int = 0, rank: int = 0, severity: float = 0.2
    ) -> None:
        super().__init__(context)
        world = context.config.world
        if not 0 <= rank < world:
            raise ConfigError(f"fault comm_straggler: expected a rank below {world}, met {rank}")
        self.step, self.steps, self.severity = step, steps, severity
        self.ranks = tuple(sorted({rank, (rank + 1) % world}))

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="comm_straggler",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=self.ranks,
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        active = step >= self.step and (not self.steps or step < self.step + self.steps)
        return self.severity if active and phase == "comm" and self.context.rank in self.ranks else 0.0


FAULT = CommStraggler
