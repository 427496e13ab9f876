"""A layer gets no gradient any more: under a fiftieth of its own habit in two samples, while the other layers go on."""

import itertools
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median

SIGNALS = ("grad_rms", "grad_norm")
DEAD = math.log(1 / 50)
OTHERS = math.log(1 / 4)
SAMPLES = 2
LEAST = 6
FLOOR = 1e-30


class DeadLayer(Detector):
    name: ClassVar[str] = "dead_layer"
    kinds: ClassVar[tuple[str, ...]] = ("dead_layer",)
    reads: ClassVar[tuple[str, ...]] = ("layer.grad_rms", "layer.grad_norm")

    def __init__(self) -> None:
        self._habits: dict[str, Baseline] = {}
        self._dead: dict[str, tuple[int, int]] = {}  # layer -> samples, step of the first
        self._told: set[str] = set()

    def update(self, frame: Frame) -> list[Alarm]:
        if len(frame.layers) < 2:
            return []
        now: dict[str, float] = {}
        for sample in frame.layers:
            value = next((sample.values[s] for s in SIGNALS if s in sample.values), None)
            if value is not None and math.isfinite(value):
                now[sample.layer] = max(now.get(sample.layer, 0.0), float(value))
        return self._judge(frame, now)

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        layers = block.layers()
        if layers is None:
            return []
        columns, starts = layers
        values: list[float] = np.full(len(columns.row), np.nan).tolist()
        for name in reversed(SIGNALS):  # the first that a sample has
            column = columns.columns.get(name)
            if column is None:
                continue
            there = [True] * len(values) if column.present is None else column.present.tolist()
            found = column.values.astype(np.float64, copy=False).tolist()
            values = [new if known else old for new, known, old in zip(found, there, values, strict=True)]
        names = [columns.layer_names[layer] for layer in columns.layers.tolist()]
        alarms: list[tuple[int, Alarm]] = []
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            if stop - start < 2:
                continue
            now: dict[str, float] = {}
            for layer, value in zip(names[start:stop], values[start:stop], strict=True):
                if math.isfinite(value):
                    now[layer] = max(now.get(layer, 0.0), value)
            alarms.extend((row, alarm) for alarm in self._judge(block.frame(row), now))
        return alarms

    def _judge(self, frame: Frame, now: dict[str, float]) -> list[Alarm]:
        """`now`: layer -> its gradient."""
        falls: dict[str, float] = {}
        for layer, value in now.items():
            habit = self._habits.get(layer)
            if habit is None:
                habit = self._habits[layer] = Baseline(32, least=LEAST)
            y = math.log(max(value, FLOOR))
            if habit.ready:
                falls[layer] = y - habit.center
                if falls[layer] < DEAD:
                    continue
            habit.push(y)
            self._dead.pop(layer, None)
            self._told.discard(layer)
        if len(falls) < 2 or median(list(falls.values())) < OTHERS:
            return []
        found = []
        for layer in sorted(falls):
            if falls[layer] < DEAD:
                samples, first = self._dead.get(layer, (0, frame.step))
                self._dead[layer] = (samples + 1, first)
                if samples + 1 >= SAMPLES and layer not in self._told:
                    found.append(layer)
        if not found:
            return []
        self._told.update(found)
        value, usual = now[found[0]], math.exp(self._habits[found[0]].center)
        message = f"{', '.join(found[:4])}: the gradient fell from {usual:.2g} to {value:.2g}, the other layers go on"
        alarm = self.fact(
            frame,
            "dead_layer",
            "layer.grad_rms",
            message,
            onset=self._dead[found[0]][1],
            value=value,
            baseline=usual,
        )
        return [replace(alarm, layers=tuple(found[:8]))]


DETECTOR = DeadLayer
