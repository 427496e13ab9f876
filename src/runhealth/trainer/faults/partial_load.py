"""A resume loads a checkpoint that lacks some keys, and leaves those weights as they were initialised.

A load that falls back to `strict=False` after a change of names reports success:
github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6032, github.com/pytorch/pytorch/issues/141256.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class PartialLoad(Fault):
    """The resume at `step` leaves all parameters whose name starts with `layer` at their initial values; the
    optimizer's moments are restored."""

    name = "partial_load"

    def __init__(self, context: FaultContext, *, step: int = 200, layer: str = "blocks.0") -> None:
        super().__init__(context)
        self.step, self.layer = step, layer

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="checkpoint_io",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
            layers=(self.layer,),
        )

    def attach(self, model: "nn.Module") -> None:
        if not any(name.startswith(self.layer) for name, _ in model.named_parameters()):
            raise ConfigError(f"fault partial_load: expected a layer of the model, met {self.layer!r}")

    def after_load(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step != self.step:
            return
        import torch

        from runhealth.trainer.model import build

        config = self.context.config
        fresh = dict(build(config.model, config.data.seq_len, config.seed).named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                first = fresh.get(name)
                if name.startswith(self.layer) and first is not None and first.shape == parameter.shape:
                    parameter.copy_(first)


FAULT = PartialLoad
