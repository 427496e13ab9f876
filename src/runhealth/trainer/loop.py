"""The training loop of one rank, the same for every layout: AdamW, clipping, checkpoints, held-out evaluation."""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from runhealth.diagnose.plans import Repair
from runhealth.instrument import Monitor
from runhealth.instrument.step import Step
from runhealth.storage.records import CheckpointStatus, EventKind
from runhealth.trainer import dcp
from runhealth.trainer.data import BatchPlan, Manifest, Part, ShardReader, shard_name
from runhealth.trainer.evaluate import heldout_loss
from runhealth.trainer.folders import join
from runhealth.trainer.hooks import FaultHooks
from runhealth.trainer.launch import PROGRESS_PREFIX, LaunchSpec
from runhealth.trainer.model import Block
from runhealth.trainer.numbers import Numbers
from runhealth.trainer.parallel.engine import Engine
from runhealth.trainer.precision.fp8 import Fp8Linear, scales
from runhealth.trainer.precision.loss_scale import LossScaler
from runhealth.trainer.precision.policy import needs_loss_scale
from runhealth.trainer.saves import Saves
from runhealth.trainer.schedule import learning_rate
from runhealth.trainer.updates import ShardedUpdates

PROGRESS_INTERVAL_S = 0.25
STOP_MARGIN_STEPS = 4


