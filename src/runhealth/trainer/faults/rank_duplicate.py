"""Two data-parallel ranks read the same data: a sampler that was given the wrong rank."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class RankDuplicate(Fault):
    """From `step` on, `rank` and the `severity` - 1 ranks after it read what the rank before them reads."""

    name = "rank_duplicate"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: int = 1) -> None:
        super().__init__(context)
        world = context.config.world
        if not 0 <= rank < world or not 1 <= severity < world:
            raise ConfigError(
                f"fault rank_duplicate: expected rank and severity below {world}, met {rank} and {severity}"
            )
        self.step, self.original = step, (rank - 1) % world
        self.ranks = tuple(sorted((rank + i) % world for i in range(severity)))

    def label(self) -> FaultLabel:
        return FaultLabel(fault=self.name, cause="data_order", onset_step=self.step, last_step=None, ranks=self.ranks)

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if step < self.step or self.context.rank not in self.ranks:
            return parts
        return self.context.plan.batch(step, self.original)


FAULT = RankDuplicate
