"""The gates of one feed-forward layer saturate: it gives nothing, and gets no gradient.

A step too large leaves all pre-activations on the flat side of the activation, from where no gradient brings them back
(Lu et al., "Dying ReLU and Initialization", arXiv:1903.06733; the same holds of SiLU far below 0).
"""

from typing import TYPE_CHECKING, Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn


class ClosedGate(Fault):
    """From `step` on, the input of the gate's activation in `block`, such as `blocks.1`, is `severity` lower."""

    name = "closed_gate"

    def __init__(
        self, context: FaultContext, *, step: int = 200, block: str = "blocks.0", severity: float = 20.0
    ) -> None:
        super().__init__(context)
        if severity <= 0:
            raise ConfigError(f"fault closed_gate: expected severity > 0, met {severity}")
        self.step, self.block, self.severity = step, block, severity
        self._now = -1

    def label(self) -> FaultLabel:
        gate = ("gate_up",) if self.context.config.model.fused else ("gate", "up")
        return FaultLabel(
            fault=self.name,
            cause="dead_layer",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
            layers=tuple(f"{self.block}.{part}" for part in ("norm_ffn", *gate, "down")),
        )

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def attach(self, model: "nn.Module") -> None:
        found = [
            module for name, module in model.named_modules() if name in (f"{self.block}.gate", f"{self.block}.gate_up")
        ]
        if not found:
            raise ConfigError(f"fault closed_gate: expected a block of the model, met {self.block!r}")
        for module in found:
            module.register_forward_hook(self._close)

    def _close(self, module: "nn.Module", args: Any, out: "Tensor") -> "Tensor":  # noqa: ARG002
        if self._now < self.step:
            return out
        import torch

        width = out.shape[-1] // 2 if self.context.config.model.fused else out.shape[-1]
        shift = torch.zeros(out.shape[-1], dtype=out.dtype, device=out.device)
        shift[:width] = self.severity  # the gate is the first half where both are one matrix
        return out - shift


FAULT = ClosedGate
