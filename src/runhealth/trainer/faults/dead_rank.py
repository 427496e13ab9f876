"""A rank's process is gone from one step to the next: a fatal device error, a host that went down."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import End, Fault, FaultContext, FaultLabel


class DeadRank(Fault):
    """`rank` is killed before `step`."""

    name = "dead_rank"
    transient = True

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault dead_rank: expected a rank below {context.config.world}, met {rank}")
        self.step, self.rank = step, rank

    def label(self) -> FaultLabel:
        return FaultLabel(fault=self.name, cause="dead_rank", onset_step=self.step, last_step=None, ranks=(self.rank,))

    def ends(self, step: int) -> End:
        return "dead" if step >= self.step and self.context.rank == self.rank else ""


FAULT = DeadRank
