"""Adam's second moment after the step, and how far it is behind the gradient that the step used.

`adam_rms` is the RMS over a tensor of g / sqrt(v), v the second moment as the state keeps it, without bias correction
(Wortsman et al., arXiv:2304.13013, section 3.4, where the update is cut by it). Near 1 where v follows the gradient;
1 / sqrt(1 - beta2) at most, right after gradients of almost zero.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.guard import Latch
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import l2_norms, plain

LEAST_MOMENT = 1e-16  # v is at least this, the square of Adam's usual epsilon
PIECE = (
    1 << 22
)  # elements that are worked on at a time: a piece of 16 MiB (in half precision two) is all the memory this takes
KEY = "exp_avg_sq"
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Of one optimizer: layer and elements of each tensor with a gradient; the norms of g / sqrt(v) of its pieces, with
    the numbers of the tensors that they are of; the norm of each second moment; what the loss scaler found, where the
    optimizer leaves a step out on its own."""

    layers: list[str]
    sizes: list[int]
    owners: list[int]
    ratios: Fetched
    moments: Fetched
    found_inf: Fetched | None


class MomentProbe(Probe):
    """adam_rms, the largest of all tensors and by layer, and second_moment_norm, on rank 0 every `every` steps (0:
    never).

    Of every optimizer whose state keeps `exp_avg_sq` in the shape of the parameter: Adam, AdamW, NAdam, RAdam, LAMB and
    the like. Others are passed over. Where the state of some tensor is sharded, quantized, on another device or on
    another rank, nothing is recorded: the largest of a part would not be the largest. Of several steps of an optimizer
    within one step of the loop the first counts, as for update_ratio.
    """

    name = "second moments"

    def __init__(self, layers: Mapping[int, str], every: int, *, leader: bool, latch: Latch) -> None:
        self._layers = layers
        self._every = every if leader else 0
        self._latch = latch
        self.begin(None)

    def begin(self, draft: Draft | None) -> None:  # noqa: ARG002  the probe protocol
        self._seen: set[int] = set()
        self._readings: list[_Reading] = []
        self._whole = True  # no optimizer was met whose state is only partly at hand

    def after_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        if not self._every or draft.number % self._every or id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        params = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        states = [optimizer.state.get(p) or {} for p in params]
        if not any(KEY in state for state in states):
            return
        moments = [state[KEY] for state in states if KEY in state]
        graded = [(p, p.grad, state.get(KEY)) for p, state in zip(params, states, strict=True) if p.grad is not None]
        missing = _missing([*((grad, moment) for _, grad, moment in graded), *((m, m) for m in moments)])
        if missing:
            self._whole = False
            self._latch.note(self.name, f"{missing}: adam_rms needs whole gradients and second moments")
            return
        pairs = [(plain(grad), plain(moment)) for _, grad, moment in graded if moment is not None]
        if not pairs:
            return
        owners, ratios = _ratios(pairs)
        found = getattr(optimizer, "found_inf", None)
        self._readings.append(
            _Reading(
                layers=[self._layers.get(id(p), "") for p, _, _ in graded],
                sizes=[grad.numel() for grad, _ in pairs],
                owners=owners,
                ratios=draft.scalars.put(ratios),
                moments=draft.scalars.put(l2_norms(moments)),
                found_inf=draft.scalars.put(found) if isinstance(found, Tensor) else None,
            )
        )

    def finish(self, draft: Draft) -> None:
        taken = [r for r in self._readings if r.found_inf is None or not r.found_inf.value]
        if not taken or not self._whole:
            return
        worst: dict[str, float] = {}
        for reading in taken:
            squares = [0.0] * len(reading.sizes)
            for at, norm in zip(reading.owners, reading.ratios.values, strict=True):
                squares[at] += norm * norm
            for layer, size, square in zip(reading.layers, reading.sizes, squares, strict=True):
                worst[layer] = _larger(worst.get(layer, 0.0), math.sqrt(square / size))
        largest = 0.0
        for layer, rms in worst.items():
            largest = _larger(largest, rms)
            if layer:
                draft.layer(layer)["adam_rms"] = rms
        draft.values["adam_rms"] = largest
        draft.values["second_moment_norm"] = math.hypot(*(norm for r in taken for norm in r.moments.values))

    def close(self) -> None:
        self._layers = {}


def _missing(pairs: Sequence[tuple[Tensor, object]]) -> str:
    """What keeps a pair of gradient and second moment from being compared; empty if nothing does."""
    for grad, moment in pairs:
        if not isinstance(moment, Tensor):
            return "a tensor without a second moment here"
        if type(grad) not in _PLAIN or type(moment) not in _PLAIN:
            return "sharded tensors, or tensors of a class of their own"
        if grad.layout is not torch.strided or grad.is_complex() or moment.is_complex():
            return "sparse or complex tensors"
        if not moment.is_floating_point() or moment.element_size() < 2:
            return "quantized second moments"
        if grad.shape != moment.shape or grad.device != moment.device:
            return "a second moment of another shape or on another device than the gradient"
    return ""


def _ratios(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[int], Tensor]:
    """L2 norm of g / sqrt(max(v, LEAST_MOMENT)), piece by piece: which pair each piece is of, and the norms, (pieces,).

    A gradient whose square overflowed into v has a ratio of 0, which is what Adam makes of it."""
    owners: list[int] = []
    norms: list[Tensor] = []
    for members, grads, moments in _pieces(pairs):
        ratios = list(torch._foreach_clamp_min(moments, LEAST_MOMENT))
        torch._foreach_sqrt_(ratios)
        torch._foreach_reciprocal_(ratios)
        torch._foreach_mul_(ratios, grads)
        owners += members
        norms += torch._foreach_norm(ratios, 2)
    wide = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    return owners, torch.stack([norm.to(norms[0].device, wide) for norm in norms])


def _pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[int], list[Tensor], list[Tensor]]]:
    """Numbers of pairs with what they hold, PIECE elements at a time: many small tensors, or a part of a large one.
    All of a piece lie on one device, single precision at least."""
    members: list[int] = []
    grads: list[Tensor] = []
    moments: list[Tensor] = []
    held = 0
    for at, (grad, moment) in enumerate(pairs):
        flat, second = (grad, moment) if grad.numel() <= PIECE else (grad.reshape(-1), moment.reshape(-1))
        for first in range(0, grad.numel(), PIECE):
            part = slice(first, first + PIECE)
            one, two = (flat, second) if grad.numel() <= PIECE else (flat[part], second[part])
            if members and (held + one.numel() > PIECE or one.device != grads[0].device):
                yield members, grads, moments
                members, grads, moments, held = [], [], [], 0
            members.append(at)
            grads.append(_wide(one))
            moments.append(_wide(two))
            held += one.numel()
    if members:
        yield members, grads, moments


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.element_size() >= 4 else tensor.float()


def _larger(a: float, b: float) -> float:
    """The larger one; NaN if there is one."""
    return a if a != a or a >= b else b
