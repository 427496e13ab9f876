"""NaN or Inf in the loss, the gradient norm or the evaluation loss, on any rank, whatever the log says about it.

A skipped fp16 step is a missing point, not an anomaly: a non-finite gradient norm of a step that was skipped, or that
lowered the loss scale, does not count. One alarm an episode; an episode ends after 64 finite frames.
"""

import math
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame

SIGNALS = ("loss", "grad_norm", "grad_norm_rank", "eval_loss")
REARM_FRAMES = 64


class NonFinite(Detector):
    name: ClassVar[str] = "non_finite"
    kinds: ClassVar[tuple[str, ...]] = ("non_finite",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "grad_norm", "grad_norm_rank", "eval_loss", "nonfinite_count")

    def __init__(self) -> None:
        self._quiet: dict[str, int] = {}
        self._scale: float | None = None

    def update(self, frame: Frame) -> list[Alarm]:
        skipped = self._skipped(frame)
        if not _suspicious(frame):
            for signal in self._quiet:
                self._quiet[signal] += 1
            return []
        alarms = []
        for signal in SIGNALS:
            bad = [
                rank
                for rank, values in frame.ranks.items()
                if (value := values.get(signal)) is not None and not math.isfinite(value)
            ]
            if signal == "grad_norm_rank" and not bad:
                bad = [rank for rank, values in frame.ranks.items() if values.get("nonfinite_count", 0) > 0]
            if not bad:
                if signal in self._quiet:
                    self._quiet[signal] += 1
                continue
            if skipped:
                continue
            fresh = self._quiet.get(signal, REARM_FRAMES) >= REARM_FRAMES
            self._quiet[signal] = 0
            if fresh:
                count = len(bad)
                who = (
                    f"rank {bad[0]}" if count == 1 and len(frame.ranks) > 1 else f"{count} of {len(frame.ranks)} ranks"
                )
                alarms.append(
                    Alarm(
                        detector=self.name,
                        kind="non_finite",
                        signal=signal,
                        attempt=frame.attempt,
                        step=frame.step,
                        onset_step=frame.step,
                        score=math.inf,
                        value=float(frame.ranks[bad[0]].get(signal, math.nan)),
                        baseline=math.nan,
                        ranks=tuple(bad) if len(bad) < len(frame.ranks) else (),
                        message=f"{signal} is not finite on {who}",
                    )
                )
        return alarms

    def _skipped(self, frame: Frame) -> bool:
        scale = frame.get("loss_scale")
        lowered = scale is not None and self._scale is not None and scale < self._scale
        if scale is not None:
            self._scale = float(scale)
        return lowered or bool(frame.get("step_skipped"))


def _suspicious(frame: Frame) -> bool:
    """Whether any value may be non-finite; one sum tells it for nearly all frames."""
    total = 0.0
    for values in frame.ranks.values():
        get = values.get
        total += get("loss", 0.0) + get("grad_norm", 0.0) + get("grad_norm_rank", 0.0) + get("eval_loss", 0.0)
        if get("nonfinite_count"):
            return True
    return total - total != 0.0  # NaN and Inf less themselves are NaN


DETECTOR = NonFinite
