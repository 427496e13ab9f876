"""Memory that is held and never given back: the floor of what is allocated rises in a line."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class MemoryGrowth(Fault):
    """From `step` on, `rank` or, with -1, every rank holds `severity` bytes more with each step."""

    name = "memory_growth"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = -1, severity: int = 1 << 20) -> None:
        super().__init__(context)
        world = context.config.world
        if not -1 <= rank < world:
            raise ConfigError(f"fault memory_growth: expected a rank below {world}, or -1 for all, met {rank}")
        self.step, self.severity = step, severity
        self.ranks = tuple(range(world)) if rank < 0 else (rank,)

    def label(self) -> FaultLabel:
        return FaultLabel(fault=self.name, cause="memory", onset_step=self.step, last_step=None, ranks=self.ranks)

    def held_bytes(self, step: int) -> int:
        mine = self.context.rank in self.ranks
        return self.severity * (step - self.step + 1) if mine and step >= self.step else 0


FAULT = MemoryGrowth
