"""Memory of the device and of the process, every few steps."""

import os

import torch

from runhealth.instrument.draft import Draft, Probe

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class MemoryProbe(Probe):
    """`every` 0 turns it off."""

    name = "memory"

    def __init__(self, every: int) -> None:
        self._every = every
        self._has_statm = os.path.exists("/proc/self/statm")  # noqa: PTH110  a constant, not a path to handle

    def finish(self, draft: Draft) -> None:
        if not self._every or draft.number % self._every:
            return
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            draft.values["mem_allocated_bytes"] = torch.cuda.memory_allocated()
            draft.values["mem_reserved_bytes"] = torch.cuda.memory_reserved()
        if self._has_statm:
            with open("/proc/self/statm") as statm:
                draft.values["mem_rss_bytes"] = int(statm.read().split()[1]) * _PAGE_BYTES
