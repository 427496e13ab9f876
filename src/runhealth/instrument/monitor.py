"""The monitor: attach it to a loop, and each step is on record."""

import atexit
import os
import platform
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from runhealth.instrument import world
from runhealth.instrument.activations import ActivationProbe, chosen_modules
from runhealth.instrument.attention import AttentionProbe
from runhealth.instrument.batches import vocabulary_of
from runhealth.instrument.clock import Clock
from runhealth.instrument.collector import CollectionProbe
from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.gradients import GradientProbe
from runhealth.instrument.guard import Latch
from runhealth.instrument.hooks import as_list, close_at_exit, weak_hook
from runhealth.instrument.hyper import HyperProbe
from runhealth.instrument.layers import layers_of
from runhealth.instrument.memory import MemoryProbe
from runhealth.instrument.moments import MomentProbe
from runhealth.instrument.phases import Phase, Phases
from runhealth.instrument.precision import LossScaleProbe, PrecisionProbe
from runhealth.instrument.replicas import ReplicaProbe
from runhealth.instrument.sink import LogOpener, Sink, open_in_store
from runhealth.instrument.step import Step
from runhealth.instrument.updates import UpdateProbe
from runhealth.instrument.write import exception_event, step_records
from runhealth.storage.errors import ConfigError
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, EventKind, Record, RunEvent

if TYPE_CHECKING:
    from runhealth.instrument.ddp import CommHook, DdpProbe

T = TypeVar("T")


