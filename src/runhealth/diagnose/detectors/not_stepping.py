"""No update is applied: what must move does not move in a single digit.

Told by a loss that repeats all its digits (at least four) for 16 rows while it is not 0, by a parameter norm that does
so for 64 rows while there are gradients and a learning rate, by an evaluation loss that does so for 4 evaluations, or
by 32 skipped steps in a row. A loss of a constant batch that has converged would do the same, to fewer digits.
"""

import math
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame

LOSS_ROWS, NORM_ROWS, EVALUATIONS, SKIPPED_ROWS = 16, 64, 4, 32
LEAST_DIGITS = 4


class NotStepping(Detector):
    name: ClassVar[str] = "not_stepping"
    kinds: ClassVar[tuple[str, ...]] = ("optimizer_not_stepping",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "weight_norm", "eval_loss", "step_skipped")

    def __init__(self) -> None:
        self._same: dict[str, tuple[float, int, int]] = {}  # signal -> value, rows, step of the first
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        values = frame.values
        norm, rate = values.get("grad_norm"), values.get("lr")
        moving = norm != 0 and rate != 0 and (norm is None or math.isfinite(norm))
        found: list[tuple[str, int, float, str]] = []
        for signal, needed in (("loss", LOSS_ROWS), ("eval_loss", EVALUATIONS), ("weight_norm", NORM_ROWS)):
            value = values.get(signal)
            if value is None:
                continue
            before = self._same.get(signal)
            if before is None or before[0] != value or not moving:
                self._same[signal] = (value, 1, frame.step)
                continue
            rows = before[1] + 1
            self._same[signal] = (value, rows, before[2])
            if rows >= needed and _digits(value) >= LEAST_DIGITS and not (signal == "weight_norm" and not norm):
                found.append((signal, before[2], value, f"{signal} is {value:g} to the last digit in {rows} rows"))
        skipped = values.get("step_skipped")
        if skipped is not None:
            _, rows, first = self._same.get("step_skipped", (0.0, 0, frame.step))
            self._same["step_skipped"] = (1.0, rows + 1, first) if skipped else (0.0, 0, frame.step + 1)
            if skipped and rows + 1 >= SKIPPED_ROWS:
                found.append(("step_skipped", first, 1.0, f"all of the last {rows + 1} optimizer steps were skipped"))
        if not found:
            self._told = self._told and any(rows > 1 for _, rows, _ in self._same.values())
            return []
        if self._told:
            return []
        self._told = True
        signal, onset, value, what = found[0]
        message = f"{what} since step {onset:,}: no update reaches the weights"
        return [self.fact(frame, "optimizer_not_stepping", signal, message, onset=onset, value=value)]


def _digits(value: float) -> int:
    """Significant digits of the shortest decimal that is this number, as single precision where that is shorter."""
    text = min(repr(float(value)), f"{value:.7g}", key=len) if float(f"{value:.7g}") == value else repr(float(value))
    return len(text.split("e")[0].replace(".", "").replace("-", "").strip("0"))


DETECTOR = NotStepping
