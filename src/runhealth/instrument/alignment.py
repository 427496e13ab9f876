"""How a rank's gradient lies to what the reduce made of the gradients of all ranks.

With g_r the gradient of rank r, of n, m their mean and h the result of the reduce: the projections <g_r, h> / <h, h>
have the mean <m, h> / <h, h>. That is 1 if h is m, whatever the ranks sent; noise in h and a wrong factor move it. An
error at right angles to h itself does not, such as a part of the result that is zero.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runhealth.instrument.tensors import is_at_hand, plain

_PIECE_ON_HOST, _PIECE = 1 << 16, 1 << 22  # elements that are widened at a time: cached, or few launches


def products(sent: Tensor, result: Tensor) -> Tensor:
    """<g, h>, <g, g> and <h, h> as one tensor (3,) on the device of `result`; g and h have the same shape and dtype.

    Accumulated in float64, where no square of a float32 overflows and long sums lose no digits; in float32 on MPS,
    which has no float64. Nothing waits for the device."""
    g, h = plain(sent).reshape(-1), plain(result).reshape(-1)
    piece = _PIECE_ON_HOST if is_at_hand(h) else _PIECE
    wide = torch.float32 if h.device.type == "mps" else torch.float64
    total = torch.zeros(3, dtype=wide, device=h.device)
    for start in range(0, h.numel(), piece):
        a, b = (x[start : start + piece].to(wide) for x in (g, h))
        total += torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)])
    return total


def projection(numbers: Sequence[float]) -> float | None:
    """<g, h> / <h, h> of what `products` gave; None where it is not finite or h is zero."""
    gh, _, hh = numbers
    return _finite(gh / hh) if hh else None


def cosine(numbers: Sequence[float]) -> float | None:
    """<g, h> / (|g| |h|) of what `products` gave; None where it is not finite or one of them is zero."""
    gh, gg, hh = numbers
    scale = math.sqrt(gg) * math.sqrt(hh) if gg > 0 and hh > 0 else 0.0
    return _finite(gh / scale) if scale else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
