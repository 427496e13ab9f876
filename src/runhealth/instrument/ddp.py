"""Each rank's gradient before the reduce, and the waiting for it, through DDP's communication hook.

A model can have one such hook and it cannot be taken out again. So one hook serves all monitors of a model, and once
they are closed it goes on doing what DDP does by default.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument import alignment
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


@dataclass(slots=True)
class Mark:
    """A bucket under way: what to do once its reduce is done. `sent` is a copy of it from before, where this is the
    step's bucket to compare."""

    wait: tuple[int, float] | None = None  # backward pass, when the reduce was launched
    sent: Tensor | None = None


class DdpProbe(Probe):
    """grad_norm_rank, nonfinite_count, grad_projection_rank, grad_cosine_rank and, on the CPU, t_wait_s.

    Waiting is the time from when this rank's last gradients were ready until their reduce was done: the reduce of
    earlier buckets overlaps the backward pass. On an accelerator the host cannot see it, so it is not recorded there.

    Projection and cosine are taken over one bucket a step, bucket `step mod buckets` of the first model watched, the
    same on all ranks. That costs a copy of one bucket and three dot products. Of several backward passes the first in
    which the bucket is reduced counts. A step has none where DDP has just sorted its buckets anew and has fewer. With a
    communication hook of the user's own that is not said to return the mean only the cosine is recorded: compressed
    gradients have no exact mean.
    """

    name = "ddp"

    def __init__(self, clock: Clock, latch: Latch) -> None:
        self._clock = clock
        self._latch = latch
        self._running = False
        self.watching = False
        self.first: _SharedHook | None = None  # of the model whose buckets are compared
        self._buckets = 1  # of the first model, as its last backward pass had them
        self._sent: Tensor | None = None
        self.begin(None)

    def begin(self, draft: Draft | None) -> None:
        self._draft = draft
        self._norms: list[Fetched] = []
        self._nonfinite: list[Fetched] = []
        self._waits: list[tuple[int, float, float]] = []  # backward pass, launched, done
        self._pass = 0
        self._chosen = draft.number % self._buckets if draft is not None else -1
        self._products: Fetched | None = None
        self._averages = False
        self._sent = None
        self._running = draft is not None

    def launched(self, bucket: GradBucket, *, first: bool, averages: bool) -> Mark | None:
        """Measure a bucket before it is reduced. `first`: it is of the first model watched. `averages`: the reduce
        should return the mean. Returns what `done` has to be called with, if it has to be."""
        if not self._running or self._draft is None:
            return None
        mark = Mark()
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
                mark.wait = backward, self._clock.perf_s()
            if first:
                if bucket.index() == self._chosen:
                    self._chosen = -1
                    self._averages = averages
                    # kept until the step ends: only then no stream of the device reads it any more
                    mark.sent = self._sent = buffer.clone()
                if bucket.is_last():
                    self._buckets = bucket.index() + 1
        return mark if mark.wait is not None or mark.sent is not None else None

    def done(self, mark: Mark, result: object) -> None:
        """The reduce is done and gave `result`. Called on a thread of the process group, on a stream of its own."""
        if mark.wait is not None:
            self._waits.append((*mark.wait, self._clock.perf_s()))
        sent, draft = mark.sent, self._draft
        if sent is None or draft is None or sent is not self._sent:
            return
        with self._latch.guard(self.name), torch.no_grad():
            reduced = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
            same = isinstance(reduced, Tensor) and reduced.numel() == sent.numel() and reduced.device == sent.device
            if same and isinstance(reduced, Tensor):
                self._products = draft.scalars.put(alignment.products(sent, reduced))

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
        self._sent = None
        if self._products is not None and self._products.values:
            found = self._products.values
            for name, value in (
                ("grad_projection_rank", alignment.projection(found) if self._averages else None),
                ("grad_cosine_rank", alignment.cosine(found)),
            ):
                if value is not None:
                    draft.values[name] = value
        if not self._norms:
            return
        draft.values["grad_norm_rank"] = math.sqrt(sum(fetched.value**2 for fetched in self._norms))
        draft.values["nonfinite_count"] = int(sum(fetched.value for fetched in self._nonfinite))
        if self._waits:
            draft.values["t_wait_s"] = self.wait_s

    def close(self) -> None:
        self._running = False
        self._draft = self._sent = self.first = None
        for shared in _hooks.values():
            if self in shared.probes:
                shared.probes.remove(self)


class _SharedHook:
    """The state of the one hook of a model."""

    def __init__(self, inner: CommHook, state: object, *, averages: bool) -> None:
        self.inner = inner
        self.state = state
        self.averages = averages
        self.probes: list[DdpProbe] = []


_hooks: "weakref.WeakKeyDictionary[DistributedDataParallel, _SharedHook]" = weakref.WeakKeyDictionary()


def _hook(shared: _SharedHook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    marks = [
        (probe, mark)
        for probe in shared.probes
        if (mark := probe.launched(bucket, first=probe.first is shared, averages=shared.averages)) is not None
    ]
    future = shared.inner(shared.state, bucket)
    if not marks:
        return future

    def arrived(done: torch.futures.Future[Tensor]) -> Tensor:
        for probe, mark in marks:
            probe.done(mark, done.value())
        return done.value()

    return future.then(arrived)


def watch(
    model: DistributedDataParallel, probe: DdpProbe, hook: CommHook | None, state: object, *, averages: bool = False
) -> None:
    """Let `probe` see the buckets of `model`. Raises what DDP raises if the model has a foreign hook already.

    `averages` says of `hook` that it returns the mean over the ranks, as DDP's default does."""
    shared = _hooks.get(model)
    if shared is None:
        if hook is not None:
            shared = _SharedHook(hook, state, averages=averages)
        else:
            shared = _SharedHook(allreduce_mean, model.process_group, averages=True)
        model.register_comm_hook(shared, _hook)
        _hooks[model] = shared
    elif hook is not None:
        raise ValueError("the model is watched already, with another hook: pass hook= at the first watch_ddp")
    if probe not in shared.probes:
        shared.probes.append(probe)
    if probe.first is None:
        probe.first = shared
    probe.watching = True
