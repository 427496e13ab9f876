"""The floating-point input of the model: a gain a sample, which faults of the data can spoil."""

from typing import Any

from torch import Tensor, nn


class Gain:
    """Multiplies what `embed` gives in training, [batch, ...], with the gain of each sample: float32 [batch], handed
    out to the micro-batches in order. Nothing is multiplied before `set`, nor by None."""

    def __init__(self, embed: nn.Module) -> None:
        self._gain: Tensor | None = None
        self._at = 0
        embed.register_forward_hook(self._apply)

    def set(self, gain: Tensor | None) -> None:
        """For the step that begins."""
        self._gain, self._at = gain, 0

    def _apply(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:  # noqa: ARG002  torch's signature
        if self._gain is None or not module.training:
            return out
        part = self._gain[self._at : self._at + len(out)]
        self._at += len(out)
        return out * part.view(-1, *(1 for _ in out.shape[1:]))
