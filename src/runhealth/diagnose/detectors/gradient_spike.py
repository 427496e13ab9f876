"""The gradient norm leaves its baseline: at least 3 x its median and 6 robust sigma on the log of the norm.

It leads many loss spikes. On its own it is a `gradient_spike` only if the loss does not show it; the incident decides.
A norm of exactly 0 means that it was not measured.
"""

import math
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline

FACTOR = 3.0
Z_ALARM = 6.0
DEBOUNCE_FRAMES = 20
RELEARN_FRAMES = 256


class GradientSpike(Detector):
    name: ClassVar[str] = "gradient_spike"
    kinds: ClassVar[tuple[str, ...]] = ("gradient_spike",)

    def __init__(self) -> None:
        self._norm = Baseline(128, least=32, floor=0.05)
        self._since = DEBOUNCE_FRAMES
        self._run = 0

    def update(self, frame: Frame) -> list[Alarm]:
        norm = frame.get("grad_norm")
        self._since += 1
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
        if self._since < DEBOUNCE_FRAMES or (self._run > 1 and self._since < RELEARN_FRAMES):
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
                message=f"gradient norm {norm:.3g} against {baseline:.3g}",
            )
        ]


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
