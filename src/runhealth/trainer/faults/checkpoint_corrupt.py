"""A checkpoint comes back with other bytes than were saved, and loads all the same."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class CheckpointCorrupt(Fault):
    """The resume at `step` loads weights in which a share `severity` of the elements of every matrix was set to 0, as
    after a page of the file was lost."""

    name = "checkpoint_corrupt"

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 0.2) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault checkpoint_corrupt: expected 0 < severity <= 1, met {severity}")
        self.step, self.severity = step, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="checkpoint_io",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def after_load(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:  # noqa: ARG002
        if step != self.step:
            return
        import torch

        generator = torch.Generator().manual_seed(self.context.config.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() < 2:
                    continue
                rows = parameter.shape[0]
                first = int(torch.randint(rows, (1,), generator=generator))
                lost = (torch.arange(round(self.severity * rows)) + first) % rows
                parameter[lost] = 0.0


FAULT = CheckpointCorrupt
