"""Checksums of the parameters on each rank: replicas hold the same bits, and telemetry shows where they do not.

No rank talks to another. The checksum is made on the device and comes to the host with the step's other numbers.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.layers import clean_name, layer_name
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import is_sharded

LANES = 256
MASK = (1 << 48) - 1  # a float64, in which numbers leave a device, keeps 53 bits
SMALL_BYTES = 1 << 18  # tensors up to this size are summed as one: what they cost alone is the launches
ROWS_LIKE = 8  # ranks: more of them sample their layers so much more rarely that the rows stay as many
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd


class ReplicaProbe(Probe):
    """`every` 0 turns it off, as do a lone rank and parameters that are sharded (DTensor, FSDP, ZeRO-3): these differ
    between ranks by design. `layers_every` is the cadence of the layers' own checksums for up to 8 ranks."""

    name = "replicas"

    def __init__(self, model: nn.Module | None, every: int, layers_every: int, *, world_size: int) -> None:
        self._model = model
        self._every = every if world_size > 1 and model is not None else 0
        self._layers_every = layers_every * max(1, world_size // ROWS_LIKE)
        self._whole: list[Fetched] = []
        self._each: list[tuple[list[int], Fetched]] = []
        self._layers: list[str] = []

    def begin(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._whole, self._each, self._layers = [], [], []

    def collect(self, draft: Draft) -> None:
        # after an exception some ranks may have taken the step and others not
        if not self._every or draft.number % self._every or draft.failed or self._model is None:
            return
        named = list(_replicated(self._model))
        if not named:
            return
        by_device: dict[torch.device, list[int]] = {}
        for at, (_, parameter) in enumerate(named):
            by_device.setdefault(parameter.device, []).append(at)
        layers_due = self._layers_every and draft.number % self._layers_every == 0
        for members in by_device.values():
            tensors = [named[at][1] for at in members]
            # the same way in every step: a checksum that stays the same says that no parameter moved
            self._whole.append(draft.scalars.put(checksums(_joined(tensors))))
            if layers_due:
                self._each.append((members, draft.scalars.put(checksums(tensors))))
        self._layers = [layer_name(name) for name, _ in named]

    def finish(self, draft: Draft) -> None:
        if not self._whole:
            return
        draft.values["param_checksum"] = _combined(int(v) for sums in self._whole for v in sums.values)
        by_layer: dict[str, list[int]] = {}
        each = ((at, int(v)) for members, sums in self._each for at, v in zip(members, sums.values, strict=True))
        for at, value in sorted(each):
            by_layer.setdefault(self._layers[at], []).append(value)
        for layer, values in by_layer.items():
            draft.layer(layer)["param_checksum"] = _combined(values)

    def close(self) -> None:
        self._model, self._every = None, 0


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A whole number under 2^48 of the bits of each tensor, shape (len(tensors),), int64, for tensors of one device.

    Bits are added up as integers in 256 lanes, exactly and thus in any order; the lanes are then mixed, so that two
    flipped bits cancel only within a lane."""
    lanes = torch.stack([_lanes(tensor.detach()) for tensor in tensors])
    weights = torch.arange(1, 2 * LANES, 2, device=lanes.device) * _MULTIPLIER
    mixed = (lanes ^ (lanes >> 29)) * weights
    total = ((mixed ^ (mixed >> 32)) * _MULTIPLIER).sum(1)
    return (total ^ (total >> 31)) & MASK


def _joined(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The large tensors as they are; behind them the small ones of each dtype in one copy, never larger than `LANES`
    times `SMALL_BYTES`."""
    large: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() > SMALL_BYTES:
            large.append(tensor)
        else:
            small.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
    parts = [group[at : at + LANES] for group in small.values() for at in range(0, len(group), LANES)]
    return [*large, *(torch.cat(part) for part in parts)]


def _lanes(tensor: Tensor) -> Tensor:
    """Sums over every 256th integer, shape (256,), int64. The numbers count, not how they lie in memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().view(-1)
    size_bytes = flat.numel() * flat.element_size()
    width = 8 if size_bytes % 8 == 0 else flat.element_size()  # eight bytes at a time are four times faster
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()
    numbers = flat.view(_INTEGERS[width])
    rows = numbers.numel() // LANES
    sums = numbers[: rows * LANES].view(rows, LANES).sum(0, dtype=torch.int64)
    rest = numbers[rows * LANES :]
    if rest.numel():
        sums[: rest.numel()] += rest
    return sums


def _combined(values: Iterable[int]) -> int:
    total = 0
    for value in values:
        total = (total * _MULTIPLIER + value + 1) & MASK
    return total


def _replicated(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and parameter where every rank should hold the same; nothing where the model is sharded."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return
    inner = getattr(model, "module", model)
    own = {clean_name(str(name)) for name in getattr(inner, "_ddp_params_and_buffers_to_ignore", ())}
    named = [(name, p) for name, p in model.named_parameters() if clean_name(name) not in own]
    if any(is_sharded(p) or hasattr(p, "ds_id") for _, p in named):
        return
    yield from ((name, p) for name, p in named if p.layout is torch.strided and not p.is_meta)
