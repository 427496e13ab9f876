"""A defective device gets one output channel of one matrix product wrong, in every forward pass.

Nothing becomes non-finite. A node on which repeated forward passes of one input disagree: "Understanding Silent
Data Corruption in LLM Training" (arXiv:2502.12340); single lanes of a unit: Hochschild et al., "Cores that don't
count" (HotOS 2021).
"""

from typing import TYPE_CHECKING, Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn


class WrongLane(Fault):
    """From `step` on, for `steps` steps (0: for good), one output channel of `layer` on `rank` has noise of `severity`
    times the output's root mean square added, while it trains."""

    name = "wrong_lane"
    transient = True

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 0,
        rank: int = 1,
        layer: str = "blocks.0.out",
        severity: float = 30.0,
    ) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault wrong_lane: expected a rank below {context.config.world}, met {rank}")
        if severity <= 0:
            raise ConfigError(f"fault wrong_lane: expected severity > 0, met {severity}")
        self.step, self.steps, self.rank, self.layer, self.severity = step, steps, rank, layer, severity
        self._now = -1

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="silent_corruption",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=(self.rank,),
        )

    def attach(self, model: "nn.Module") -> None:
        if self.context.rank == self.rank:
            model.get_submodule(self.layer).register_forward_hook(self._corrupt)

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def _corrupt(self, module: "nn.Module", args: Any, out: "Tensor") -> "Tensor":  # noqa: ARG002
        late = self.steps and self._now >= self.step + self.steps
        if self._now < self.step or late or not module.training:
            return out
        import torch

        generator = torch.Generator().manual_seed(1_000_003 * self.context.config.seed + self._now)
        lane = self.context.config.seed % out.shape[-1]
        size = self.severity * float(out.detach().float().square().mean().sqrt())
        wrong = torch.zeros(out.shape, dtype=out.dtype)
        wrong[..., lane] = torch.randn(out.shape[:-1], generator=generator) * size
        return out + wrong.to(out.device)


FAULT = WrongLane
