"""One rank steps with its own gradient in the place of the reduced one.

Code that only one rank runs, for a log or a profile, puts its own tensors in the place of those that the reduce writes
to: the collective goes on as ever, and that rank's optimizer never sees what comes out of it. PyTorch's
notes on DistributedDataParallel warn of it for `gradient_as_bucket_view`, where gradients are views of the buckets.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn


class LocalGradient(Fault):
    """From `step` on, `rank` uses its gradient from before the reduce for the last share `severity` of the
    parameters."""

    name = "local_gradient"
    splits = True

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: float = 1.0) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault local_gradient: expected a rank below {context.config.world}, met {rank}")
        if not 0 < severity <= 1:
            raise ConfigError(f"fault local_gradient: expected 0 < severity <= 1, met {severity}")
        self.step, self.rank, self.severity = step, rank, severity
        self._now = -1
        self._own: dict[int, Tensor] = {}

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name, cause="replica_desync", onset_step=self.step, last_step=None, ranks=(self.rank,)
        )

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step
        self._own = {}

    def attach(self, model: "nn.Module") -> None:
        if self.context.rank != self.rank:
            return
        parameters = list(model.parameters())
        first = len(parameters) - max(1, round(self.severity * len(parameters)))
        for index in range(first, len(parameters)):
            parameters[index].register_hook(lambda gradient, index=index: self._keep(gradient, index))  # type: ignore[no-untyped-call]

    def _keep(self, gradient: "Tensor", index: int) -> None:
        if self._now >= self.step:  # summed over the micro-batches of the step
            kept = self._own.get(index)
            self._own[index] = gradient.detach().clone() if kept is None else kept + gradient.detach()

    def after_backward(self, step: int, model: "nn.Module") -> None:
        if step < self.step or self.context.rank != self.rank:
            return
        for index, parameter in enumerate(model.parameters()):
            if index in self._own and parameter.grad is not None:
                parameter.grad.copy_(self._own[index])


FAULT = LocalGradient
