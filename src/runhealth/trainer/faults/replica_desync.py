"""One replica's weights leave the others': its updates are not applied, or are other ones."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_MODES = ("frozen", "drift")


class ReplicaDesync(Fault):
    """From `step` on, for `steps` steps (0: for good), `rank` applies the share 1 - `severity` of each update (mode
    frozen) or adds noise of `severity` times the update to it (mode drift)."""

    name = "replica_desync"
    splits = True

    def __init__(
        self,
        context: FaultContext,
        *,
        step: int = 200,
        steps: int = 0,
        rank: int = 1,
        mode: str = "frozen",
        severity: float = 1.0,
    ) -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault replica_desync: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault replica_desync: expected a rank below {context.config.world}, met {rank}")
        self.step, self.steps, self.rank, self.mode, self.severity = step, steps, rank, mode, severity
        self._before: list[Tensor] = []

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="replica_desync",
            onset_step=self.step,
            last_step=self.step + self.steps - 1 if self.steps else None,
            ranks=(self.rank,),
        )

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        active = step >= self.step and (not self.steps or step < self.step + self.steps)
        if active and self.context.rank == self.rank:
            self._before = [parameter.detach().clone() for parameter in model.parameters()]

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if not self._before:
            return
        import torch

        generator = torch.Generator().manual_seed(self.context.config.seed * 1_000_003 + step)
        for parameter, old in zip(model.parameters(), self._before, strict=True):
            update = parameter.detach() - old
            if self.mode == "frozen":
                parameter.data.sub_(update, alpha=self.severity)
            else:
                size = self.severity * float(update.square().mean().sqrt())
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
        self._before = []


FAULT = ReplicaDesync
