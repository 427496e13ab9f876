"""Each rank's gradient before the reduce, and the waiting for it, through DDP's communication hook.

A model can have one such hook and it cannot be taken out again. So one hook serves all monitors of a model, and once
they are closed it goes on doing what DDP does by default.
"""

import math
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument.clock import Clock
from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.guard import Latch
from runhealth.instrument.scalars import Fetched
from runhealth.instrument.tensors import count_nonfinite, is_at_hand

CommHook = Callable[..., torch.futures.Future[Tensor]]


def allreduce_mean(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's default: multiply by 1/n, then sum over the ranks. It multiplies where the hook that torch ships divides,
    since the default multiplies too and the results differ in the last bit where n is no power of two."""
    buffer = bucket.buffer()
    buffer.mul_(1.0 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return reduced


class DdpProbe(Probe):
    """grad_norm_rank, nonfinite_count and, on the CPU, t_wait_s.

    Waiting is the time from when this rank's last gradients were ready until their reduce was done: the reduce of
    earlier buckets overlaps the backward pass. On an accelerator the host cannot see it, so it is not recorded there.
    """

    name = "ddp"

    def __init__(self, clock: Clock, latch: Latch) -> None:
        self._clock = clock
        self._latch = latch
        self._running = False
        self.watching = False
        self.begin(None)

    def begin(self, draft: Draft | None) -> None:
        self._draft = draft
        self._norms: list[Fetched] = []
        self._nonfinite: list[Fetched] = []
        self._waits: list[tuple[int, float, float]] = []  # backward pass, launched, done
        self._pass = 0
        self._running = draft is not None

    def launched(self, bucket: GradBucket) -> tuple[int, float] | None:
        """Measure a bucket before it is reduced. Returns what `done` needs to time the waiting."""
        if not self._running or self._draft is None:
            return None
        with self._latch.guard(self.name), torch.no_grad():
            buffer = bucket.buffer()
            half = buffer.element_size() < 4
            norm = torch.linalg.vector_norm(buffer, dtype=torch.float32 if half and not buffer.is_complex() else None)
            self._norms.append(self._draft.scalars.put(norm))
            on_host = is_at_hand(buffer)
            if not on_host or not math.isfinite(float(norm)):
                self._nonfinite.append(self._draft.scalars.put(count_nonfinite([buffer])))
            if on_host:
                backward = self._pass
                if bucket.is_last():
                    self._pass += 1
                return backward, self._clock.perf_s()
        return None

    def done(self, mark: tuple[int, float]) -> None:
        """Called on a thread of the process group."""
        self._waits.append((*mark, self._clock.perf_s()))

    @property
    def wait_s(self) -> float:
        """Waiting so far in this step, summed over its backward passes."""
        total = 0.0
        for backward in {wait[0] for wait in self._waits}:
            times = [wait for wait in self._waits if wait[0] == backward]
            total += max(0.0, max(done for _, _, done in times) - max(launched for _, launched, _ in times))
        return total

    def collect(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._running = False

    def finish(self, draft: Draft) -> None:
        if not self._norms:
            return
        draft.values["grad_norm_rank"] = math.sqrt(sum(fetched.value**2 for fetched in self._norms))
        draft.values["nonfinite_count"] = int(sum(fetched.value for fetched in self._nonfinite))
        if self._waits:
            draft.values["t_wait_s"] = self.wait_s

    def close(self) -> None:
        self._running = False
        self._draft = None
        for shared in _hooks.values():
            if self in shared.probes:
                shared.probes.remove(self)


class _SharedHook:
    """The state of the one hook of a model."""

    def __init__(self, inner: CommHook, state: object) -> None:
        self.inner = inner
        self.state = state
        self.probes: list[DdpProbe] = []


_hooks: "weakref.WeakKeyDictionary[DistributedDataParallel, _SharedHook]" = weakref.WeakKeyDictionary()


def _hook(shared: _SharedHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    marks = [(probe, mark) for probe in shared.probes if (mark := probe.launched(bucket)) is not None]
    future = shared.inner(shared.state, bucket)
    if not marks:
        return future

    def arrived(done: torch.futures.Future[Tensor]) -> Tensor:
        for probe, mark in marks:
            probe.done(mark)
        return done.value()

    return future.then(arrived)


def watch(model: DistributedDataParallel, probe: DdpProbe, hook: CommHook | None, state: object) -> None:
    """Let `probe` see the buckets of `model`. Raises what DDP raises if the model has a foreign hook already."""
    shared = _hooks.get(model)
    if shared is None:
        shared = _SharedHook(hook, state) if hook else _SharedHook(allreduce_mean, model.process_group)
        model.register_comm_hook(shared, _hook)
        _hooks[model] = shared
    elif hook is not None:
        raise ValueError("the model is watched already, with another hook: pass hook= at the first watch_ddp")
    if probe not in shared.probes:
        shared.probes.append(probe)
    probe.watching = True
