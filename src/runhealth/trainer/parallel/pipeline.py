"""Pipeline parallelism: GPipe (Huang et al., arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al.,
arXiv:2104.04473), by torch.distributed.pipelining.

Shapes are told to the stages, not found out by a trial pass: a trial would enter the fp8 histories.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _PipelineSchedule,
)

from runhealth.trainer.config import ParallelConfig

Loss = Callable[[Tensor, Tensor], Tensor]
PhaseTimer = Callable[[str], AbstractContextManager[object]]


def bubble_fraction(parallel: ParallelConfig) -> float:
    """The share of a step in which a rank has nothing to do, if all micro-batches cost the same and sending is free:
    (p - 1) / (v m + p - 1) with v stages a rank (Narayanan et al., section 2.2, as a share of the whole step)."""
    idle = parallel.pp - 1
    return idle / (parallel.stages_per_rank * parallel.microbatches + idle)


class Pipeline:
    """The stages of one rank and their schedule. `modules` are the stages as they are called (wrapped by DDP or FSDP),
    in ascending order; `shape` is [sequences of a micro-batch, seq of the residual stream on this rank, width]."""

    def __init__(
        self,
        parallel: ParallelConfig,
        modules: Sequence[nn.Module],
        stages: Sequence[int],
        shape: tuple[int, int, int],
        vocabulary: int,
        group: dist.ProcessGroup,
        loss: Loss,
    ) -> None:
        self._group, self._numbers, self._count = group, tuple(stages), parallel.stages
        self._peers = dist.get_process_group_ranks(group)
        self._place = dist.get_rank(group)
        self.has_first, self.has_last = 0 in self._numbers, parallel.stages - 1 in self._numbers
        self._loss = loss
        self._phase: PhaseTimer | None = None
        self.busy_s = 0.0
        self.reduce_s = 0.0
        batch, seq, width = shape
        stream = torch.empty(batch, seq, width, requires_grad=True)
        self._built = []
        for module, number in zip(modules, self._numbers, strict=True):
            first, last = number == 0, number == parallel.stages - 1
            stage = PipelineStage(
                module,
                number,
                parallel.stages,
                torch.device("cpu"),
                input_args=torch.empty(batch, 1, dtype=torch.int64) if first else stream,
                output_args=torch.empty(batch, 1, vocabulary, requires_grad=True) if last else stream,
                group=group,
            )
            self._time(stage)
            self._built.append(stage)
        self._schedule = self._make(parallel)

    def _make(self, parallel: ParallelConfig) -> _PipelineSchedule:
        if parallel.schedule == "interleaved":
            return ScheduleInterleaved1F1B(list(self._built), parallel.microbatches, loss_fn=self._timed_loss)
        kind = ScheduleGPipe if parallel.schedule == "gpipe" else Schedule1F1B
        return kind(self._built[0], parallel.microbatches, loss_fn=self._timed_loss)

    def train(self, inputs: Tensor, labels: Tensor, phase: PhaseTimer) -> None:
        """Forward and backward pass of all micro-batches: int64 [batch, seq] each. What is neither is waiting."""
        self._phase = phase
        self.busy_s = self.reduce_s = 0.0
        arguments = (inputs,) if self.has_first else ()
        with phase("wait"):
            self._schedule.step(*arguments, target=labels if self.has_last else None, return_outputs=False)

    def relay(self, inputs: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Forward pass alone, one batch through all stages; logits where the last stage is, None elsewhere. `shape` is
        that of the residual stream."""
        x = inputs
        for number, stage in zip(self._numbers, self._built, strict=True):
            if number:
                x = torch.empty(*shape)
                dist.recv(x, src=self._peers[(number - 1) % len(self._peers)], group=self._group)
            x = _unwrapped(stage.submod)(x)
            if number + 1 < self._count:
                dist.send(x.contiguous(), dst=self._peers[(number + 1) % len(self._peers)], group=self._group)
        return x if self.has_last else None

    def _timed_loss(self, output: Tensor, labels: Tensor) -> Tensor:
        assert self._phase is not None
        with self._phase("forward"):
            return self._loss(output, labels)

    def _time(self, stage: Any) -> None:
        """Count forward and backward chunks as such, and as busy; the reduce at the end counts as waiting, but is no
        bubble."""
        for method, name in (("forward_one_chunk", "forward"), ("backward_one_chunk", "backward")):
            setattr(stage, method, self._timed(getattr(stage, method), name))
        inner = stage.perform_reduce_grad

        def reduce(*args: Any) -> None:
            start_s = time.perf_counter()
            inner(*args)
            self.reduce_s += time.perf_counter() - start_s

        stage.perform_reduce_grad = reduce

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            assert self._phase is not None
            start_s = time.perf_counter()
            with self._phase(name):
                result = call(*args, **kwargs)
            self.busy_s += time.perf_counter() - start_s
            return result

        return timed


def _unwrapped(module: nn.Module) -> nn.Module:
    """Evaluation goes past DDP, whose forward pass prepares a backward pass."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
