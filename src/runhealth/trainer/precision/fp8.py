"""An fp8 linear layer with delayed scaling, emulated in fp32 so that it runs on any device.

Activations and weights are cast to e4m3 in the forward pass, gradients to e5m2 in the backward pass, as in Micikevicius
et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433). The scale of a tensor is a power of two, chosen from the
largest absolute value of its last 16 steps (delayed scaling). Master weights, bias-free norms, the embedding and the
output head stay in fp32.

Overflow and underflow are counted *before* the cast: since torch 2.12 the cast to e4m3 saturates, so nothing is left
to see after it; gradients are clamped as well, because e5m2 would overflow to infinity. Scales are chosen on the host:
on an accelerator each cast waits for its amax.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HISTORY = 16
_recomputing = False  # set while activation checkpointing runs a forward pass for the second time


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Casts within neither count nor enter a history: the tensor was counted when it was cast first."""
    global _recomputing
    before, _recomputing = _recomputing, True
    try:
        yield
    finally:
        _recomputing = before


class DelayedScale(nn.Module):
    """The amax history, scale and counters of one tensor that is cast to fp8.

    `frozen` stops the history from being updated: real frameworks lose updates this way, and the `fp8_stale_amax`
    fault injects it. `deferred` lets a scale stand for a whole step: the largest amax of all its casts enters the
    history at `commit`. A step of several micro-batches, or one that computes activations twice, needs that. The
    counters count since the module was made; `amax` and `amax_believed` are those of the last
    cast.
    """

    history: Tensor  # f32 [16] on the host, the largest absolute values of the last steps; 0 = empty
    cursor: Tensor  # i64 [] on the host, where the next one goes

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.max = float(torch.finfo(dtype).max)
        self.frozen = False
        self.deferred = False
        self.pending = 0.0  # largest amax since the last commit
        self.overflow_count = 0
        self.underflow_count = 0
        self.elements = 0
        self.amax = 0.0
        self.amax_believed = 0.0
        self.register_buffer("history", torch.zeros(HISTORY))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def cast(self, x: Tensor, record: bool) -> Tensor:
        """`x` as fp8 sees it, back in fp32; same shape. With `record`, counts and the history are updated."""
        low, high = torch.aminmax(x)
        amax = max(-float(low), float(high))
        believed = float(self.history.numpy().max()) or amax
        scale = power_of_two_scale(self.max, believed)
        scaled = x * scale
        overflow = 0
        if not amax * scale <= self.max:
            if record:
                overflow = int((scaled.abs() > self.max).sum())
            scaled = scaled.clamp(-self.max, self.max)
        seen = scaled.to(self.dtype).to(x.dtype)
        if record:
            self.overflow_count += overflow
            self.underflow_count += int(torch.count_nonzero(scaled) - torch.count_nonzero(seen))
            self.elements += x.numel()
            self.amax, self.amax_believed = amax, believed
            if not self.frozen and math.isfinite(amax):
                if self.deferred:
                    self.pending = max(self.pending, amax)
                else:
                    self._push(amax)
        return seen.mul_(1.0 / scale)

    def commit(self) -> None:
        """The step ends: what was deferred enters the history."""
        if self.pending > 0 and not self.frozen:
            self._push(self.pending)
        self.pending = 0.0

    def _push(self, amax: float) -> None:
        self.history.numpy()[int(self.cursor) % HISTORY] = amax
        self.cursor += 1

    def forget(self) -> None:
        """Empty the history; the next cast chooses its scale from the tensor itself."""
        self.history.zero_()
        self.cursor.zero_()
        self.frozen = False
        self.pending = 0.0

    def stats(self) -> dict[str, Tensor | float]:
        """Counters since the module was made, amax and believed amax of the last cast."""
        return {
            "overflow_count": self.overflow_count,
            "underflow_count": self.underflow_count,
            "elements": self.elements,
            "amax": self.amax,
            "amax_believed": self.amax_believed,
        }


def power_of_two_scale(largest: float, amax: float) -> float:
    """The largest power of two s with amax * s <= largest; 1 for a tensor of zeros or of no finite amax."""
    if not 0 < amax < math.inf:
        return 1.0
    return 2.0 ** min(126, math.floor(math.log2(largest / amax)))


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "Fp8Linear", record: bool) -> Tensor:
        low_x = layer.x.cast(x, record)
        low_w = layer.w.cast(weight, record)
        ctx.save_for_backward(low_x, low_w)
        ctx.layer = layer
        return low_x @ low_w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        low_x, low_w = ctx.saved_tensors
        low_g = ctx.layer.g.cast(grads[0], True)
        grad_x = low_g @ low_w
        grad_w = low_g.flatten(0, -2).t() @ low_x.flatten(0, -2)
        return grad_x, grad_w, None, None


class Fp8Linear(nn.Module):
    """y = x Wᵀ with x [..., in] and W [out, in] seen in e4m3 and the incoming gradient in e5m2; no bias.

    `high_precision` turns the casts off: the layer is an fp32 one until it is unset.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.high_precision = False
        self.x = DelayedScale(torch.float8_e4m3fn)
        self.w = DelayedScale(torch.float8_e4m3fn)
        self.g = DelayedScale(torch.float8_e5m2)

    def forward(self, x: Tensor) -> Tensor:
        if self.high_precision:
            return F.linear(x, self.weight)
        out: Tensor = _Fp8Matmul.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self, self.training and torch.is_grad_enabled() and not _recomputing
        )
        return out

    def runhealth_precision_stats(self) -> dict[str, dict[str, Tensor | float]]:
        """Stats by tensor role, in the protocol of `runhealth.instrument.precision`."""
        return {"x": self.x.stats(), "w": self.w.stats(), "g": self.g.stats()}


def scales(model: nn.Module) -> Iterator[tuple[str, DelayedScale]]:
    """Every scaled tensor of a model with its name, such as `blocks.1.down.x`."""
    for name, module in model.named_modules():
        if isinstance(module, DelayedScale):
            yield name, module
