"""How far the last optimizer step moved the parameters, against how large they are.

Measured exactly: the parameters are copied before the step and subtracted after it, every `every` steps. That costs one
transient copy of the parameters; where the accelerator has no room for it, the step is left out.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.gradients import fill_layer_norms
from runhealth.instrument.guard import Latch
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import is_sharded, l2_norms, plain


class UpdateProbe(Probe):
    """`every` 0 turns it off. Only rank 0 measures: replicas take the same step."""

    name = "updates"

    def __init__(self, layers: Mapping[int, str], every: int, *, leader: bool, latch: Latch) -> None:
        self._layers = layers
        self._every = every if leader else 0
        self._latch = latch
        self._before: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.begin(None)

    def begin(self, draft: Draft | None) -> None:  # noqa: ARG002  the probe protocol
        self._before.clear()
        self._weights: list[tuple[list[str], Fetched]] = []
        self._moves: list[tuple[list[str], Fetched]] = []
        self._seen: set[int] = set()

    def before_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        if not self._every or draft.number % self._every or id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        params = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        if not params:
            return
        if any(is_sharded(p) for p in params):
            self._latch.note(self.name, "sharded parameters: update_ratio is not measured yet")
            return
        numbers = [plain(p) for p in params]
        self._weights.append((self._names(params), draft.scalars.put(l2_norms(numbers))))
        if _has_room(numbers):
            self._before[id(optimizer)] = (params, [number.clone() for number in numbers])
        else:
            self._latch.note(self.name, "no room on the device for a copy of the parameters")

    def after_optimizer(self, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
        found = self._before.pop(id(optimizer), None)
        if found is None:
            return
        params, before = found
        torch._foreach_sub_(before, [plain(p) for p in params])  # in place: no second copy
        self._moves.append((self._names(params), draft.scalars.put(l2_norms(before))))

    def _names(self, params: list[Tensor]) -> list[str]:
        return [self._layers.get(id(p), "") for p in params]

    def collect(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._before.clear()

    def finish(self, draft: Draft) -> None:
        if not self._weights:
            return
        weight = _norm(self._weights)
        draft.values["weight_norm"] = weight
        if self._moves:
            move = _norm(self._moves)
            draft.values["update_ratio"] = move / weight if weight > 0 else math.nan
        if self._layers:
            fill_layer_norms(draft, "weight_norm", self._weights)
            fill_layer_norms(draft, "update_norm", self._moves)
            draft.layers.pop("", None)  # parameters that the model does not know

    def close(self) -> None:
        self._before.clear()
        self._layers = {}


def _norm(parts: list[tuple[list[str], Fetched]]) -> float:
    return math.sqrt(sum(norm * norm for _, fetched in parts for norm in fetched.values))


def _has_room(tensors: list[Tensor]) -> bool:
    """Twice the copy is free on each CUDA device; the host is taken to have room."""
    wanted: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            wanted[tensor.device] = wanted.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    for device, size_bytes in wanted.items():
        free_bytes = torch.cuda.mem_get_info(device)[0]
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free_bytes + cached_bytes < 2 * size_bytes:
            return False
    return True
