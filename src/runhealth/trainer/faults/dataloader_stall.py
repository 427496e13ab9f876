"""Waiting for data: the storage (all ranks), or one host's loader (one rank)."""

import random

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class DataloaderStall(Fault):
    """From `step` on, for `steps` steps (0: for good), a share `share` of the steps waits `severity` seconds longer for
    data, on `rank` or, with -1, on all ranks."""

    name = "dataloader_stall"
    transient = True

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 0,
        rank: int = -1,
        share: float = 0.6,
        severity: float = 1.0,
    ) -> None:
        super().__init__(context)
        world = context.config.world
        if not -1 <= rank < world:
            raise ConfigError(f"fault dataloader_stall: expected a rank below {world}, or -1 for all, met {rank}")
        self.step, self.steps, self.share, self.severity = step, steps, share, severity
        self.ranks = tuple(range(world)) if rank < 0 else (rank,)

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="dataloader_stall",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=self.ranks,
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        active = step >= self.step and (not self.steps or step < self.step + self.steps)
        if not active or phase != "data" or self.context.rank not in self.ranks:
            return 0.0
        draw = random.Random(self.context.config.seed * 1_000_003 + step)  # all ranks wait for the same storage
        first = step == self.step
        return self.severity * (0.7 + 0.6 * draw.random()) if first or draw.random() < self.share else 0.0


FAULT = DataloaderStall
