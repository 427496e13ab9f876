"""A device or a link computes wrong numbers without a word."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_MODES = ("scale", "sign", "exponent", "reduce", "weights")
_EXPONENT_BIT = 30  # the highest bit of the exponent of a float32: 0 in all numbers under 2, which grow by 2^128


class SilentCorruption(Fault):
    """For `steps` steps from `step` on, something on `rank` is wrong.

    `mode`: scale (the rank's gradient of one layer is `severity` times too large before the reduce), sign (a share
    `severity` of its gradient has the wrong sign), exponent (an exponent bit of `severity` elements of it flips),
    reduce (the reduced gradient of all ranks has noise of `severity` times its norm added: the collective is wrong), or
    weights (at `step` only, `severity` of the rank's weights get another sign: its replica is another from there on).
    """

    name = "silent_corruption"
    transient = True
    splits = True

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 4,
        rank: int = 1,
        mode: str = "scale",
        severity: float = 50.0,
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault silent_corruption: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault silent_corruption: expected a rank below {context.config.world}, met {rank}")
        self.step, self.steps, self.rank, self.mode, self.severity = step, steps, rank, mode, severity
        self._now = -1

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="silent_corruption",
            onset_step=self.step,
            last_step=None if self.mode == "weights" else self.step + self.steps - 1,
            ranks=tuple(range(self.context.config.world)) if self.mode == "reduce" else (self.rank,),
        )

    def attach(self, model: "nn.Module") -> None:
        if self.mode not in ("scale", "sign", "exponent") or self.context.rank != self.rank:
            return
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name.startswith("blocks.0") or self.mode == "sign":
                parameter.register_hook(lambda gradient, index=index: self._corrupt(gradient, index))  # type: ignore[no-untyped-call]

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def _active(self, step: int) -> bool:
        return self.step <= step < self.step + self.steps

    def _corrupt(self, gradient: "Tensor", index: int) -> "Tensor":
        if not self._active(self._now):
            return gradient
        import torch

        if self.mode == "scale":
            return gradient * self.severity
        generator = torch.Generator().manual_seed(1_000 * self._now + index)
        wrong = gradient.clone()
        if self.mode == "sign":
            hit = torch.rand(gradient.shape, generator=generator) < self.severity
            wrong[hit] *= -1.0
            return wrong
        if index % 3 == 0:  # a few tensors of the layer
            places = torch.randint(gradient.numel(), (max(1, round(self.severity)),), generator=generator)
            bits = wrong.view(-1).view(torch.int32)
            bits[places] ^= 1 << _EXPONENT_BIT
        return wrong

    def reduced(self, step: int, bucket: int, buffer: "Tensor") -> None:
        if self.mode == "reduce" and self._active(step):
            self._disturb([buffer], step, bucket)

    def after_backward(self, step: int, model: "nn.Module") -> None:
        if self.mode != "reduce" or not self._active(step) or self.context.replicated:
            return
        self._disturb([parameter.grad for parameter in model.parameters() if parameter.grad is not None], step, 0)

    def _disturb(self, gradients: "list[Tensor]", step: int, bucket: int) -> None:
        """The same noise on all ranks, so that replicas stay equal."""
        import torch

        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))
        deviation = self.severity * norm / sum(g.numel() for g in gradients) ** 0.5
        generator = torch.Generator().manual_seed(1_000_003 * self.context.config.seed + step + 97_003 * bucket)
        for gradient in gradients:
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=deviation)

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if self.mode != "weights" or step != self.step or self.context.rank != self.rank:
            return
        import torch

        generator = torch.Generator().manual_seed(1_000 * step)
        parameter = max(model.parameters(), key=lambda p: p.numel())
        places = torch.randint(parameter.numel(), (max(1, round(self.severity)),), generator=generator)
        parameter.data.view(-1)[places] *= -1.0


FAULT = SilentCorruption
