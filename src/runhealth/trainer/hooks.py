"""The faults of a run as the loop meets them: all of them at each point of the step."""

import os
import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from runhealth.instrument import Monitor
from runhealth.instrument.ddp import CommHook, allreduce_mean
from runhealth.instrument.sink import LogOpener, OpenedLog, RecordLog
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record, StepRecord
from runhealth.trainer.data import BatchPlan, Part
from runhealth.trainer.fault import Fault, FaultContext, Phase, create
from runhealth.trainer.gain import Gain
from runhealth.trainer.launch import LaunchSpec


class FaultHooks:
    """The faults of the config that no repair has taken away, in the order of the config."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        made = {repair.kind for repair in spec.repairs}
        clean = BatchPlan(data=spec.config.data, seed=spec.config.seed, world=spec.config.dp)
        context = FaultContext(config=spec.config, plan=clean, rank=rank)
        faults = [create(item, context) for item in spec.config.faults]
        if spec.replay is not None:
            faults = [fault for fault in faults if not fault.transient]
        self.faults: list[Fault] = [fault for fault in faults if not made.intersection(fault.repaired_by)]
        self._spec, self._rank = spec, rank
        self._held: list[bytearray] = []
        self._gain: Gain | None = None
        self._step = -1

    def tamper(self, shard: str, blob: bytes) -> bytes:
        for fault in self.faults:
            blob = fault.tamper(shard, blob)
        return blob

    def attach(self, model: nn.Module) -> None:
        embed = getattr(model, "embed", None)  # not on later stages of a pipeline
        if embed is not None and any(type(fault).gain is not Fault.gain for fault in self.faults):
            self._gain = Gain(embed)
        for fault in self.faults:
            fault.attach(model)

    def gain(self, step: int, samples: int) -> Tensor | None:
        """The gain of each sample, float32 [samples], which the model gets as well; None where no fault changes any."""
        return self.give(self.gains(step, samples)) if self._gain is not None else None

    def gains(self, step: int, samples: int) -> Tensor:
        """What the faults of the data make of a gain of 1."""
        gain = torch.ones(samples)
        for fault in self.faults:
            gain = fault.gain(step, gain)
        return gain

    def give(self, gain: Tensor) -> Tensor | None:
        """Have the model multiply with it; None where no fault changes any."""
        if self._gain is None:
            return None
        self._gain.set(gain)
        return gain

    def comm_hook(self) -> CommHook | None:
        """DDP's default with the faults that act on what it returns; None where none does."""
        if all(type(fault).reduced is Fault.reduced for fault in self.faults):
            return None

        def hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            step, index = self._step, bucket.index()

            def arrived(done: torch.futures.Future[Tensor]) -> Tensor:
                result: Tensor = done.value()
                for fault in self.faults:
                    fault.reduced(step, index, result)
                return result

            return allreduce_mean(group, bucket).then(arrived)

        return hook

    def after_load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for fault in self.faults:
            fault.after_load(step, model, optimizer)

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        for fault in self.faults:
            parts = fault.parts(step, parts)
        return parts

    def tokens(self, step: int, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for fault in self.faults:
            inputs, labels = fault.tokens(step, inputs, labels)
        return inputs, labels

    def heldout(self, step: int, tokens: Tensor) -> Tensor:
        for fault in self.faults:
            tokens = fault.heldout(step, tokens)
        return tokens

    def learning_rate(self, step: int, lr: float) -> float:
        for fault in self.faults:
            lr = fault.learning_rate(step, lr)
        return lr

    def before_step(self, step: int, model: nn.Module, loss_scale: float) -> None:
        self._step = step
        for fault in self.faults:
            fault.loss_scale = loss_scale
            held_bytes = fault.held_bytes(step) - sum(map(len, self._held))
            if held_bytes > 0:
                self._held.append(bytearray(os.urandom(1) * held_bytes))  # written to: pages that are really held
            end = fault.ends(step)
            if end == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            while end == "hang":
                time.sleep(3_600.0)
            fault.before_step(step, model)

    def after_backward(self, step: int, model: nn.Module) -> None:
        for fault in self.faults:
            fault.after_backward(step, model)

    def before_optimizer(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for fault in self.faults:
            fault.before_optimizer(step, model, optimizer)

    def after_optimizer(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for fault in self.faults:
            fault.after_optimizer(step, model, optimizer)

    def stall(self, monitor: Monitor, step: int, *phases: Phase) -> None:
        """Sleep what the faults add to these phases."""
        for phase in phases:
            seconds = sum(fault.stall_s(step, phase) for fault in self.faults)
            if seconds > 0:
                with monitor.phase(phase):
                    time.sleep(seconds)

    def opener(self) -> LogOpener | None:
        """What the monitor opens its log with, where a fault changes what is written; None where none does."""
        lying = [fault for fault in self.faults if type(fault).logged is not Fault.logged]
        if not lying:
            return None
        spec = self._spec

        def open_log() -> OpenedLog:
            log = RankLog.create(f"{spec.run_path}/log/a{spec.attempt:03d}", self._rank)
            return OpenedLog(attempt=spec.attempt, log=_LyingLog(log, lying))

        return open_log


class _LyingLog:
    def __init__(self, log: RecordLog, faults: Sequence[Fault]) -> None:
        self._log, self._faults = log, faults

    def append(self, records: Sequence[Record]) -> None:
        self._log.append([self._changed(record) if isinstance(record, StepRecord) else record for record in records])

    def close(self) -> None:
        self._log.close()

    def _changed(self, record: StepRecord) -> StepRecord:
        values = dict(record.values)
        for fault in self._faults:
            values = fault.logged(record.step, values)
        return StepRecord(attempt=record.attempt, step=record.step, rank=record.rank, ts_ns=record.ts_ns, values=values)
