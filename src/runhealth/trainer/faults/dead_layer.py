"""A layer that gets no gradient any more, as after a detach or a saturated activation."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn


class DeadLayer(Fault):
    """From `step` on, the gradient of every parameter whose name starts with `layer` is multiplied with 1 - `severity`:
    1 is dead, 0.999 all but dead."""

    name = "dead_layer"

    def __init__(
        self, context: FaultContext, *, step: int = 200, layer: str = "blocks.1", severity: float = 1.0
    ) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault dead_layer: expected 0 < severity <= 1, met {severity}")
        self.step, self.layer, self.severity = step, layer, severity
        self._now = -1

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="dead_layer",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
            layers=(self.layer,),
        )

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def attach(self, model: "nn.Module") -> None:
        hit = [parameter for name, parameter in model.named_parameters() if name.startswith(self.layer)]
        if not hit:
            raise ConfigError(f"fault dead_layer: expected a layer of the model, met {self.layer!r}")
        for parameter in hit:
            parameter.register_hook(self._fade)  # type: ignore[no-untyped-call]

    def _fade(self, gradient: "Tensor") -> "Tensor":
        return gradient * (1.0 - self.severity) if self._now >= self.step else gradient


FAULT = DeadLayer
