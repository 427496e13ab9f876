"""The log hides non-finite steps.

Told by a gradient norm that is not finite while the loss is exactly 0, or equals the mean of all losses before it, or
repeats the row before, or has vanished from a row that always held it; and by a loss that falls to exactly 0 from one
row to the next and stays there. A vanished loss is non-finite by itself where the log says that no step was
skipped: Megatron leaves the field out when there was nothing finite to print, and a table leaves its cells empty, that
of the gradient norm too. Where some ranks' own gradients are finite and others' are not, the gradient broke on these
ranks, after a loss that was finite: such a log tells the truth.
"""

import itertools
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.windows import total
from runhealth.storage.blocks import Bools

LEAST_ROWS = 5
MEAN_SHARE = 1e-4  # as many digits as are printed
REARM_FRAMES = 64
REPEATS = 2
ZERO_ROWS, ZERO_FROM = 3, 0.05
VANISH = frozenset(
    {"loss", "grad_norm", "grad_norm_rank", "update_ratio"}
)  # not finite together, and left out together


class MaskedNonFinite(Detector):
    name: ClassVar[str] = "masked_non_finite"
    kinds: ClassVar[tuple[str, ...]] = ("masked_non_finite", "non_finite")
    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def __init__(self) -> None:
        self._keys: frozenset[str] = frozenset()
        self._rows = 0
        self._sum = 0.0
        self._losses = 0
        self._scale: float | None = None
        self._since: dict[str, int] = {}
        self._last = math.nan
        self._repeats = 0
        self._positive, self._zeros, self._zero_step = 0.0, 0, 0

    def update(self, frame: Frame) -> list[Alarm]:
        values = next(iter(frame.ranks.values()), {})  # the row of the lowest rank
        for kind in self._since:
            self._since[kind] += 1
        norm, loss = frame.get("grad_norm"), frame.loss
        lowered = self._lowered(frame)
        skipped = frame.get("step_skipped")
        bad_norm = norm is not None and not math.isfinite(norm) and not skipped and not lowered
        alarms: list[Alarm] = []
        if loss is not None:
            alarms += self._zero(frame, loss)
        if loss is None:
            missing = self._keys - values.keys()
            vanished = bool(frame.ranks) and values.keys() <= self._keys and "loss" in missing <= VANISH
            if vanished and self._rows < LEAST_ROWS:
                self._rows, vanished = 0, False  # rows without a loss are the habit of this log
            excused = bool(skipped) if skipped is not None else lowered
            if vanished and not excused:
                alarms += self._once(frame, "non_finite", "the loss is missing from a row that always held it")
                if bad_norm:
                    alarms += self._once(
                        frame,
                        "masked_non_finite",
                        "the log leaves the loss out while the gradient norm is not finite",
                    )
            return alarms
        if bad_norm and math.isfinite(loss) and not _broke_on_some(frame):
            if loss == 0.0:
                alarms += self._once(
                    frame,
                    "masked_non_finite",
                    "the log shows a loss of exactly 0 while the gradient norm is not finite",
                )
            elif loss == self._last:
                self._repeats += 1
                if self._repeats >= REPEATS:
                    alarms += self._once(
                        frame,
                        "masked_non_finite",
                        "the log repeats the last loss while the gradient norm is not finite",
                    )
            elif self._losses >= LEAST_ROWS:
                mean = self._sum / self._losses
                if abs(loss - mean) <= MEAN_SHARE * abs(mean):
                    alarms += self._once(
                        frame,
                        "masked_non_finite",
                        f"the log shows the mean of all losses before ({mean:.4g}) in place of a "
                        "loss that is not finite",
                    )
        if loss != self._last or not bad_norm:
            self._repeats = 0
        self._last = loss
        if math.isfinite(loss):
            self._sum += loss
            self._losses += 1
        keys = frozenset(values)
        self._rows = self._rows + 1 if keys == self._keys else 1
        self._keys = keys
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        loud = self._loud(block)
        found: list[tuple[int, Alarm]] = []
        at = 0
        for row in [*np.flatnonzero(loud).tolist(), len(block)]:
            if row > at:
                self._pass(block.part(at, row))
            if row < len(block):
                found.extend(self.update_rows(block, (row,)))
            at = row + 1
        return found

    def _loud(self, block: FrameBlock) -> Bools:
        """Rows whose gradient norm is not finite, whose loss is 0, or may have vanished."""
        loss, norm = block.loss, block.get("grad_norm")
        loud = np.zeros(len(block), dtype=np.bool_)
        if norm is not None:
            loud |= norm.present & ~np.isfinite(norm.values)
        if loss is not None:
            loud |= loss.present & (loss.values == 0.0)
        if loss is None or not loss.present.all():
            there = np.zeros(len(block), dtype=np.bool_) if loss is None else loss.present
            others = block.named(but="loss")
            last = np.maximum.accumulate(np.where(there, np.arange(len(block)), -1))
            names = block.names(but="loss")
            known = np.array([name in self._keys for name in names], dtype=np.bool_)
            before = np.where((last >= 0)[:, None], others[last], known)
            may_vanish = np.array([name in VANISH for name in names], dtype=np.bool_)
            loud |= ~there & ((before == others) | (before & may_vanish)).all(axis=1)
        return loud

    def _pass(self, block: FrameBlock) -> None:
        """Take in rows in which nothing is hidden."""
        for kind in self._since:
            self._since[kind] += len(block)
        loss, scale = block.loss, block.get("loss_scale")
        if scale is not None:
            self._scale = scale.last(0, len(block))
        if loss is None:
            return
        rows = np.flatnonzero(loss.present)
        losses = loss.values[rows]
        self._positive, self._zeros = float(losses[-1]), 0
        self._repeats, self._last = 0, float(losses[-1])
        finite = losses[np.isfinite(losses)]
        self._sum = total(self._sum, finite)
        self._losses += len(finite)
        named = block.named()[rows]
        keys = [frozenset(itertools.compress(block.names(), named[row].tolist())) for row in (0, -1)]
        changes = np.flatnonzero((named[1:] != named[:-1]).any(axis=1))
        if len(changes):
            self._rows = len(rows) - 1 - int(changes[-1])
        else:
            self._rows = self._rows + len(rows) if keys[0] == self._keys else len(rows)
        self._keys = keys[1]

    def _zero(self, frame: Frame, loss: float) -> list[Alarm]:
        """A loss does not reach 0 in all digits at once: several loggers print 0 for what is not finite."""
        if loss != 0.0:
            self._positive, self._zeros = loss, 0
            return []
        if self._zeros == 0:
            self._zero_step = frame.step
        self._zeros += 1
        if self._zeros != ZERO_ROWS or self._positive < ZERO_FROM or self._losses < LEAST_ROWS:
            return []
        return [
            replace(alarm, onset_step=self._zero_step)
            for alarm in self._once(
                frame,
                "masked_non_finite",
                f"the loss fell from {self._positive:.4g} to exactly 0 and stays there: the log shows 0 for a loss "
                "that is not finite, or nothing is trained any more",
            )
        ]

    def _lowered(self, frame: Frame) -> bool:
        scale = frame.get("loss_scale")
        before, self._scale = self._scale, float(scale) if scale is not None else self._scale
        return scale is not None and before is not None and scale < before

    def _once(self, frame: Frame, kind: str, message: str) -> list[Alarm]:
        fresh = self._since.get(kind, REARM_FRAMES) >= REARM_FRAMES
        self._since[kind] = 0
        if not fresh:
            return []
        return [
            Alarm(
                detector=self.name,
                kind=kind,
                signal="loss",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=math.inf,
                value=math.nan,
                baseline=math.nan,
                message=message,
            )
        ]


def _broke_on_some(frame: Frame) -> bool:
    """Before the reduce, some ranks' gradients were finite and others' were not."""
    finite = [math.isfinite(norm) for norm in frame.per_rank("grad_norm_rank").values()]
    return any(finite) and not all(finite)


DETECTOR = MaskedNonFinite
