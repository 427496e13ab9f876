"""The evaluation data change under the run: the held-out loss leaves its trend, the training loss does not."""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor


class EvalDrift(Fault):
    """From `step` on, a share `severity` of the held-out samples has other bytes than before (upper case and lower case
    exchanged)."""

    name = "eval_drift"

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 0.5) -> None:
        super().__init__(context)
        if not 0 < severity <= 1:
            raise ConfigError(f"fault eval_drift: expected 0 < severity <= 1, met {severity}")
        self.step, self.severity = step, severity

    def label(self) -> FaultLabel:
        return FaultLabel(
            fault=self.name,
            cause="eval_drift",
            onset_step=self.step,
            last_step=None,
            ranks=tuple(range(self.context.config.world)),
        )

    def heldout(self, step: int, tokens: "Tensor") -> "Tensor":
        if step < self.step:
            return tokens
        changed = tokens.clone()
        rows = changed[: round(self.severity * len(changed))]
        letter = ((rows >= 65) & (rows <= 90)) | ((rows >= 97) & (rows <= 122))
        rows[letter] ^= 32
        return changed


FAULT = EvalDrift
