"""One rank's batch holds a NaN: a feature or a sample weight that was never finite."""

from typing import TYPE_CHECKING, Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor, nn


class NanBatch(Fault):
    """At `step`, the embedded inputs of `severity` samples of `rank` are NaN."""

    name = "nan_batch"

    def __init__(self, context: FaultContext, *, step: int = 200, rank: int = 1, severity: int = 1) -> None:
        super().__init__(context)
        if not 0 <= rank < context.config.world:
            raise ConfigError(f"fault nan_batch: expected a rank below {context.config.world}, met {rank}")
        self.step, self.rank, self.severity = step, rank, severity
        self._now = -1

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name, cause="bad_shard", onset_step=self.step, last_step=self.step, ranks=(self.rank,)
        )

    def active(self, step: int) -> bool:
        """Whether this rank's batch of the step is the bad one."""
        return step == self.step and self.context.rank == self.rank

    def before_step(self, step: int, model: "nn.Module") -> None:  # noqa: ARG002
        self._now = step

    def attach(self, model: "nn.Module") -> None:
        model.get_submodule("embed").register_forward_hook(self._poison)

    def _poison(self, module: "nn.Module", args: Any, out: "Tensor") -> "Tensor":  # noqa: ARG002
        if not self.active(self._now) or not module.training:
            return out
        out = out.clone()
        out[: self.severity] = float("nan")
        return out


FAULT = NanBatch
