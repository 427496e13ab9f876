"""The faults of a run as the loop meets them: all of them at each point of the step."""

import os
import signal
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runhealth.instrument import Monitor
from runhealth.instrument.sink import LogOpener, OpenedLog, RecordLog
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import Record, StepRecord
from runhealth.trainer.data import BatchPlan, Part
from runhealth.trainer.fault import Fault, FaultContext, Phase, create
from runhealth.trainer.launch import LaunchSpec


class FaultHooks:
    """The faults of the config that no repair has taken away, in the order of the config."""

    def __init__(self, spec: LaunchSpec, rank: int) -> None:
        made = {repair.kind for repair in spec.repairs}
        clean = BatchPlan(data=spec.config.data, seed=spec.config.seed, world=spec.config.dp)
        context = FaultContext(config=spec.config, plan=clean, rank=rank)
        faults = [create(item, context) for item in spec.config.faults]
        self.faults: list[Fault] = [fault for fault in faults if not made.intersection(fault.repaired_by)]
        self._spec, self._rank = spec, rank
        self._held: list[bytearray] = []

    def tamper(self, shard: str, blob: bytes) -> bytes:
        for fault in self.faults:
            blob = fault.tamper(shard, blob)
        return blob

    def attach(self, model: nn.Module) -> None:
        for fault in self.faults:
            fault.attach(model)

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

    def before_step(self, step: int, model: nn.Module) -> None:
        for fault in self.faults:
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
