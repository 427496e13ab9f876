"""The evaluation counts padding: a changed collator fills up the held-out samples, and nothing masks what it adds.

The held-out loss then depends on how much padding there is, as it does on the batch size in evaluations whose labels
are not masked: github.com/huggingface/transformers/issues/39241 and
24839.
"""

from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError
from runhealth.trainer.fault import Fault, FaultContext, FaultLabel

if TYPE_CHECKING:
    from torch import Tensor

_PAD = 0


class EvalPadding(Fault):
    """From `step` on, the last share `severity` of every held-out sample is the padding token."""

    name = "eval_padding"

    def __init__(self, context: FaultContext, *, step: int = 200, severity: float = 0.5) -> None:
        super().__init__(context)
        if not 0 < severity < 1:
            raise ConfigError(f"fault eval_padding: expected 0 < severity < 1, met {severity}")
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
        padded = tokens.clone()
        padded[:, tokens.shape[1] - max(1, round(self.severity * tokens.shape[1])) :] = _PAD
        return padded


FAULT = EvalPadding
