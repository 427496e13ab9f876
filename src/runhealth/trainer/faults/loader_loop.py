"""After a resume one rank's loader goes through the few batches that were left, again and again.

A stateful loader with persistent workers iterates over the rest of the interrupted epoch only, in every epoch to come:
github.com/huggingface/datasets/issues/7447.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class LoaderLoop(Fault):
    """From `step` on, `rank` reads the `severity` batches that begin at `step` in turn: with 1, the same one each
    time."""

    name = "loader_loop"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: int = 4) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault loader_loop: expected a rank below {context.config.world}, met {rank}")
        if severity < 1:
            raise ConfigError(f"fault loader_loop: expected severity >= 1 batch, met {severity}")
        self.step, self.rank, self.severity = step, rank, severity

    def label(self) -> FaultLabel:
        """The first `severity` batches are the right ones; the fault begins with the first that comes again."""
        return FaultLabel(
            fault=self.name,
            cause="data_order",
            onset_step=self.step + self.severity,
            last_step=None,
            ranks=(self.rank,),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if step < self.step or self.context.rank != self.rank:
            return parts
        return self.context.plan.batch(self.step + (step - self.step) % self.severity, self.rank)


FAULT = LoaderLoop
