"""Low-precision overflow that the run is not used to, and the tensors it happens in.

Overflow counts leave a quiet habit (at least 16 elements and 8 x the 98th percentile so far), or the amax is over
1.3 x the 98th percentile of amax/believed amax, in 2 of 3 frames: one step with a handful of overflowing elements is
everyday life. The first 64 frames calibrate and raise nothing. One alarm an episode: the next one needs 64 quiet frames
before it.
"""

from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import Ahead, Chunks, settled, take
from runhealth.storage.blocks import Bools, Floats, Ints

CALIBRATION_FRAMES = 64
LEAST_ELEMENTS = 16
COUNT_FACTOR = 8.0
AMAX_FACTOR = 1.3
AMAX_LEAST = 1.5
REARM_FRAMES = 64
RECENT = 3


class FpOverflow(Detector):
    name: ClassVar[str] = "fp_overflow"
    kinds: ClassVar[tuple[str, ...]] = ("fp_overflow",)
    reads: ClassVar[tuple[str, ...]] = ("overflow_count", "amax_ratio")

    def __init__(self) -> None:
        self._count = Baseline(256, least=16)
        self._amax = Baseline(256, least=16)
        self._count_recent: deque[int] = deque(maxlen=RECENT)  # the step where flagged, else -1
        self._amax_recent: deque[int] = deque(maxlen=RECENT)
        self._seen = 0
        self._since = REARM_FRAMES

    def update(self, frame: Frame) -> list[Alarm]:
        count, amax = frame.total("overflow_count"), frame.largest("amax_ratio")
        if count is None and amax is None:
            return []
        self._seen += 1
        self._since += 1
        signal, value, habit, onset = "", 0.0, 0.0, frame.step
        if count is not None:
            usual = self._count.quantile(0.98) if self._count.ready else 0.0
            flagged = count >= max(LEAST_ELEMENTS, COUNT_FACTOR * usual)
            if not flagged or self._seen <= CALIBRATION_FRAMES:
                self._count.push(float(count))
            if _twice(self._count_recent, flagged, frame.step):
                signal, value, habit = "overflow_count", float(count), usual
                onset = min(step for step in self._count_recent if step >= 0)
        if amax is not None:
            usual = self._amax.quantile(0.98) if self._amax.ready else 1.0
            flagged = amax > max(AMAX_LEAST, AMAX_FACTOR * usual)
            if not flagged:
                self._amax.push(float(amax))
            if _twice(self._amax_recent, flagged, frame.step) and not signal:
                signal, value, habit = "amax_ratio", float(amax), usual
                onset = min(step for step in self._amax_recent if step >= 0)
        if not signal or self._seen <= CALIBRATION_FRAMES:
            return []
        armed = self._since >= REARM_FRAMES
        self._since = 0
        if not armed:
            return []
        layers = overflowing_layers(frame)
        ranks = (
            tuple(r for r, v in frame.per_rank(signal).items() if v >= 0.5 * value)
            if signal == "amax_ratio"
            else (tuple(r for r, v in frame.per_rank(signal).items() if v > 0))
        )
        where = f" in {', '.join(layers[:3])}" if layers else ""
        return [
            Alarm(
                detector=self.name,
                kind="fp_overflow",
                signal=signal,
                attempt=frame.attempt,
                step=frame.step,
                onset_step=onset,
                score=value / max(habit, 1.0),
                value=value,
                baseline=habit,
                ranks=ranks if len(ranks) < len(frame.ranks) else (),
                layers=layers,
                message=f"{signal} {value:g} against {habit:g}{where}",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        count, amax = block.total("overflow_count"), block.largest("amax_ratio")
        absent = np.zeros(len(block), dtype=np.bool_)
        counted, scaled = (absent if signal is None else signal.present for signal in (count, amax))
        counts, ratios = (np.full(len(block), np.nan) if signal is None else signal.values for signal in (count, amax))
        rows = np.flatnonzero(counted | scaled)
        found: list[tuple[int, Alarm]] = []
        part = Chunks(self._count, len(rows))
        while part:
            mine = rows[part.at : part.end]
            loud = self._first_flagged(mine, counted, counts, ratios)
            quiet = mine[:loud]
            self._seen += len(quiet)
            self._since += len(quiet)
            for habit, recent, there, values in (
                (self._count, self._count_recent, counted, counts),
                (self._amax, self._amax_recent, scaled, ratios),
            ):
                taken = quiet[there[quiet]]
                take(habit, values[taken])
                recent.extend([-1] * min(len(taken), RECENT))
            if loud < len(mine):
                found.extend(self.update_rows(block, (int(mine[loud]),)))
                part.loud(part.at + loud)
            else:
                part.quiet()
        return found

    def _first_flagged(self, rows: Ints, counted: Bools, counts: Floats, ratios: Floats) -> int:
        """The first of the rows that may be flagged; their number if none is."""
        over = (counts[rows] >= LEAST_ELEMENTS) | (ratios[rows] > AMAX_LEAST)
        high = ratios[rows] > AMAX_LEAST
        if over.any() and not high.any() and settled(self._count):
            taken = counts[rows][counted[rows]]
            over[counted[rows]] &= taken >= COUNT_FACTOR * Ahead(self._count, taken).quantile(0.98)
        return int(over.argmax()) if over.any() else len(rows)


def _twice(recent: deque[int], flagged: bool, step: int) -> bool:
    """Note a frame; whether it and another of the last three are flagged."""
    recent.append(step if flagged else -1)
    return flagged and sum(s >= 0 for s in recent) >= 2


def overflowing_layers(frame: Frame) -> tuple[str, ...]:
    """Layers with overflowing elements, or an amax over 1.3 x the believed one; most first."""
    worst: dict[str, float] = {}
    for sample in frame.layers:
        count = sample.values.get("overflow_count", 0)
        believed = sample.values.get("amax_believed", 0.0)
        ratio = sample.values.get("amax", 0.0) / believed if believed else 0.0
        if count > 0 or ratio > AMAX_FACTOR:
            worst[sample.layer] = max(worst.get(sample.layer, 0.0), float(count), ratio)
    return tuple(sorted(worst, key=lambda layer: (-worst[layer], layer))[:8])


DETECTOR = FpOverflow
