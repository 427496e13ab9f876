"""No update is applied: what must move does not move in a single digit.

Told by a loss that repeats all its digits (at least four) for 16 rows while it is not 0, by a parameter norm that does
so for 64 rows while there are gradients and a learning rate, by an evaluation loss that does so for 4 evaluations, or
by 32 skipped steps in a row. A loss of a constant batch that has converged would do the same, to fewer digits.
"""

import math
from collections.abc import MutableMapping
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock, Signal
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Bools, Floats, Ints

SKIPPED_ROWS = 32
NEEDED = {"loss": 16, "eval_loss": 4, "weight_norm": 64}  # equal values in a row
LEAST_DIGITS = 4

Same = tuple[float, int, int]  # value, rows, step of the first


class NotStepping(Detector):
    name: ClassVar[str] = "not_stepping"
    kinds: ClassVar[tuple[str, ...]] = ("optimizer_not_stepping",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "weight_norm", "eval_loss", "step_skipped")

    def __init__(self) -> None:
        self._same: dict[str, Same] = {}
        self._told = False

    def update(self, frame: Frame) -> list[Alarm]:
        values = frame.values
        norm, rate = values.get("grad_norm"), values.get("lr")
        moving = norm != 0 and rate != 0 and (norm is None or math.isfinite(norm))
        found: list[tuple[str, int, float, str]] = []
        for signal, needed in NEEDED.items():
            value = values.get(signal)
            if value is None:
                continue
            value = float(value)
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

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        runs = self._runs(block)
        long = np.any([run.long for run in runs], axis=0) if runs else np.zeros(len(block), dtype=np.bool_)
        found: list[tuple[int, Alarm]] = []
        row = 0
        while row < len(block):
            # what was told is over where nothing repeats any more; before that, it takes a long run
            mark = ~self._any_repeats(block, runs, row) if self._told else long[row:]
            stop = row + int(mark.argmax()) if mark.any() else len(block)
            for run in runs:
                run.store(self._same, stop)
            if stop < len(block):
                found.extend(self.update_rows(block, (stop,)))
            row = stop + 1
        return found

    def _runs(self, block: FrameBlock) -> list["_Runs"]:
        norm, rate = block.get("grad_norm"), block.get("lr")
        moving = np.ones(len(block), dtype=np.bool_)
        if norm is not None:
            moving &= ~norm.present | ((norm.values != 0) & np.isfinite(norm.values))
        if rate is not None:
            moving &= ~rate.present | (rate.values != 0)
        runs = []
        for name, needed in NEEDED.items():
            signal = block.get(name)
            if signal is not None:
                run = _Runs.of_values(name, block, signal, self._same.get(name), moving)
                run.find_long(needed)
                if name == "weight_norm":
                    run.long &= norm.present & (norm.values != 0) if norm is not None else False
                runs.append(run)
        skipped = block.get("step_skipped")
        if skipped is not None:
            runs.append(_Runs.of_skips(block, skipped, self._same.get("step_skipped")))
        return runs

    def _any_repeats(self, block: FrameBlock, runs: list["_Runs"], start: int) -> Bools:
        names = {run.name for run in runs}
        others = any(rows > 1 for name, (_, rows, _) in self._same.items() if name not in names)
        found = np.full(len(block) - start, others)
        for run in runs:
            found |= run.repeats()[start:]
        return found


def _digits(value: float) -> int:
    """Significant digits of the shortest decimal that is this number, as single precision where that is shorter."""
    text = min(repr(float(value)), f"{value:.7g}", key=len) if float(f"{value:.7g}") == value else repr(float(value))
    return len(text.split("e")[0].replace(".", "").replace("-", "").strip("0"))


class _Runs:
    """How often a signal has repeated itself, at each row of a block that has it."""

    def __init__(
        self, name: str, block: FrameBlock, rows: Ints, values: Floats, counts: Ints, firsts: Ints, before: Same | None
    ) -> None:
        self.name, self._before = name, before
        self._rows, self._values, self._counts, self._firsts = rows, values, counts, firsts
        self._length = len(block)
        self.long = np.zeros(len(block), dtype=np.bool_)  # where the run is long enough to be told

    @classmethod
    def of_values(cls, name: str, block: FrameBlock, signal: Signal, before: Same | None, moving: Bools) -> "_Runs":
        rows = np.flatnonzero(signal.present)
        values = signal.values[rows]
        earlier = np.concatenate([[math.nan if before is None else before[0]], values[:-1]])
        fresh = (values != earlier) | ~moving[rows]
        _, rows_before, first = before or (0.0, 0, 0)
        start = np.maximum.accumulate(np.where(fresh, np.arange(len(rows)), -1))
        counts = np.arange(1, len(rows) + 1) + np.where(start < 0, rows_before, -start)
        firsts = np.where(start < 0, first, block.steps[rows[start]])
        return cls(name, block, rows, values, counts, firsts, before)

    @classmethod
    def of_skips(cls, block: FrameBlock, signal: Signal, before: Same | None) -> "_Runs":
        rows = np.flatnonzero(signal.present)
        skipped = signal.values[rows] != 0
        _, rows_before, first = before or (0.0, 0, int(block.steps[rows[0]]))
        start = np.maximum.accumulate(np.where(skipped, -1, np.arange(len(rows))))
        counts = np.arange(len(rows)) + np.where(start < 0, rows_before + 1, -start)
        firsts = np.where(start < 0, first, block.steps[rows[start]] + 1)
        found = cls("step_skipped", block, rows, skipped.astype(np.float64), counts, firsts, before)
        found.long[rows] = counts >= SKIPPED_ROWS
        return found

    def find_long(self, needed: int) -> None:
        long = self._counts >= needed
        if long.any():
            exact = [value for value in np.unique(self._values[long]).tolist() if _digits(value) >= LEAST_DIGITS]
            self.long[self._rows] = long & np.isin(self._values, exact)

    def repeats(self) -> Bools:
        """(n,): whether the signal repeated itself when it was seen last."""
        last = np.searchsorted(self._rows, np.arange(self._length), side="right") - 1
        found: Bools = np.where(last < 0, self._before is not None and self._before[1] > 1, self._counts[last] > 1)
        return found

    def store(self, same: MutableMapping[str, Same], stop: int) -> None:
        """The state before row `stop`."""
        last = int(np.searchsorted(self._rows, stop)) - 1
        if last >= 0:
            same[self.name] = (float(self._values[last]), int(self._counts[last]), int(self._firsts[last]))


DETECTOR = NotStepping
