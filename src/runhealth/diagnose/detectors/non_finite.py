"""NaN or Inf in the loss, the gradient norm or the evaluation loss, on any rank, whatever the log says about it.

A skipped fp16 step is a missing point, not an anomaly: a non-finite gradient norm of a step that was skipped, or that
lowered the loss scale, does not count. One alarm an episode; an episode ends after 64 finite frames. A number of the
whole job, which one rank writes, names no rank. A log that prints the mean of many steps may count those whose loss was
not finite, and print the mean of the others: the count tells.
"""

import math
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

SIGNALS = ("loss", "grad_norm", "grad_norm_rank", "eval_loss")
OF_JOB = ("grad_norm", "eval_loss")
COUNTS = ("nonfinite_count", "nan_steps")
REARM_FRAMES = 64


class NonFinite(Detector):
    name: ClassVar[str] = "non_finite"
    kinds: ClassVar[tuple[str, ...]] = ("non_finite",)
    reads: ClassVar[tuple[str, ...]] = (*SIGNALS, *COUNTS)

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
            writers = [rank for rank, values in frame.ranks.items() if signal in values]
            of_job = len(writers) == 1 < len(frame.ranks) and signal in OF_JOB
            counted = 0
            if signal == "loss" and not bad:
                counted = int(frame.largest("nan_steps") or 0)
            if not bad and not counted:
                if signal in self._quiet:
                    self._quiet[signal] += 1
                continue
            if skipped and not counted:  # a step without a finite loss is skipped too, but it is no overflow
                continue
            fresh = self._quiet.get(signal, REARM_FRAMES) >= REARM_FRAMES
            self._quiet[signal] = 0
            if fresh:
                count = len(bad)
                who = (
                    f"rank {bad[0]}" if count == 1 and len(frame.ranks) > 1 else f"{count} of {len(frame.ranks)} ranks"
                )
                if of_job:
                    who = "the whole job"
                if counted:
                    who = f"{counted} of the steps that this row stands for"
                alarms.append(
                    Alarm(
                        detector=self.name,
                        kind="non_finite",
                        signal=signal,
                        attempt=frame.attempt,
                        step=frame.step,
                        onset_step=frame.step,
                        score=math.inf,
                        value=float(frame.ranks[bad[0]].get(signal, math.nan)) if bad else math.nan,
                        baseline=math.nan,
                        ranks=tuple(bad) if len(bad) < len(frame.ranks) and not of_job else (),
                        message=f"{signal} is not finite on {who}",
                    )
                )
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        bad = np.zeros(len(block), dtype=np.bool_)
        for name in SIGNALS:
            if (signal := block.per_rank(name)) is not None:
                bad |= (signal.present & ~np.isfinite(signal.values)).any(axis=1)
        for name in COUNTS:
            if (count := block.per_rank(name)) is not None:
                bad |= (count.present & (count.values != 0)).any(axis=1)
        scale = block.get("loss_scale")
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row in [*np.flatnonzero(bad).tolist(), len(block)]:
            for name in self._quiet:
                self._quiet[name] += row - at
            if scale is not None and (last := scale.last(at, row)) is not None:
                self._scale = last
            if row < len(block):
                found.extend(self.update_rows(block, (row,)))
            at = row + 1
        return found

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
        if get("nonfinite_count") or get("nan_steps"):
            return True
    return total - total != 0.0  # NaN and Inf less themselves are NaN


DETECTOR = NonFinite
