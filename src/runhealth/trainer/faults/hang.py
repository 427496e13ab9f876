"""A rank never joins a collective: all step counters freeze."""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import End, Fault, FaultContext, FaultLabel


class Hang(Fault):
    """`rank` is stuck before `step`, alive but for ever."""

    name = "hang"
    transient = True

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault hang: expected a rank below {context.config.world}, met {rank}")
        self.step, self.rank = step, rank

    def label(self) -> FaultLabel:
        return FaultLabel(fault=self.name, cause="hang", onset_step=self.step, last_step=None, ranks=(self.rank,))

    def ends(self, step: int) -> End:
        return "hang" if step >= self.step and self.context.rank == self.rank else ""


FAULT = Hang
