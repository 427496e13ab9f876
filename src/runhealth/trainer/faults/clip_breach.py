"""A burst of gradient noise: the norm is far over the clip threshold, so the clipped update is mostly noise."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ClipBreach(Fault):
    """For `steps` steps from `step` on, every rank's gradient has noise of its own before the reduce, of a size that
    gives the mean over the ranks a noise of norm `severity` times the clip threshold.

    Where a rank does not hold the whole gradient (sharded, tensor and pipeline layouts), noise of this norm is added
    after the reduce instead, the same on all ranks."""

    name = "clip_breach"
    repaired_by = ("lower_clip_threshold",)

    def __init__(self, context: FaultContext, *, step: int = 200, steps: int = 20, severity: float = 50.0) -> None:
        super().__init__(context)
        if steps < 1 or severity <= 0:
            raise ConfigError(f"fault clip_breach: expected steps >= 1 and severity > 0, met {steps} and {severity}")
        self.step, self.steps, self.severity = step, steps, severity
        self._now = -1
        self._generators: dict[int, torch.Generator] = {}

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="clip_breach",
            onset_step=self.step,
            last_step=self.step + self.steps - 1,
            ranks=tuple(range(self.context.config.world)),
        )

    def _active(self, step: int) -> bool:
        return self.step <= step < self.step + self.steps

    def _generator(self, step: int, *parts: int) -> "torch.Generator":
        import torch

        seed = self.context.config.seed * 1_000_003 + step
        for part in parts:
            seed = seed * 4_099 + part
        return torch.Generator().manual_seed(seed % (1 << 63))

    def attach(self, model: "nn.Module") -> None:
        if not self.context.replicated:
            return
        parameters = list(model.parameters())
        config = self.context.config
        # one mean over the ranks, one sum over the micro-batches: independent noise adds up by its squares
        norm = self.severity * config.optim.clip_threshold * (config.dp / config.parallel.microbatches) ** 0.5
        deviation = norm / sum(parameter.numel() for parameter in parameters) ** 0.5
        for index, parameter in enumerate(parameters):
            parameter.register_hook(lambda gradient, index=index: self._disturb(gradient, index, deviation))  # type: ignore[no-untyped-call]

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step
        self._generators.clear()

    def _disturb(self, gradient: "Tensor", index: int, deviation: float) -> "Tensor":
        if not self._active(self._now):
            return gradient
        import torch

        if index not in self._generators:
            self._generators[index] = self._generator(self._now, self.context.rank, index)
        noise = torch.randn(gradient.shape, generator=self._generators[index]).to(gradient)
        return gradient + noise * (deviation * self.loss_scale)

    def after_backward(self, step: int, model: "nn.Module") -> None:
        if not self._active(step) or self.context.replicated:
            return
        import torch

        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        elements = sum(gradient.numel() for gradient in gradients)
        deviation = self.severity * self.context.config.optim.clip_threshold / elements**0.5
        generator = self._generator(step)
        for gradient in gradients:
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=deviation)


FAULT = ClipBreach
