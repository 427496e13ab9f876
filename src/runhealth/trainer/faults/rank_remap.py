"""Benign: after a resume the ranks sit on other hosts, so each reads what another one read before.

A scheduler that restarts a job may number its nodes anew (PyTorch, notes on torchrun: ranks are not stable between
restarts). The batch of all ranks together is the same, and so is every update.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import Part
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel


class RankRemap(Fault):
    """From `step` on, each rank reads the part of the batch of the rank `shift` after it."""

    name = "rank_remap"

    def __init__(self, context: FaultContext, *, step: int = 200, shift: int = 1) -> None:
        super().__init__(context)
        if not 1 <= shift < context.config.world:
            raise ConfigError(f"fault rank_remap: expected 1 <= shift < {context.config.world}, met {shift}")
        self.step, self.shift = step, shift

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if step < self.step:
            return parts
        config = self.context.config
        return self.context.plan.batch(step, (self.context.rank + self.shift) % config.dp)


FAULT = RankRemap
