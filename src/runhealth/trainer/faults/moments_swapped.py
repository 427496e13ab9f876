"""A resume gives the optimizer's moments to other parameters of the same shape.

Optimizer state is stored by a parameter's place in the list. Where the model is built in another order, tensors of the
same shape get each other's moments and nothing complains: github.com/Lightning-AI/pytorch-lightning/issues/17025.
"""

from typing import TYPE_CHECKING, Any

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_MODES = ("matrices", "ends", "all")


class MomentsSwapped(Fault):
    """The resume at `step` finds the moments of parameters of one shape moved on by one: of the blocks' matrices (mode
    matrices), of what is outside the blocks such as embedding and head (ends), or of all parameters (all)."""

    name = "moments_swapped"
    repaired_by = ("restore_optimizer_state",)

    def __init__(self, context: FaultContext, *, step: int = 200, mode: str = "all") -> None:
        super().__init__(context)
        if mode not in _MODES:
            raise ConfigError(f"fault moments_swapped: expected mode out of {', '.join(_MODES)}, met {mode!r}")
        self.step, self.mode = step, mode

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="optimizer_state",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def _moves(self, name: str, dimensions: int) -> bool:
        inside = name.startswith("blocks.")
        return self.mode == "all" or (inside and dimensions > 1 if self.mode == "matrices" else not inside)

    def after_load(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        if step != self.step:
            return
        alike: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for name, parameter in model.named_parameters():
            state = optimizer.state.get(parameter)
            if state and self._moves(name, parameter.dim()):
                alike.setdefault(tuple(parameter.shape), []).append(state)
        for states in alike.values():
            for key in ("exp_avg", "exp_avg_sq"):
                values = [state[key].clone() for state in states]
                for state, value in zip(states, values[-1:] + values[:-1], strict=True):
                    state[key].copy_(value)


FAULT = MomentsSwapped
