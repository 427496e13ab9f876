"""A device gets hot: its clock goes down little by little, up again when it has cooled, and down once more.

github.com/tensorflow/tensorflow/issues/40042 ends at an overheated device; Grattafiori et al. (arXiv:2407.21783,
section 3.3.4) see throughput follow the temperature of the day.
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase

_COOLED = 0.4  # of the slowdown is left at the best moment of a cycle


class Throttle(Fault):
    """From `step` on, `rank` computes longer: by up to `severity` seconds, reached over `ramp` steps, after which it
    comes and goes in cycles of `ramp` steps."""

    name = "throttle"
    transient = True

    def __init__(
        self, context: FaultContext, *, step: int = 200, rank: int = 1, ramp: int = 12, severity: float = 0.3
    ) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault throttle: expected a rank below {context.config.world}, met {rank}")
        if ramp < 1 or severity <= 0:
            raise ConfigError(f"fault throttle: expected ramp >= 1 and severity > 0, met {ramp} and {severity}")
        self.step, self.rank, self.ramp, self.severity = step, rank, ramp, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name, cause="compute_straggler", onset_step=self.step, last_step=None, ranks=(self.rank,)
        )

    def slowdown(self, step: int) -> float:
        """Share of `severity` at a step, 0 to 1."""
        age = step - self.step
        if age < 0:
            return 0.0
        heat = (age % self.ramp + 1) / self.ramp
        return heat if age < self.ramp else _COOLED + (1.0 - _COOLED) * heat

    def stall_s(self, step: int, phase: Phase) -> float:
        share = {"forward": 1 / 3, "backward": 2 / 3}.get(phase, 0.0)
        return share * self.severity * self.slowdown(step) if share and self.context.rank == self.rank else 0.0


FAULT = Throttle
