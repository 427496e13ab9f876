"""The loss or the gradient norm changes by an exact factor from one row to the next and stays there: sums for means, a
lost division, a loss scale that is not taken out.

Medians of the rows before and after must differ by a whole number, or one over it, as exactly as the noise allows to
say at all (three standard errors of the medians, at most 4 % of the loss and 8 % of the norm), and the step must be
sharp: the last rows before and the first after are at their levels. Learning moves either by such a factor only
gradually. A norm scatters more than a loss, so it takes more rows; one that scatters widely can tell nothing exact.
"""

import math
from collections import deque
from typing import ClassVar, NamedTuple

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.excursion import logs_of
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import mad_sigma, median
from runhealth.storage.blocks import Floats, Ints

LEAST_SIGMA = 0.004
SHARP_ROWS = 4
STEEP = 4 * 0.6  # between the sums of four rows before and after: under 4 ln 2, with noise
LARGEST, LARGEST_POWER = 64, 24  # a loss scale is a power of two; other factors are small


class _Kind(NamedTuple):
    rows: int  # before the step, and after it
    tolerance: float
    words: str


KINDS = {
    "loss": _Kind(16, 0.04, "the loss"),
    "grad_norm": _Kind(64, 0.08, "the gradient norm"),
}


class _Level(NamedTuple):
    step: int
    low: float
    high: float
    factor: int


def _factor(change: float, error: float) -> int | None:
    """The power of two, or else the whole number, that a change of the log stands for; None where it stands for none,
    or the error does not tell it from its neighbours."""
    power = round(change / math.log(2))
    if 1 <= power <= LARGEST_POWER and abs(change - power * math.log(2)) <= error:
        return int(2**power)
    whole = round(math.exp(min(change, math.log(2 * LARGEST))))
    if 2 <= whole <= LARGEST and abs(change - math.log(whole)) <= error <= math.log((whole + 1) / whole) / 2:
        return whole
    return None


class _Series:
    """The last logs of one signal, twice as many as it takes."""

    def __init__(self, kind: _Kind) -> None:
        self._kind = kind
        self._points: deque[tuple[int, float]] = deque(maxlen=2 * kind.rows)
        self._quiet = 0  # rows that lie in the window of a step that was told

    def push(self, step: int, y: float) -> _Level | None:
        kind, points = self._kind, self._points
        points.append((step, y))
        self._quiet -= 1
        if len(points) < 2 * kind.rows or self._quiet > 0:
            return None
        sharp = range(kind.rows - SHARP_ROWS, kind.rows + SHARP_ROWS)
        a, b, c, d, e, f, g, h = (points[i][1] for i in sharp)
        if abs((e + f + g + h) - (a + b + c + d)) < STEEP:
            return None
        logs = [y for _, y in points]
        before, after = logs[: kind.rows], logs[kind.rows :]
        low, high = median(before), median(after)
        change = high - low
        sigma = max(mad_sigma(sorted(before), low), mad_sigma(sorted(after), high), LEAST_SIGMA)
        error = 3 * 1.25 * sigma * math.sqrt(2 / kind.rows)
        factor = _factor(abs(change), error) if error <= kind.tolerance else None
        if factor is None:
            return None
        near = 4 * sigma
        if any(abs(y - low) > near for y in before[-SHARP_ROWS:]) or any(
            abs(y - high) > near for y in after[:SHARP_ROWS]
        ):
            return None
        self._quiet = kind.rows
        return _Level(points[kind.rows][0], low, high, factor)

    def loud(self, rows: Ints, logs: Floats) -> list[int]:
        """Which of the rows, with these logs, `push` would have to look at."""
        n = self._kind.rows
        y = np.concatenate([np.array([v for _, v in self._points]), logs])
        if len(y) < 2 * n:
            return []
        four = y[:-3] + y[1:-2] + y[2:-1] + y[3:]
        steep = np.flatnonzero(np.abs(four[SHARP_ROWS:] - four[:-SHARP_ROWS]) >= STEEP)
        at = steep + SHARP_ROWS + n - 1 - len(self._points)  # the last row of the window in whose middle the step lies
        found: list[int] = rows[at[(at >= 0) & (at < len(rows))]].tolist()
        return found

    def extend(self, steps: Ints, logs: Floats) -> None:
        """`push` rows that need no look."""
        kept = slice(max(0, len(logs) - 2 * self._kind.rows), None)
        self._points.extend(zip(steps[kept].tolist(), logs[kept].tolist(), strict=True))
        self._quiet -= len(logs)


class ScaleChange(Detector):
    name: ClassVar[str] = "scale_change"
    kinds: ClassVar[tuple[str, ...]] = ("scale_change",)
    reads: ClassVar[tuple[str, ...]] = tuple(KINDS)

    def __init__(self) -> None:
        self._series = {name: _Series(kind) for name, kind in KINDS.items()}

    def update(self, frame: Frame) -> list[Alarm]:
        alarms: list[Alarm] = []
        for name, series in self._series.items():
            value = frame.loss if name == "loss" else frame.get(name)
            if value is None or not math.isfinite(value) or value <= 0:
                continue
            found = series.push(frame.step, math.log(value))
            if found is not None:
                alarms.append(self._alarm(frame, name, found))
        return alarms

    def _alarm(self, frame: Frame, name: str, found: _Level) -> Alarm:
        how = f"{found.factor} x" if found.high > found.low else f"1/{found.factor} of"
        message = (
            f"from step {found.step:,} on {KINDS[name].words} is exactly {how} what it was: the way it is summed or "
            "divided has changed"
        )
        high, low = math.exp(found.high), math.exp(found.low)
        return self.fact(frame, "scale_change", name, message, onset=found.step, value=high, baseline=low)

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        norms = block.get("grad_norm")
        logs = {"loss": block.log_loss, "grad_norm": None if norms is None else logs_of(norms)}
        parts = {
            name: (self._series[name], np.flatnonzero(signal.present), signal.values)
            for name, signal in logs.items()
            if signal is not None
        }
        loud = {row for series, rows, values in parts.values() for row in series.loud(rows, values[rows])}
        found: list[tuple[int, Alarm]] = []
        at = 0
        for stop in [*sorted(loud), len(block)]:
            for series, rows, values in parts.values():
                low, high = np.searchsorted(rows, (at, stop)).tolist()
                quiet = rows[low:high]
                series.extend(block.steps[quiet], values[quiet])
            if stop < len(block):
                found.extend(self.update_rows(block, (stop,)))
            at = stop + 1
        return found


DETECTOR = ScaleChange
