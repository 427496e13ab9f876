"""Device scalars of one step, brought to the host in one transfer at its end."""

import torch
from torch import Tensor

from runhealth.instrument.tensors import is_sharded


class Fetched:
    """A promise of numbers: `values` is filled by `Scalars.fetch()`, and stays empty if the fetch failed."""

    __slots__ = ("tensor", "values")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.values: list[float] = []

    @property
    def value(self) -> float:
        return self.values[0]


class Scalars:
    """Tensors of any shape, device and real dtype; each `put` returns the promise of its numbers in flat order."""

    def __init__(self) -> None:
        self._waiting: list[Fetched] = []

    def put(self, tensor: Tensor) -> Fetched:
        """Take the numbers as they are now. The caller may change the tensor afterwards: single numbers are copied.

        Raises TypeError for a DTensor: reading one is a collective, and only the loop knows that all ranks come by."""
        if is_sharded(tensor):
            raise TypeError("expected a tensor of this rank, met a DTensor: pass its full_tensor()")
        tensor = tensor.detach()
        if tensor.numel() == 1:
            tensor = tensor.clone()
        fetched = Fetched(tensor.reshape(-1))
        self._waiting.append(fetched)
        return fetched

    def fetch(self, *, wait: bool = True) -> bool:
        """Bring everything to the host: one transfer a device. Where that fails, the others still come; then raises.

        `wait=False` leaves out what only a wait for a device would give: after an exception it may hang for good.
        Returns whether everything came."""
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[Fetched]] = {}
        for fetched in waiting:
            if fetched.tensor is not None:
                by_device.setdefault(fetched.tensor.device, []).append(fetched)
        failed: Exception | None = None
        complete = True
        for device, group in by_device.items():
            if not wait and device.type != "cpu":
                complete = False
                continue
            try:
                _fetch_from(device, group)
            except Exception as error:  # noqa: BLE001  raised below, once the other devices were read
                failed = error
        if failed is not None:
            raise failed
        return complete


def _fetch_from(device: torch.device, group: list[Fetched]) -> None:
    by_dtype: dict[torch.dtype, list[Fetched]] = {}
    for fetched in group:
        if fetched.tensor is not None:
            by_dtype.setdefault(fetched.tensor.dtype, []).append(fetched)
    flats = [torch.cat([f.tensor for f in same if f.tensor is not None]) for same in by_dtype.values()]
    if device.type == "cpu":
        numbers = [number for flat in flats for number in flat.tolist()]
    else:
        # float64 keeps counters exact to 2^53; MPS has none
        wide = torch.float32 if device.type == "mps" else torch.float64
        numbers = torch.cat([flat.to(wide) for flat in flats]).tolist()
    at = 0
    for same in by_dtype.values():
        for fetched in same:
            if fetched.tensor is not None:
                size = fetched.tensor.numel()
                fetched.values, fetched.tensor = numbers[at : at + size], None
                at += size
