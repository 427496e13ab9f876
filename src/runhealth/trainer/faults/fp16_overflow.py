"""An intermediate value of the backward pass leaves the fp16 range at any but a tiny loss scale."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn

FP16_MAX = 65_504.0


class Fp16Overflow(Fault):
    """For `steps` steps from `step` on (0: for good), the gradient of the parameters whose name ends in `tensor` passes
    through an intermediate that is 2^`severity` times as large: it becomes Inf where that leaves the fp16 range. One
    step is the benign twin: a lone skipped step."""

    name = "fp16_overflow"
    repaired_by = ("higher_precision",)

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 0,
        severity: float = 10.0,
        tensor: str = "head.weight",
    ) -> None:
        super().__init__(context)
        self.step, self.steps, self.severity, self.tensor = step, steps, severity, tensor
        self._now = -1

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="benign" if self.steps == 1 else "loss_scale",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=tuple(range(self.context.config.world)),
            layers=(self.tensor,),
        )

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def attach(self, model: "nn.Module") -> None:
        hit = [parameter for name, parameter in model.named_parameters() if name.endswith(self.tensor)]
        if not hit:
            raise ConfigError(f"fault fp16_overflow: expected the end of a parameter's name, met {self.tensor!r}")
        for parameter in hit:
            parameter.register_hook(self._pass)  # type: ignore[no-untyped-call]

    def _pass(self, gradient: "Tensor") -> "Tensor":
        if self._now < self.step or (self.steps and self._now >= self.step + self.steps):
            return gradient
        return gradient.masked_fill(gradient.abs() * 2.0**self.severity > FP16_MAX, float("inf"))


FAULT = Fp16Overflow
