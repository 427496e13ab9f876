"""The numbers that a run reports of its own work: MFU, traffic, bubble, memory by part."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from runhealth.instrument.step import Step
from runhealth.trainer import flops, traffic
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.layout import describe, dimensions
from runhealth.trainer.memory import ActivationMeter, state_bytes
from runhealth.trainer.parallel.engine import Engine
from runhealth.trainer.parallel.pipeline import bubble_fraction

_MATRIX = 384  # rows and columns of the product that is timed for the peak
_TRIES = 12


def measured_peak_flops_s(dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of one thread in the fastest of a few square matrix products."""
    a, b = (torch.ones(_MATRIX, _MATRIX, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    for _ in range(_TRIES):
        start_s = time.perf_counter()
        a @ b
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _MATRIX**3 / best_s


class Numbers:
    """Of one rank. Collective to build: rank 0's measure of the peak counts for all."""

    def __init__(self, config: TrainConfig, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self._config, self._engine, self._optimizer = config, engine, optimizer
        self._sends = traffic.step_bytes(config, dist.get_rank())
        # ranks beyond the cores share them: the peak is that of the machine, not of each rank
        cores = min(config.world, os.cpu_count() or 1)
        low = config.model.precision in ("bf16", "fp16")
        dtype = torch.bfloat16 if low else torch.float32
        peak = torch.tensor(measured_peak_flops_s(dtype) * cores, dtype=torch.float64)
        dist.broadcast(peak, src=0)
        self.peak_flops_s = float(peak)
        self._meter: ActivationMeter | None = ActivationMeter(engine.part)
        self._activations_bytes = 0
        self.memory: dict[str, int] = {}  # by part, from the second step on
        self._recorded = False
        self._began_s = self._start_s = self._end_s = 0.0
        self._steps = 0

    @property
    def line(self) -> str:
        """The layout in words, as it is printed at the start."""
        sizes = ", ".join(f"{name} {size}" for name, size in dimensions(self._config).items() if size > 1)
        return f"{describe(self._config)}; mesh ({sizes or 'one rank'}), tensor parallelism innermost"

    def facts(self) -> dict[str, object]:
        config = self._config
        return {
            "mesh": dimensions(config),
            "flops_per_step": flops.step_flops(config),
            "flops_convention": flops.CONVENTION,
            "peak_flops_s": self.peak_flops_s,
            "sends_bytes": self._sends,
            "bubble_fraction": bubble_fraction(config.parallel),
        }

    def begin(self) -> None:
        """The step begins."""
        self._began_s = time.perf_counter()
        self._steps += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the passes of a step. Activations are metered in the first step of an attempt only."""
        self._start_s = time.perf_counter()
        meter, self._meter = self._meter, None
        if meter is None:
            yield
            return
        with meter.measure():
            yield
        self._activations_bytes = meter.peak_bytes

    def synchronised(self) -> None:
        """All stages have ended their passes and met in the norm."""
        self._end_s = time.perf_counter()

    def before_optimizer(self) -> None:
        """Memory is counted while the gradients are there: in the second step of an attempt, once moments exist."""
        if self.memory or self._steps < 2:
            return
        self.memory = {
            **state_bytes(self._engine.part, self._optimizer),
            "mem_activations_bytes": self._activations_bytes,
        }

    def record(self, step: Step) -> None:
        seconds = time.perf_counter() - self._began_s
        step.record("mfu", flops.mfu(self._config, seconds, self.peak_flops_s))
        step.record("comm_bytes", sum(self._sends.values()))
        pipeline = self._engine.pipeline
        if pipeline is not None:
            step.record("stage", self._engine.place.pp)
            whole_s = self._end_s - self._start_s - pipeline.reduce_s
            if whole_s > 0:  # a step that the loss scaler left out has no norm to meet in
                step.record("bubble_fraction", max(0.0, 1.0 - pipeline.busy_s / whole_s))
        if self.memory and not self._recorded:
            self._recorded = True
            for name, size_bytes in self.memory.items():
                step.record(name, size_bytes)
