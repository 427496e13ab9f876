"""The amax history of some fp8 tensors goes stale: it holds values that are far too small and is no longer updated.

The scale chosen from it is too large, so the cast saturates: the largest values are cut off in every step, for good.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn

    from runhealth.trainer.precision.fp8 import DelayedScale


class Fp8StaleAmax(Fault):
    """At `step` the histories of all tensors whose name ends in `tensor` are divided by `severity`, and from then on
    they stay as they are. `tensor` such as `blocks.1.down.x`, or `down.x` for every block."""

    name = "fp8_stale_amax"
    repaired_by = ("fresh_amax", "higher_precision")

    def __init__(
        self, context: FaultContext, *, step: int = 200, severity: float = 32.0, tensor: str = "down.x"
    ) -> None:
        super().__init__(context)
        if context.config.model.precision != "fp8":
            raise ConfigError(f"fault fp8_stale_amax: expected precision fp8, met {context.config.model.precision}")
        if severity <= 1:
            raise ConfigError(f"fault fp8_stale_amax: expected severity > 1, met {severity}")
        self.step, self.severity, self.tensor = step, severity, tensor
        blocks = range(context.config.model.layers)
        roles = [
            f"blocks.{block}.{layer}.{role}"
            for block in blocks
            for layer in ("qkv", "out", "gate_up", "down")
            for role in ("x", "w", "g")
        ]
        self.targets = tuple(name for name in roles if f".{name}".endswith(f".{tensor}"))
        if not self.targets:
            raise ConfigError(f"fault fp8_stale_amax: expected tensor to end one of {', '.join(roles)}, met {tensor!r}")

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="fp_overflow",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
            layers=self.targets,
        )

    def before_step(self, step: int, model: "nn.Module") -> None:
        if step < self.step:
            return
        for name in self.targets:
            scale: DelayedScale = model.get_submodule(name)  # type: ignore[assignment]
            if step == self.step:
                scale.history.div_(self.severity)
            scale.frozen = True


FAULT = Fp8StaleAmax