class Monitor:
    """Records a training run. Build one on every rank, after the model and the optimizer, and close it at the end.

    Nothing of it raises or blocks inside the step: an error costs the numbers that it belongs to, is said once on
    stderr and counted. A wrong argument raises ConfigError here, before training starts; a store that cannot be written
    does not.

    model, optimizer   what to watch; without them only what the loop hands over is recorded
    scaler             a torch.amp.GradScaler, for loss_scale and step_skipped
    config             JSON values that describe the run, kept with it
    layers_every       cadence of the layer samples in steps, 0 for never; bursts of gradient are written anyway
    updates_every      cadence of update_ratio and weight_norm, 0 for never (one transient copy of the parameters),
                       and of adam_rms and second_moment_norm where the optimizer is like Adam;
                       the optimizer's betas, eps and weight decay are written then, and whenever they change
    memory_every       cadence of the memory numbers, 0 for never
    replicas_every     cadence of param_checksum, 0 for never; several ranks with unsharded parameters only
    watch_activations  module names whose largest absolute output is recorded
    vocab_size         for token_unique_share; else taken from model.config or the first embedding
    agent              socket of this node's `runhealth agent` (default: $RUNHEALTH_AGENT, else each rank has a log)
    opener             where the log comes from, if not from the store
    """

    def __init__(
        self,
        run: str,
        store: str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        layers_every: int = 10,
        updates_every: int = 10,
        memory_every: int = 10,
        replicas_every: int = 10,
        watch_activations: Sequence[str] = (),
        vocab_size: int | None = None,
        clock: Clock | None = None,
        agent: str | None = None,
        opener: LogOpener | None = None,
    ) -> None:
        for name, every in (
            ("layers_every", layers_every),
            ("updates_every", updates_every),
            ("memory_every", memory_every),
            ("replicas_every", replicas_every),
        ):
            if every < 0:
                raise ConfigError(f"{name} must be at least 0, met {every}")
        watched = chosen_modules(model, watch_activations)
        self.run = run
        here = world.detect()
        self.rank, self.world_size = here.rank, here.world_size
        who = f"run '{run}', rank {self.rank}"
        self._clock = clock or Clock()
        self._latch = Latch(who, self._telemetry_lost)
        self._vocab_size = vocab_size or vocabulary_of(model)
        self._forks = world.forks()
        self._draft: Draft | None = None
        self._next_step = 0
        self._phases = Phases(self._clock)
        self._waited_s = 0.0  # data wait before the step that comes
        self._pending: dict[str, Tensor | float] = {}  # recorded between steps
        self._failed = False
        self._closed = False
        self._ddp: DdpProbe | None = None

        leader, alone = self.rank == 0, self.world_size == 1
        layers = layers_of(model)
        self._gradients = GradientProbe(layers, layers_every, leader=leader, alone=alone, latch=self._latch)
        self._updates = UpdateProbe(layers, updates_every, leader=leader, latch=self._latch)
        self._moments = MomentProbe(layers, updates_every, leader=leader, latch=self._latch)
        self._loss_scale = LossScaleProbe(scaler, leader=leader)
        self._is_scaled = scaler is not None and scaler.is_enabled()
        self._hyper = HyperProbe(as_list(optimizer), updates_every, leader=leader)
        self._attention = AttentionProbe(layers_every, self._latch)
        self._collections = CollectionProbe(self._clock, self._phases)
        self._probes: list[Probe] = [
            self._gradients,
            self._updates,
            self._moments,
            self._loss_scale,
            self._hyper,
            self._collections,
            PrecisionProbe(model, layers_every),
            ActivationProbe(watched, layers_every, self._latch),
            self._attention,
            MemoryProbe(memory_every),
            ReplicaProbe(model, replicas_every, layers_every, world_size=self.world_size),
        ]
        if opener is not None:
            self._sink = Sink(opener, clock=self._clock, who=who)
        else:
            self._sink = open_in_store(
                run=run, store=store, config=config, rank=self.rank, clock=self._clock, who=who, agent=agent
            )
        self._optimizer_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._optimizer_start_s = 0.0
        for one in as_list(optimizer):
            with self._latch.guard("optimizer hooks"):
                self._optimizer_hooks.append(one.register_step_pre_hook(weak_hook(self, "_before_optimizer")))
                self._optimizer_hooks.append(one.register_step_post_hook(weak_hook(self, "_after_optimizer")))
        self._at_exit = close_at_exit(self)
        self.event(
            EventKind.ATTEMPT_START,
            f"rank {self.rank} of {self.world_size}",
            {
                "world_size": self.world_size,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
        )

    @property
    def attempt(self) -> int:
        return self._sink.attempt

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self._sink.lost

    def step(self, number: int) -> Step:
        """`with monitor.step(n) as s:` around one optimizer step, with all its micro-batches.

        An exception in the block goes through untouched and is recorded."""
        if not self._active():
            return Step(self, None)
        try:
            at = int(number)
        except (TypeError, ValueError):
            self._latch.note("step", f"a step number must be whole, met {number!r}")
            at = self._next_step
        return Step(self, Draft(number=at, start_s=self._clock.perf_s()))

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, with the time that each is waited for counted as t_data_s of the step it serves."""
        iterator = iter(loader)
        while True:
            start_s, collected_s = self._clock.perf_s(), self._collections.total_s
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited_s = self._clock.perf_s() - start_s
            self._phases.add("data", waited_s)
            if self._draft is None:
                self._waited_s += waited_s
                self._collections.waited_s += self._collections.total_s - collected_s
            yield batch

    def phase(self, name: str) -> Phase:
        """Time a part of the step under way, or of the next one: data, forward, backward, optimizer, checkpoint."""
        return Phase(self._phases, name)

    def record(self, name: str, value: Tensor | float) -> None:
        """A number of the step under way; between steps, of the next one (`eval_loss` after n steps is at step n)."""
        if not self._active():
            return
        if self._draft is not None:
            Step(self, self._draft).record(name, value)
            return
        with self._latch.guard(f"record {name}"):
            self._pending[name] = value.detach().clone() if isinstance(value, Tensor) else value

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        total_norm: Tensor | None = None,
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_`, which it equals bit for bit, with the norm, limit and coefficient kept.

        `total_norm` is the norm where only the loop can know it: a pipeline stage sees its own parameters only."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        total = total_norm
        if total is None:
            grads = [p.grad for p in params if p.grad is not None]
            total = nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
        if self._draft is not None and self._active():
            with self._latch.guard("gradients"), torch.no_grad():
                self._gradients.before_clip(self._draft, params, total, max_norm, float(norm_type))
        nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
        return total

    def watch_ddp(
        self,
        model: nn.parallel.DistributedDataParallel,
        hook: "CommHook | None" = None,
        state: object = None,
        *,
        averages: bool = False,
    ) -> None:
        """Record each rank's gradient norm before the reduce, how that gradient lies to the result of the reduce, and
        the waiting in it. Call it on every rank.

        `hook(state, bucket)` is a communication hook of your own, to be called in place of DDP's default. `averages`
        says that it returns the mean over the ranks, uncompressed: then grad_projection_rank is recorded with it."""
        with self._latch.guard("ddp"):
            if self._ddp is None:
                from runhealth.instrument.ddp import DdpProbe

                self._ddp = DdpProbe(self._clock, self._latch)
                self._probes.append(self._ddp)
            from runhealth.instrument.ddp import watch

            watch(model, self._ddp, hook, state, averages=averages)

    def attention_logits(
        self, layer: str, query: Tensor, key: Tensor, *, scale: float | None = None, causal: bool = True
    ) -> None:
        """Record the largest absolute attention logit, for the model to call in its forward pass.

        `query` (batch, heads, T, D) and `key` (batch, heads or a divisor of it, S, D) are what the attention gets,
        after rotary positions; `scale` is 1/sqrt(D) by default. Of the first sequence the last 256 queries are looked
        at, once a step and layer. Not within a compiled region."""
        self._attention.see(layer, query, key, scale, causal=causal)

    def event(self, kind: str, message: str = "", data: Mapping[str, object] | None = None) -> None:
        """Write a run event now. May be called from any thread."""
        if not self._active():
            return
        step, ts_ns = self._step_now(), self._clock.now_ns()
        self._sink.write(
            lambda attempt: [
                RunEvent(
                    attempt=attempt, step=step, rank=self.rank, kind=kind, message=message, ts_ns=ts_ns, data=data or {}
                )
            ],
            1,
        )

    def checkpoint(
        self,
        step: int,
        path: str,
        status: CheckpointStatus | str,
        *,
        seconds: float = 0.0,
        size_bytes: int = 0,
        reason: str = "",
    ) -> None:
        """Write what happened to a checkpoint, now. `step` counts the optimizer steps that it contains."""
        if not self._active():
            return
        with self._latch.guard("checkpoint"):
            known, ts_ns = CheckpointStatus(status), self._clock.now_ns()
            self._sink.write(
                lambda attempt: [
                    CheckpointRecord(
                        attempt=attempt,
                        step=step,
                        rank=self.rank,
                        path=path,
                        status=known,
                        ts_ns=ts_ns,
                        seconds=seconds,
                        size_bytes=size_bytes,
                        reason=reason,
                    )
                ],
                1,
            )

    def close(self) -> None:
        """Write what is pending and the end of the attempt, remove every hook, close the log. May be called again."""
        if self._closed or world.forks() != self._forks:
            return
        if self._pending:  # numbers recorded after the last step
            draft = Draft(number=self._next_step, start_s=self._clock.perf_s())
            self._take_pending(draft)
            with self._latch.guard("fetch"), torch.no_grad():
                draft.scalars.fetch()
            with self._latch.guard("step"):
                self._write(draft, None)
        self.event(EventKind.ATTEMPT_END, "after an exception" if self._failed else "", {"dropped": self.dropped})
        self._closed = True
        for handle in self._optimizer_hooks:
            handle.remove()
        self._optimizer_hooks = []
        for probe in self._probes:
            with self._latch.guard(probe.name):
                probe.close()
        self._sink.close()
        atexit.unregister(self._at_exit)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._failed:  # raised between steps
            self._failed = True
            self.event(**exception_event(error))
        self.close()

    # What a step calls

    def _begin(self, draft: Draft) -> None:
        if self._draft is not None:
            self._latch.note("step", f"step {draft.number} began within step {self._draft.number}")
            self._end(self._draft, None)
        draft.start_s = self._clock.perf_s()
        self._draft = draft
        with torch.no_grad():
            for probe in self._probes:
                with self._latch.guard(probe.name):
                    probe.begin(draft)
        self._take_pending(draft)

    def _take_pending(self, draft: Draft) -> None:
        pending, self._pending = self._pending, {}
        for name, value in pending.items():
            Step(self, draft).record(name, value)

    def _end(self, draft: Draft, error: BaseException | None) -> None:
        if self._draft is not draft or not self._active():
            return
        seconds = self._clock.perf_s() - draft.start_s + self._waited_s
        self._draft, self._waited_s = None, 0.0
        self._next_step = draft.number + 1
        draft.failed = error is not None
        with torch.no_grad():
            for probe in self._probes:
                with self._latch.guard(probe.name):
                    probe.collect(draft)
            complete = False
            with self._latch.guard("fetch"):
                complete = draft.scalars.fetch(wait=error is None)
        for probe in self._probes if complete or error is None else ():
            with self._latch.guard(probe.name):
                probe.finish(draft)
        with self._latch.guard("step"):
            if self._is_scaled and "nonfinite_count" in draft.values:  # a scaled gradient that overflowed
                draft.values.setdefault("overflow_count", draft.values["nonfinite_count"])
            draft.phases_s = self._phases.take()
            draft.phases_s["gc"] = draft.phases_s.get("gc", 0.0) + self._collections.step_s
            if "backward" in draft.phases_s and self._ddp is not None:
                draft.phases_s["backward"] = max(0.0, draft.phases_s["backward"] - self._ddp.wait_s)
            if "wait" in draft.phases_s and self._ddp is not None:  # both, where stages are replicated
                draft.phases_s["wait"] += self._ddp.wait_s
            draft.values["t_step_s"] = seconds
            self._write(draft, error)

    def _write(self, draft: Draft, error: BaseException | None) -> None:
        ts_ns = self._clock.now_ns()
        extra: list[Callable[[int], Record]] = []
        if error is not None:
            self._failed = True
            event = exception_event(error)
            extra.append(
                lambda attempt: RunEvent(attempt=attempt, step=draft.number, rank=self.rank, ts_ns=ts_ns, **event)
            )
        build = step_records(draft, rank=self.rank, ts_ns=ts_ns, dropped=lambda: self._sink.lost)
        count = 1 + len(draft.layers) + len(draft.batches) + len(extra)
        self._sink.write(lambda attempt: [*(make(attempt) for make in extra), *build(attempt)], count)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        draft = self._draft
        if draft is None or not self._active():
            return
        with torch.no_grad():
            for probe in (self._gradients, self._updates, self._loss_scale, self._hyper):
                with self._latch.guard(probe.name):
                    probe.before_optimizer(draft, optimizer)
        self._optimizer_start_s = self._clock.perf_s()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        draft = self._draft
        if draft is None or not self._active():
            return
        self._phases.measured("optimizer", self._clock.perf_s() - self._optimizer_start_s)
        for probe in (self._updates, self._moments):
            with self._latch.guard(probe.name), torch.no_grad():
                probe.after_optimizer(draft, optimizer)

    def _active(self) -> bool:
        return not self._closed and world.forks() == self._forks

    def _step_now(self) -> int:
        return self._draft.number if self._draft is not None else self._next_step

    def _telemetry_lost(self, probe: str, why: str) -> None:
        self.event(EventKind.TELEMETRY_LOST, f"{probe}: {why}", {"probe": probe})