class Trainer:
    """One rank of one attempt. The process group must be up. `on_step` is told of every step before it begins."""

    def __init__(self, spec: LaunchSpec, on_step: Callable[[int], None] | None = None) -> None:
        config = spec.config
        self.spec, self.config = spec, config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.plan = BatchPlan(data=config.data, seed=config.seed, world=config.dp, skips=spec.skips)
        self.hooks = FaultHooks(spec, self.rank)
        self.reader = ShardReader(spec.data_path, Manifest.load(spec.data_path), config.data, self.hooks.tamper)
        self.heldout = torch.from_numpy(self.reader.heldout(config.eval_samples))
        self.engine = Engine(config, self.rank)
        self.model, self.place = self.engine.part, self.engine.place
        self.optimizer = self.engine.make_optimizer()
        self.scaler = LossScaler() if needs_loss_scale(config.model.precision) else None
        if self.scaler is not None:
            self.model.add_module("loss_scale", self.scaler.state)  # kept in the checkpoint
        self.step = 0
        self.clip_threshold = config.optim.clip_threshold
        if spec.checkpoint:
            self._load(join(spec.checkpoint_base, spec.checkpoint))
        for repair in spec.repairs:
            self._repair(repair)
        self.hooks.attach(self.model)
        self.engine.wrap()
        if spec.checkpoint and self._needs_warm_up():
            inputs, labels = self._batch(self.step)[1:]
            self.engine.warm_up(inputs, labels)
        self.monitor = Monitor(
            run=spec.run,
            store=spec.store,
            model=self.model,
            optimizer=self.optimizer,
            config=config.to_json(),
            scaler=self.scaler,
            layers_every=config.layers_every,
            updates_every=config.updates_every if self.engine.is_replicated else 0,
            replicas_every=config.updates_every if self.engine.is_replicated else 0,
            opener=self.hooks.opener(),
        )
        for replica in self.engine.replicas:
            hook = self.hooks.comm_hook() if self.engine.is_replicated else None
            self.monitor.watch_ddp(replica, hook, replica.process_group, averages=True)
        for name, module in self.model.named_modules():
            if isinstance(module, Block):
                module.attention_watch = partial(self.monitor.attention_logits, name)
        self.engine.time_waiting(self._phase)
        self.numbers = Numbers(config, self.engine, self.optimizer)
        self.updates = ShardedUpdates(self.engine, 0 if self.engine.is_replicated else config.updates_every)
        self.saves = Saves(spec, self.monitor, self.step)
        self._on_step = on_step or (lambda _step: None)
        self._stop_wanted = self._in_step = False
        self._announced = False
        self._progress_at_s = 0.0

    def _load(self, folder: str) -> None:
        self.step = dcp.load(folder, self.model, self.optimizer, rank=self.rank)
        self.hooks.after_load(self.step, self.model, self.optimizer)

    def _needs_warm_up(self) -> bool:
        return self.engine.needs_warm_up

    def run(self) -> None:
        """Train up to `stop_step`, or until SIGTERM; every exception is on record before it leaves."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        try:
            stop_at = self.spec.stop_step
            while self.step < stop_at:
                if self._stop_wanted:
                    stop_at = min(stop_at, self._agree_to_stop())
                    if self.step >= stop_at:
                        break
                self._on_step(self.step)
                self._evaluate_if_due()
                self._in_step = True
                self._train_step(self.step)
                self._in_step = False
                self.step += 1
                if self.saves.due(self.step):
                    self._checkpoint()
                self.saves.look()
            self.saves.finish()
        finally:
            self.monitor.close()

    def _train_step(self, step: int) -> None:
        with self.monitor.step(step) as record:
            self._announce()
            self.numbers.begin()
            self._label_due(step)
            self.hooks.before_step(step, self.model, self.scaler.get_scale() if self.scaler is not None else 1.0)
            with record.phase("data"):
                parts, inputs, labels = self._batch(step)
                gain = self._gain(step, len(inputs))
                self._record_batches(record, parts, inputs, labels, gain)
            self.hooks.stall(self.monitor, step, "data", "gc")
            lr = self._set_learning_rate(step)
            record.record("lr", lr)
            record.record("consumed_samples", (step + 1) * self.config.dp * self.config.data.batch_size)
            record.record("epoch", (step + 1) / self.plan.epoch_steps)
            watch = _Watch(self, record)
            self.hooks.stall(self.monitor, step, "forward", "backward")
            with self.numbers.watching():
                self.engine.train(inputs, labels, watch)
            self.engine.end_step()
            self.hooks.stall(self.monitor, step, "comm")
            self.hooks.after_backward(step, self.model)
            self._update(record, step)
            self.numbers.record(record)
        self._show_progress(step, watch.loss)

    def _phase(self, name: str) -> AbstractContextManager[object]:
        """A phase of the step; waiting in an evaluation is none of the next step's."""
        return self.monitor.phase(name) if self._in_step else nullcontext()

    def _update(self, record: Step, step: int) -> None:
        """Clip to the true global norm, step the optimizer, forget the gradients. With a loss scale, a step in which
        any rank met a non-finite gradient is left out."""
        skipped = self.scaler is not None and self.scaler.agree(self.optimizer)
        if not skipped:
            self._clip()
        self.hooks.before_optimizer(step, self.model, self.optimizer)
        self.numbers.before_optimizer()
        self.updates.before_optimizer(step)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.updates.after_optimizer(record)
        self.hooks.after_optimizer(step, self.model, self.optimizer)
        self.optimizer.zero_grad(set_to_none=not self.engine.is_replicated)

    def _clip(self) -> None:
        norm = None
        if not self.engine.is_replicated:
            with self.monitor.phase("wait"):
                norm = self.engine.norm()
            self.numbers.synchronised()
        self.monitor.clip_grad_norm_(self.model.parameters(), self.clip_threshold, total_norm=norm)

    def _batch(self, step: int) -> tuple[tuple[Part, ...], Tensor, Tensor]:
        """The parts of this rank's batch, its inputs and labels, int64 [batch, seq] each. Ranks that share a model read
        the same."""
        parts = self.hooks.parts(step, self.plan.batch(step, self.place.dp))
        tokens = torch.from_numpy(self.reader.rows(parts))
        inputs, labels = self.hooks.tokens(step, tokens[:, :-1], tokens[:, 1:])
        return parts, inputs, labels

    def _gain(self, step: int, samples: int) -> Tensor | None:
        """The floating-point input of this rank's batch, float32 [samples]; None where there is none."""
        return self.hooks.gain(step, samples)

    def _record_batches(
        self, record: Step, parts: Sequence[Part], inputs: Tensor, labels: Tensor, gain: Tensor | None
    ) -> None:
        """Each shard that takes part in a micro-batch, with its hash as read. By one rank of those that share a batch,
        one that knows the loss."""
        if not self.engine.has_loss or self.place.tp:
            return
        size = self.config.data.batch_size // self.config.parallel.microbatches
        for first in range(0, self.config.data.batch_size, size):
            for part in parts:
                taken = [
                    (row, sample)
                    for row, sample in zip(part.positions, part.samples, strict=True)
                    if first <= row < first + size
                ]
                if not taken:
                    continue
                rows, samples = [row for row, _ in taken], [sample for _, sample in taken]
                whole = slice(first, first + size) if len(rows) == size else rows
                shard = self.reader.shard(part.shard)
                record.batch(
                    inputs[whole] if gain is None else {"input_ids": inputs[whole], "gain": gain[whole]},
                    labels[whole],
                    shard=shard.name,
                    first_sample=min(samples),
                    last_sample=max(samples),
                    samples=len(samples),
                    shard_hash=shard.shard_hash,
                    manifest_hash=shard.manifest_hash,
                    lengths=[self.config.data.seq_len] * len(samples),
                )

    def _set_learning_rate(self, step: int) -> float:
        lr = self.hooks.learning_rate(step, learning_rate(self.config.optim, step, self.config.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _evaluate_if_due(self) -> None:
        """Held-out loss after `self.step` steps."""
        last = self.step == self.spec.stop_step - 1
        if last or (self.step and self.step % self.config.eval_every == 0):
            loss = heldout_loss(self.engine, self.hooks.heldout(self.step, self.heldout))
            self.monitor.record("eval_loss", loss)

    def _checkpoint(self) -> None:
        self.hooks.stall(self.monitor, self.step, "checkpoint")
        with self.monitor.phase("checkpoint"):
            self.saves.make(dcp.state_of(self.model, self.optimizer, self.step, self.rank), self.step)

    def _label_due(self, step: int) -> None:
        """Write the truth about a fault at the step where it begins, unless its shards are skipped there."""
        for fault in self.hooks.faults:
            label = fault.label()
            if self.rank != 0 or step != label.onset_step:
                continue
            if label.shards and not self._reads(step, label.shards):
                continue
            self.monitor.event(EventKind.FAULT_INJECTED, f"{label.fault} begins", label.to_json())

    def _reads(self, step: int, shards: Sequence[str]) -> bool:
        read = {shard_name(part.shard) for dp in range(self.config.dp) for part in self.plan.batch(step, dp)}
        return bool(read.intersection(shards))

    def _repair(self, repair: Repair) -> None:
        if repair.kind == "fresh_amax" and self.spec.rollback:
            for name, scale in scales(self.model):
                if not repair.target or _matches(name, repair.target):
                    scale.forget()
        elif repair.kind == "higher_precision":
            for name, module in self.model.named_modules():
                if isinstance(module, Fp8Linear) and (not repair.target or _covers(name, repair.target)):
                    module.high_precision = True
        elif repair.kind == "lower_clip_threshold" and repair.value is not None:
            self.clip_threshold = repair.value
        elif repair.kind == "reset_loss_scale" and self.spec.rollback and self.scaler is not None:
            self.scaler.reset()

    def _announce(self) -> None:
        """Write where this attempt begins: within its first step, so that the events carry that step's number."""
        spec = self.spec
        if self.rank != 0 or self._announced:
            return
        self._announced = True
        if spec.checkpoint:
            self.monitor.event(EventKind.RESUME, f"from {spec.checkpoint}", {"step": self.step})
            self.monitor.checkpoint(self.step, spec.checkpoint, CheckpointStatus.LOADED)
        else:
            self.monitor.event(EventKind.RUN_START, spec.run, {"data": spec.data_path.rpartition("/")[2]})
        self.monitor.event("layout", self.numbers.line, self.numbers.facts())
        sys.stdout.write(f"{self.numbers.line}\n")
        sys.stdout.flush()
        if spec.skips.ranges:
            self.monitor.event(EventKind.SKIP, f"{spec.skips.samples()} samples", {"skips": spec.skips.to_json()})

    def _show_progress(self, step: int, loss: Tensor | None) -> None:
        """By the first rank that knows the loss."""
        now = time.monotonic()
        last = step + 1 == self.spec.stop_step
        speaks = loss is not None and not self.place.dp and not self.place.tp
        if speaks and (last or now - self._progress_at_s >= PROGRESS_INTERVAL_S):
            assert loss is not None
            self._progress_at_s = now
            line = {"attempt": self.spec.attempt, "step": step, "stop": self.spec.stop_step, "loss": loss.item()}
            sys.stdout.write(f"{PROGRESS_PREFIX}{json.dumps(line)}\n")
            sys.stdout.flush()

    def _on_terminate(self, *_signal: object) -> None:
        self._stop_wanted = True

    def _agree_to_stop(self) -> int:
        """The step before which all ranks stop. The first to be told announces a step a little ahead, since the others
        may be waiting for it inside a collective of the current one."""
        store = dist.distributed_c10d._get_default_store()
        key = f"runhealth/stop/{self.spec.attempt}"
        agreed: bytes = store.compare_set(key, "", str(self.step + STOP_MARGIN_STEPS))
        return int(agreed)


class _Watch:
    """What the loop does inside the engine's passes."""

    def __init__(self, trainer: Trainer, record: Step) -> None:
        self._trainer, self._record = trainer, record
        self.loss: Tensor | None = None  # of the last micro-batch, where it is known

    def phase(self, name: str) -> AbstractContextManager[object]:
        return self._record.phase(name)

    def forward_done(self, loss: Tensor, logits: Tensor) -> None:
        self.loss = loss.detach()
        self._record.loss(loss)
        self._record.logits(logits)

    def scaled(self, loss: Tensor) -> Tensor:
        scaler = self._trainer.scaler
        if scaler is None:
            return loss
        scaled: Tensor = scaler.scale(loss)
        return scaled


def _matches(name: str, target: str) -> bool:
    """Whether a tensor's name is the target, lies under it, or ends with it."""
    return name == target or name.startswith(f"{target}.") or name.endswith(f".{target}")


def _covers(layer: str, target: str) -> bool:
    """Whether a target names this layer or one of its tensors."""
    roles: Sequence[str] = ("", ".x", ".w", ".g")
    return any(_matches(f"{layer}{role}", target) for role in roles)
