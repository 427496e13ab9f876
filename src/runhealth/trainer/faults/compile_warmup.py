"""Benign: the first steps of an attempt are slow on all ranks while kernels are compiled and tuned.

torch.compile compiles at the first call and again for new shapes (PyTorch, "torch.compile troubleshooting"); libraries
try out algorithms at first use (`torch.backends.cudnn.benchmark`).
"""

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel, Phase


class CompileWarmup(Fault):
    """The first `steps` steps from `step` on take longer on all ranks: `severity` seconds at first, then a quarter of
    the step before each."""

    name = "compile_warmup"

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 3, severity: float = 20.0) -> None:
        super().__init__(context)
        if steps < 1 or severity <= 0:
            raise ConfigError(f"fault compile_warmup: expected steps >= 1 and severity > 0, met {steps} and {severity}")
        self.step, self.steps, self.severity = step, steps, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=tuple(range(self.context.config.world)),
        )

    def stall_s(self, step: int, phase: Phase) -> float:
        age = step - self.step
        share = {"forward": 0.6, "backward": 0.4}.get(phase, 0.0)
        return share * self.severity * 0.25**age if share and 0 <= age < self.steps else 0.0


FAULT = CompileWarmup
