"""Largest absolute attention logit, from queries and keys that the model hands over.

Attention kernels do not keep their logits, so those of one sequence are worked out anew, a few heads at a time.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.guard import Latch
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import is_sharded, largest_magnitude

QUERIES = 256  # of the sequence, its last: they see the most keys
PIECE = 1 << 22  # logits that are held at a time


class AttentionProbe(Probe):
    """attn_logit_max each step, the largest over the layers; `logit_max` by layer every `layers_every` steps. Of each
    layer the first forward pass with gradients counts: not an evaluation within the step, no later micro-batch, nor
    what activation checkpointing makes again.

    The model's own modes are off meanwhile: autocast would round the logits, and a checkpoint that keeps matrix
    products would keep these, and take one for another.
    """

    name = "attention"

    def __init__(self, layers_every: int, latch: Latch) -> None:
        self._every = layers_every
        self._latch = latch
        self._running = False
        self._largest: dict[str, Tensor] = {}
        self._promised: dict[str, Fetched] = {}

    def begin(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._running = True
        self._largest = {}
        self._promised = {}

    def see(self, layer: str, query: Tensor, key: Tensor, scale: float | None, *, causal: bool) -> None:
        """query (batch, heads, T, D), key (batch, key heads, S, D)."""
        if not self._running or layer in self._largest or not torch.is_grad_enabled():
            return
        with self._latch.guard(self.name), torch.no_grad(), _disable_current_modes():
            with torch.autocast(query.device.type, enabled=False):
                largest = largest_logit(query, key, scale, causal=causal)
            if largest is not None:
                self._largest[layer] = largest

    def collect(self, draft: Draft) -> None:
        self._running = False
        self._promised = {layer: draft.scalars.put(largest) for layer, largest in self._largest.items()}

    def finish(self, draft: Draft) -> None:
        if not self._promised:
            return
        found = {layer: fetched.value for layer, fetched in self._promised.items()}
        draft.values["attn_logit_max"] = next((v for v in found.values() if v != v), max(found.values()))
        if self._every and draft.number % self._every == 0:
            for layer, value in found.items():
                draft.layer(layer)["logit_max"] = value

    def close(self) -> None:
        self._running = False


def largest_logit(query: Tensor, key: Tensor, scale: float | None, *, causal: bool) -> Tensor | None:
    """Largest |q k| * scale of the first sequence, one number in float32 at least; None where there is none.

    With fewer key heads than query heads, neighbouring query heads share one (grouped queries). With `causal` the last
    query sees the last key.

    Raises ValueError for shapes that do not go together, TypeError for a DTensor.
    """
    if is_sharded(query) or is_sharded(key):
        raise TypeError("expected tensors of this rank, met a DTensor: pass its to_local()")
    if query.dim() != 4 or key.dim() != 4 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
        raise ValueError(f"expected (batch, heads, T, D) with heads a multiple of the key's, met {shapes}")
    if not query.numel() or not key.numel():
        return None
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    q, k = query.detach()[0, :, -QUERIES:], key.detach()[0]
    if q.element_size() < 4:
        q, k = q.float(), k.float()
    heads, rows, width = q.shape
    key_heads, columns, _ = k.shape
    grouped = q.reshape(key_heads, heads // key_heads * rows, width)
    hidden = None
    if causal:
        ahead = columns - rows
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(ahead + 1)
    largest: Tensor | None = None
    at_a_time = max(1, PIECE // (grouped.shape[1] * columns))
    for first in range(0, key_heads, at_a_time):
        part = slice(first, first + at_a_time)
        logits = torch.matmul(grouped[part], k[part].transpose(-1, -2))
        if hidden is not None:
            logits = logits.view(-1, rows, columns).masked_fill_(hidden, 0.0)
        one = largest_magnitude(logits)
        if one is not None:
            largest = one if largest is None else torch.maximum(largest, one)
    return None if largest is None else largest * abs(factor)
