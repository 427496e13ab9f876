"""Some rank computes longer than the others and holds them up."""

import random

from runhealth.storage.errors import ConfigError
from runhealth.storage.records import Scalar
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase

_MODES = ("rank", "stage", "length")
_LENGTH_SHARE = 0.5  # of the steps have a long sequence


class ComputeStraggler(Fault):
    """From `step` on, for `steps` steps (0: for good), a step's compute takes `severity` seconds longer.

    `mode`: rank (always `rank`: its hardware), stage (the last half of the ranks, as after an uneven partition into
    stages), or length (in about half of the steps some rank, another one each time, whose sequences are longer).
    """

    name = "compute_straggler"
    transient = True

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 0,
        rank: int = 1,
        mode: str = "rank",
        severity: float = 0.2,
    ) -> None:
        super().__init__(context)
        world = context.config.world
        if mode not in _MODES:
            raise ConfigError(f"fault compute_straggler: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if not 0 <= rank < world:
            raise ConfigError(f"fault compute_straggler: expected a rank below {world}, met {rank}")
        self.step, self.steps, self.mode, self.severity = step, steps, mode, severity
        self.ranks = {
            "rank": (rank,),
            "stage": tuple(range(world // 2, world)),
            "length": tuple(range(world)),
        }[mode]

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="compute_straggler",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=self.ranks,
        )

    def slow(self, step: int) -> bool:
        """Whether this rank is slow at a step."""
        if step < self.step or (self.steps and step >= self.step + self.steps):
            return False
        if self.mode != "length":
            return self.context.rank in self.ranks
        draw = random.Random(self.context.config.seed * 1_000_003 + step)
        return draw.random() < _LENGTH_SHARE and draw.randrange(len(self.ranks)) == self.context.rank

    def stall_s(self, step: int, phase: Phase) -> float:
        share = {"forward": 1 / 3, "backward": 2 / 3}.get(phase, 0.0)
        return share * self.severity if share and self.slow(step) else 0.0

    def logged(self, step: int, values: dict[str, Scalar]) -> dict[str, Scalar]:
        """Long sequences show in the sum of squared lengths, where it is recorded."""
        if self.mode == "length" and "sum_len_sq" in values and self.slow(step):
            values["sum_len_sq"] = int(values["sum_len_sq"] * (1.0 + 4.0 * self.severity))
        return values


FAULT = ComputeStraggler
