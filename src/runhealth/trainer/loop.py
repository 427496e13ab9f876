"""The training loop of one rank: data parallel (DDP on gloo), AdamW, clipping, checkpoints, held-out evaluation."""

import json
import signal
import sys
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runhealth.diagnose.plans import Repair
from runhealth.instrument import Monitor
from runhealth.instrument.step import Step
from runhealth.storage.records import CheckpointStatus, EventKind
from runhealth.trainer import checkpoints, dcp
from runhealth.trainer.data import BatchPlan, Manifest, ShardReader, shard_name
from runhealth.trainer.fault import Fault, FaultContext, create
from runhealth.trainer.launch import PROGRESS_PREFIX, LaunchSpec
from runhealth.trainer.model import build, next_byte_loss
from runhealth.trainer.precision.fp8 import Fp8Linear, scales
from runhealth.trainer.schedule import learning_rate

PROGRESS_INTERVAL_S = 0.25
STOP_MARGIN_STEPS = 4


class Trainer:
    """One rank of one attempt. The process group must be up."""

    def __init__(self, spec: LaunchSpec) -> None:
        config = spec.config
        self.spec, self.config = spec, config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.plan = BatchPlan(data=config.data, seed=config.seed, world=self.world, skips=spec.skips)
        self.faults = self._faults()
        self.reader = ShardReader(spec.data_path, Manifest.load(spec.data_path), config.data, self._tamper)
        self.heldout = torch.from_numpy(self.reader.heldout(config.eval_samples))
        self.model = build(config.model, config.data.seq_len, config.seed)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self.step = 0
        self.clip_threshold = optim.clip_threshold
        if spec.checkpoint:
            self.step = dcp.load(f"{spec.run_path}/{spec.checkpoint}", self.model, self.optimizer, rank=self.rank)
        for repair in spec.repairs:
            self._repair(repair)
        self.ddp = _wrap(self.model)
        self.monitor = Monitor(
            run=spec.run,
            store=spec.store,
            model=self.model,
            optimizer=self.optimizer,
            config=config.to_json(),
            layers_every=config.layers_every,
            updates_every=config.updates_every,
        )
        self.monitor.watch_ddp(self.ddp)
        self._stop_wanted = False
        self._announced = False
        self._progress_at_s = 0.0

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
                self._evaluate_if_due()
                self._train_step(self.step)
                self.step += 1
                if self.step % self.config.checkpoint.every == 0 or self.step == self.spec.stop_step:
                    self._checkpoint()
        finally:
            self.monitor.close()

    def _train_step(self, step: int) -> None:
        with self.monitor.step(step) as record:
            self._announce()
            for fault in self.faults:
                self._label_if_due(fault, step)
                fault.before_step(step, self.model)
            with record.phase("data"):
                tokens = self._next_batch(record, step)
            lr = self._set_learning_rate(step)
            with record.phase("forward"):
                logits = self.ddp(tokens[:, :-1])
                loss = next_byte_loss(logits, tokens[:, 1:])
            record.loss(loss)
            record.logits(logits)
            record.record("lr", lr)
            record.record("consumed_samples", (step + 1) * self.world * self.config.data.batch_size)
            with record.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            for fault in self.faults:
                fault.after_backward(step, self.model)
            self.monitor.clip_grad_norm_(self.model.parameters(), self.clip_threshold)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
        self._show_progress(step, loss)

    def _next_batch(self, record: Step, step: int) -> Tensor:
        """int64 [batch, seq_len + 1]; each shard that took part is recorded with its hash as read."""
        parts = self.plan.batch(step, self.rank)
        tokens = torch.from_numpy(self.reader.rows(parts))
        for part in parts:
            shard = self.reader.shard(part.shard)
            rows = tokens if len(parts) == 1 else tokens[list(part.positions)]
            record.batch(
                rows[:, :-1],
                rows[:, 1:],
                shard=shard.name,
                first_sample=min(part.samples),
                last_sample=max(part.samples),
                samples=len(part.samples),
                shard_hash=shard.shard_hash,
                manifest_hash=shard.manifest_hash,
            )
        return tokens

    def _set_learning_rate(self, step: int) -> float:
        lr = learning_rate(self.config.optim, step, self.config.steps)
        for fault in self.faults:
            lr = fault.learning_rate(step, lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    @torch.no_grad()
    def _evaluate_if_due(self) -> None:
        """Held-out loss after `self.step` steps: the same samples each time, divided among the ranks."""
        last = self.step == self.spec.stop_step - 1
        if not (last or (self.step and self.step % self.config.eval_every == 0)):
            return
        mine = self.heldout[self.rank :: self.world]
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for chunk in torch.split(mine, 64):
            total[0] += float(next_byte_loss(self.model(chunk[:, :-1]), chunk[:, 1:])) * len(chunk)
            total[1] += len(chunk)
        self.model.train()
        dist.all_reduce(total)
        self.monitor.record("eval_loss", float(total[0] / total[1]))

    def _checkpoint(self) -> None:
        with self.monitor.phase("checkpoint"):
            outcome = dcp.save(
                self.spec.run_path,
                dcp.state_of(self.model, self.optimizer, self.step, self.rank),
                step=self.step,
                attempt=self.spec.attempt,
                rank=self.rank,
                world=self.world,
            )
        if self.rank != 0:
            return
        seconds, size = outcome.seconds, outcome.size_bytes
        if size:
            self.monitor.checkpoint(self.step, outcome.path, CheckpointStatus.SAVED, seconds=seconds, size_bytes=size)
        status = CheckpointStatus.VERIFIED if outcome.verified else CheckpointStatus.FAILED
        self.monitor.checkpoint(self.step, outcome.path, status, seconds=seconds, size_bytes=size, reason=outcome.error)
        if outcome.verified:
            checkpoints.retire(self.spec.run_path, self.config.checkpoint.keep, self.spec.needed, self.spec.superseded)

    def _faults(self) -> list[Fault]:
        """The faults of the config that no repair has taken away."""
        made = {repair.kind for repair in self.spec.repairs}
        clean = BatchPlan(data=self.config.data, seed=self.config.seed, world=self.world)
        context = FaultContext(config=self.config, plan=clean, rank=self.rank)
        faults = [create(item, context) for item in self.config.faults]
        return [fault for fault in faults if not made.intersection(fault.repaired_by)]

    def _tamper(self, shard: str, blob: bytes) -> bytes:
        for fault in self.faults:
            blob = fault.tamper(shard, blob)
        return blob

    def _label_if_due(self, fault: Fault, step: int) -> None:
        """Write the truth about a fault at the step where it begins, unless its shards are skipped there."""
        label = fault.label()
        if self.rank != 0 or step != label.onset_step:
            return
        if label.shards:
            read = {shard_name(part.shard) for rank in label.ranks for part in self.plan.batch(step, rank)}
            if not read.intersection(label.shards):
                return
        self.monitor.event(EventKind.FAULT_INJECTED, f"{label.fault} begins", label.to_json())

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
        if spec.skips.ranges:
            self.monitor.event(EventKind.SKIP, f"{spec.skips.samples()} samples", {"skips": spec.skips.to_json()})

    def _show_progress(self, step: int, loss: Tensor) -> None:
        now = time.monotonic()
        last = step + 1 == self.spec.stop_step
        if self.rank == 0 and (last or now - self._progress_at_s >= PROGRESS_INTERVAL_S):
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


def _wrap(model: nn.Module) -> DistributedDataParallel:
    """DDP without any exchange of buffers: amax histories belong to a rank. With the exchange rank 0 would also wait
    in the forward pass, and time would no longer tell which rank is slow. (The successor of the deprecated argument
    still overwrites the buffers once, at the start.)"""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        return DistributedDataParallel(model, broadcast_buffers=False)


def _matches(name: str, target: str) -> bool:
    """Whether a tensor's name is the target, lies under it, or ends with it."""
    return name == target or name.startswith(f"{target}.") or name.endswith(f".{target}")


def _covers(layer: str, target: str) -> bool:
    """Whether a target names this layer or one of its tensors."""
    roles: Sequence[str] = ("", ".x", ".w", ".g")
    return any(_matches(f"{layer}{role}", target) for role in roles)
