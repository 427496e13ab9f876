"""Gradient norms after the reduce and before clipping, in total and by layer; clipping; learning rate.

All of these are numbers of the whole job, so only rank 0 measures them; `ddp.py` measures each rank before the reduce.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.guard import Latch
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import count_nonfinite, is_at_hand, is_sharded, l2_norms

BURST = 4.0  # a norm this many times the recent median has its layers written whatever the cadence
RECENT = 32  # norms that the median is taken of


class GradientProbe(Probe):
    """`layers_every` 0 turns layer samples off."""

    name = "gradients"

    def __init__(
        self, layers: Mapping[int, str], layers_every: int, *, leader: bool, alone: bool, latch: Latch
    ) -> None:
        self._layers = layers
        self._every = layers_every if layers else 0
        self._leader = leader
        self._alone = alone
        self._latch = latch
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.begin(None)

    def begin(self, draft: Draft | None) -> None:  # noqa: ARG002  the probe protocol
        self._clips: list[tuple[Fetched, float | Fetched]] = []
        self._norms: list[Fetched] = []  # what the optimizers saw, where nothing was clipped
        self._by_layer: list[tuple[list[str], Fetched]] = []
        self._sizes: dict[str, int] = {}  # elements that these norms are of
        self._nonfinite: list[Fetched] = []

    def before_clip(
        self, draft: Draft, params: Sequence[Tensor], total: Tensor, max_norm: float | Tensor, norm_type: float
    ) -> None:
        """`total` is what `get_total_norm` found. On a DTensor this is a collective, as the clipping itself is."""
        whole = total.full_tensor() if is_sharded(total) else total  # type: ignore[attr-defined]
        if not self._leader:
            return
        graded = [p for p in params if p.grad is not None]
        if not graded:
            return
        norms = None
        if norm_type != 2.0:
            norms = l2_norms([p.grad for p in graded if p.grad is not None])
            whole = _total(norms)
        limit = draft.scalars.put(max_norm) if isinstance(max_norm, Tensor) else float(max_norm)
        self._clips.append((draft.scalars.put(whole), limit))
        self._detail(draft, graded, whole, norms)

    def before_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        rate = optimizer.param_groups[0].get("lr")  # not every optimizer has one
        if self._leader and rate is not None and "lr" not in draft.values and "lr" not in draft.promised:
            if isinstance(rate, Tensor):
                draft.promised["lr"] = draft.scalars.put(rate)
            else:
                draft.values["lr"] = float(rate)
        if not self._leader or self._clips:
            return
        graded = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not graded:
            return
        if any(is_sharded(p.grad) for p in graded):
            self._latch.note(self.name, "sharded gradients: grad_norm needs monitor.clip_grad_norm_")
            return
        norms = l2_norms([p.grad for p in graded])
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler for optimizers that unscale on their own
        if isinstance(scale, Tensor):
            norms = norms / scale.to(norms.device)
        total = _total(norms)
        self._norms.append(draft.scalars.put(total))
        self._detail(draft, graded, total, norms)

    def _detail(self, draft: Draft, graded: Sequence[Tensor], total: Tensor, norms: Tensor | None) -> None:
        """Layers and non-finite elements. On the CPU the total is at hand and decides; elsewhere reading it would stall
        the device, so layers are always measured, and kept or not once the step's numbers are fetched."""
        grads = [p.grad for p in graded if p.grad is not None]
        known = float(total) if is_at_hand(total) else None
        if self._alone and not any(is_sharded(grad) for grad in grads):
            if known is not None and math.isfinite(known):
                draft.values.setdefault("nonfinite_count", 0)
            elif known is not None or self._last_was_nonfinite():
                self._nonfinite.append(draft.scalars.put(count_nonfinite(grads)))
        if self._every and (self._on_cadence(draft) or known is None or self._is_burst(known)):
            members = [(self._layers[id(p)], at) for at, p in enumerate(graded) if id(p) in self._layers]
            if members and not any(is_sharded(grad) for grad in grads):
                norms = l2_norms(grads) if norms is None else norms
                if len(members) < len(graded):
                    norms = norms[torch.tensor([at for _, at in members], device=norms.device)]
                self._by_layer.append(([name for name, _ in members], draft.scalars.put(norms)))
                for name, at in members:
                    self._sizes[name] = self._sizes.get(name, 0) + graded[at].numel()

    def _on_cadence(self, draft: Draft) -> bool:
        return draft.number % self._every == 0

    def _is_burst(self, norm: float) -> bool:
        if not math.isfinite(norm):
            return True
        known = [n for n in self._recent if math.isfinite(n)]
        return len(known) >= RECENT // 4 and norm > BURST * statistics.median(known)

    def _last_was_nonfinite(self) -> bool:
        return bool(self._recent) and not math.isfinite(self._recent[-1])

    def finish(self, draft: Draft) -> None:
        squares = [fetched.value**2 for fetched, _ in self._clips] or [fetched.value**2 for fetched in self._norms]
        if not squares:
            return
        norm = math.sqrt(sum(squares))
        draft.values["grad_norm"] = norm
        if self._alone:
            draft.values["grad_norm_rank"] = norm
        if self._clips:
            limits = [limit.value if isinstance(limit, Fetched) else limit for _, limit in self._clips]
            coefs = [
                _coefficient(limit, fetched.value) for (fetched, _), limit in zip(self._clips, limits, strict=True)
            ]
            worst = next((coef for coef in coefs if math.isnan(coef)), min(coefs))
            draft.values["clip_threshold"] = limits[0] if len(set(limits)) == 1 else min(limits)
            draft.values["clip_coef"] = worst
        if self._nonfinite:
            draft.values["nonfinite_count"] = int(sum(fetched.value for fetched in self._nonfinite))
        if self._by_layer and (self._on_cadence(draft) or self._is_burst(norm)):
            fill_layer_norms(draft, "grad_norm", self._by_layer)
            for name, size in self._sizes.items():
                draft.layer(name)["grad_rms"] = draft.layer(name)["grad_norm"] / math.sqrt(max(1, size))
        self._recent.append(norm)

    def close(self) -> None:
        self._layers = {}


def fill_layer_norms(draft: Draft, signal: str, parts: Sequence[tuple[Sequence[str], Fetched]]) -> None:
    """Norm of each layer from the norms of its tensors; `parts` pairs layer names with one norm for each."""
    squares: dict[str, float] = {}
    for names, fetched in parts:
        for name, norm in zip(names, fetched.values, strict=True):
            squares[name] = squares.get(name, 0.0) + norm * norm
    for name, square in squares.items():
        draft.layer(name)[signal] = math.sqrt(square)


def _total(norms: Tensor) -> Tensor:
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


def _coefficient(limit: float, norm: float) -> float:
    """min(1, limit / norm); an infinite norm gives 0 and NaN gives NaN, as in the clipping itself."""
    if math.isnan(norm):
        return math.nan
    return min(1.0, limit / norm) if norm > 0 else 1.0
