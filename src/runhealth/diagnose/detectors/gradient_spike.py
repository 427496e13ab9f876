"""The gradient norm leaves its baseline: at least 3 x its median and 6 robust sigma on the log of the norm.

It leads many loss spikes. On its own it is a `gradient_spike` only if the loss does not show it; the incident decides.
A norm that stays up for 32 frames is told a second time, as a warning. Bursts while the loss still falls fast, or while
the learning rate is warming up, are marked: they are everyday life.
A norm of exactly 0 means that it was not measured.
"""

import math
from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.excursion import logs_of
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Floats

FACTOR = 3.0
Z_ALARM = 6.0
DEBOUNCE_FRAMES = 20
RELEARN_FRAMES = 256
STAYS_FRAMES = 32
LARGEST_BLOCK = 4096
DESCENT_POINTS, FALLEN = 32, 0.9
WARM_UP_POINTS, RISEN = 32, 1.05


class GradientSpike(Detector):
    name: ClassVar[str] = "gradient_spike"
    kinds: ClassVar[tuple[str, ...]] = ("gradient_spike",)
    reads: ClassVar[tuple[str, ...]] = ("grad_norm",)

    def __init__(self) -> None:
        self._norm = Baseline(128, least=32, floor=0.05)
        self._since = DEBOUNCE_FRAMES
        self._run = 0
        self._losses: deque[float] = deque(maxlen=DESCENT_POINTS)
        self._rates: deque[float] = deque(maxlen=WARM_UP_POINTS)

    def update(self, frame: Frame) -> list[Alarm]:
        norm = frame.get("grad_norm")
        self._since += 1
        if frame.loss is not None and frame.loss > 0 and math.isfinite(frame.loss):
            self._losses.append(frame.loss)
        if "lr" in frame.values:
            self._rates.append(frame.values["lr"])
        if norm is None or not math.isfinite(norm) or norm <= 0:
            return []
        y = math.log(norm)
        if not self._norm.ready:
            self._norm.push(y)
            return []
        center = self._norm.center
        excess = y - center
        if excess < math.log(FACTOR) or excess < Z_ALARM * self._norm.sigma:
            self._norm.push(y)
            self._run = 0
            return []
        self._run += 1
        if self._run >= RELEARN_FRAMES:
            self._norm = Baseline(128, least=32, floor=0.05)
            self._run = 0
        else:
            self._norm.push(center + 3 * self._norm.sigma)
        stays = self._run == STAYS_FRAMES
        if not stays and (
            self._since < DEBOUNCE_FRAMES
            or (self._run > 1 and self._since < RELEARN_FRAMES)
            or self._run > STAYS_FRAMES
        ):
            return []
        self._since = 0
        baseline = math.exp(center)
        return [
            Alarm(
                detector=self.name,
                kind="gradient_spike",
                signal="grad_norm",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=excess / self._norm.sigma,
                value=float(norm),
                baseline=baseline,
                ranks=_leading_ranks(frame),
                message=f"gradient norm {norm:.3g} against {baseline:.3g}"
                + (f", over {FACTOR:g} x its median for {STAYS_FRAMES} rows" if stays else ""),
                severity=Severity.WARNING if stays else None,
                details={"early_descent": True} if self._early() else {},
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        signal = block.get("grad_norm")
        if signal is None:
            self._pass(block)
            return []
        known = logs_of(signal)
        rows = np.flatnonzero(known.present)
        logs = known.values[rows]
        found: list[tuple[int, Alarm]] = []
        start = i = 0
        while i < len(rows):
            quiet = self._take(logs[i : i + LARGEST_BLOCK]) if settled(self._norm) else 0
            i += quiet
            if i == len(rows) or quiet == LARGEST_BLOCK:
                continue
            stop = int(rows[i])
            self._pass(block.part(start, stop))
            found.extend(self.update_rows(block, (stop,)))
            start, i = stop + 1, i + 1
        self._pass(block.part(start))
        return found

    def _take(self, logs: Floats) -> int:
        """Take in the norms up to the first that is high. Returns how many."""
        ahead = Ahead(self._norm, logs)
        excess = logs - ahead.center()
        high = (excess >= math.log(FACTOR)) & (excess >= Z_ALARM * ahead.sigma())
        quiet = int(high.argmax()) if high.any() else len(logs)
        if quiet:
            take(self._norm, logs[:quiet])
            self._run = 0
        return quiet

    def _pass(self, block: FrameBlock) -> None:
        """What rows leave behind whose norm is not high."""
        self._since += len(block)
        losses, logs, rates = block.loss, block.log_loss, block.get("lr")
        if losses is not None and logs is not None:
            self._losses.extend(losses.values[logs.present][-DESCENT_POINTS:].tolist())
        if rates is not None:
            self._rates.extend(rates.values[rates.present][-WARM_UP_POINTS:].tolist())

    def _early(self) -> bool:
        """The loss fell by 10 % within the last 32 points, or the learning rate rises."""
        losses, rates = list(self._losses), self._rates
        quarter = len(losses) // 4
        falls = quarter >= 4 and median(losses[-quarter:]) < FALLEN * median(losses[:quarter])
        return falls or (len(rates) == WARM_UP_POINTS and rates[-1] > RISEN * rates[0])


def _leading_ranks(frame: Frame) -> tuple[int, ...]:
    """The ranks whose own norm, before the reduce, is over twice that of the lowest half."""
    norms = {rank: norm for rank, norm in frame.per_rank("grad_norm_rank").items() if math.isfinite(norm)}
    if len(norms) < 2:
        return ()
    ordered = sorted(norms.values())
    typical = ordered[(len(ordered) - 1) // 2]
    chosen = tuple(rank for rank, norm in norms.items() if norm > 2 * typical)
    return chosen if 0 < len(chosen) <= len(norms) // 2 else ()


DETECTOR = GradientSpike
