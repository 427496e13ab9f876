"""One phase of the step grows: waiting for data, transfer in collectives, garbage collection.

A step's phase is the longest of any rank. It counts where it is over 1.5 x its median, 6 robust sigma, and its extra
time over 5 % of the usual step and 50 ms. Five such steps of six are a slowdown; five within 48 steps, each of a fifth
of a step or more, are stalls that come again. A save of a checkpoint that takes three times as long as those before,
and a step or more longer, is told as `checkpoint_slow`.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline, median
from runhealth.diagnose.windows import Ahead, settled, take
from runhealth.storage.blocks import Bools, Floats, Ints

PHASES = {"t_data_s": "waiting for data", "t_comm_s": "transfer in collectives", "t_gc_s": "garbage collection"}
FACTOR = 1.5
Z_ALARM = 6.0
SHARE = 0.05
LEAST_EXTRA_S = 0.05  # less a step: the host, not the job
OF_ROWS, IN_ROWS = 6, 5
STALL_SHARE = 0.2
STALLS, WITHIN_ROWS = 5, 48
REARM_FRAMES = 256
SAVES = 3
SMALLEST_BLOCK, LARGEST_BLOCK = 64, 4096
SAVE_FACTOR, SAVE_STEPS, LEAST_SAVE_S = 3.0, 1.0, 5.0


class _Phase:
    __slots__ = ("habit", "recent", "since", "stalls")

    def __init__(self) -> None:
        self.habit = Baseline(128, least=32)
        self.recent: deque[tuple[int, bool]] = deque(maxlen=OF_ROWS)
        self.stalls: deque[tuple[int, int, float]] = deque(maxlen=STALLS)  # row, step, seconds
        self.since = REARM_FRAMES


class PhaseStall(Detector):
    name: ClassVar[str] = "phase_stall"
    kinds: ClassVar[tuple[str, ...]] = ("sustained_slowdown", "periodic_stall", "checkpoint_slow")
    reads: ClassVar[tuple[str, ...]] = (*PHASES, "t_checkpoint_s")

    def __init__(self) -> None:
        self._phases = {signal: _Phase() for signal in PHASES}
        self._step_s = Baseline(128, least=16)
        self._saves: deque[float] = deque(maxlen=16)
        self._row = 0
        self._save_told = False

    def update(self, frame: Frame) -> list[Alarm]:
        self._row += 1
        whole = frame.largest("t_step_s")
        save = frame.largest("t_checkpoint_s")
        alarms = self._save(frame, float(save)) if save is not None and save > 0 else []
        if whole is not None and math.isfinite(whole) and not save:
            self._step_s.push(float(whole))
        if not self._step_s.ready:
            return alarms
        for signal, phase in self._phases.items():
            seconds = frame.largest(signal)
            if seconds is not None and math.isfinite(seconds):
                alarms += self._look(frame, signal, phase, float(seconds))
        return alarms

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        whole, save = block.largest("t_step_s"), block.largest("t_checkpoint_s")
        absent = np.full(len(block), np.nan)
        steps_s = absent if whole is None else whole.values
        timed = np.isfinite(steps_s)
        phases = {name: signal.values for name in PHASES if (signal := block.largest(name)) is not None}
        looked = np.zeros(len(block), dtype=np.bool_)  # a phase is looked at, and with it the usual step
        for values in phases.values():
            looked |= np.isfinite(values)
        loud = timed & ~looked
        if save is not None:
            loud |= save.present & (save.values != 0)
        found: list[tuple[int, Alarm]] = []
        row, size = 0, SMALLEST_BLOCK
        while row < len(block):
            end = min(len(block), row + size)
            stop = row + _first(loud[row:end])
            if stop > row:
                stop = self._quiet_until(phases, row, stop)
            if stop > row:
                self._pass(block.steps[row:stop], steps_s[row:stop], {n: v[row:stop] for n, v in phases.items()})
            size = min(4 * size, LARGEST_BLOCK)
            if stop < end:
                found.extend(self.update_rows(block, (stop,)))
                stop, size = stop + 1, SMALLEST_BLOCK
            row = stop
        return found

    def _quiet_until(self, phases: Mapping[str, Floats], start: int, stop: int) -> int:
        """The first of the rows in which a phase may be long, as far as baselines are settled."""
        if not settled(self._step_s):
            return start
        for name, values in phases.items():
            rows = start + np.flatnonzero(np.isfinite(values[start:stop]))
            habit, seconds = self._phases[name].habit, values[rows]
            if not len(rows):
                continue
            if not settled(habit):
                stop = int(rows[0])
                continue
            least = min(float(seconds.min()), min(habit.values))
            if seconds.max() <= max(FACTOR * least, least + 0.99 * LEAST_EXTRA_S):
                continue
            ahead = Ahead(habit, seconds)
            extra = seconds - ahead.center()
            high = (extra > LEAST_EXTRA_S) & (seconds > FACTOR * ahead.center()) & (extra > Z_ALARM * ahead.sigma())
            if high.any():
                stop = int(rows[high.argmax()])
        return stop

    def _pass(self, steps: Ints, steps_s: Floats, phases: Mapping[str, Floats]) -> None:
        """Take in rows without a save in which no phase is long."""
        self._row += len(steps)
        timed = np.flatnonzero(np.isfinite(steps_s))
        looked = [int(rows[0]) for values in phases.values() if len(rows := np.flatnonzero(np.isfinite(values)))]
        if looked and (not len(timed) or min(looked) < timed[0]):
            self._step_s.refresh()
        if len(timed):  # each is taken in before it is looked at
            self._step_s.push(float(steps_s[timed[0]]))
            take(self._step_s, steps_s[timed[1:]])
            self._step_s.refresh()
        for name, values in phases.items():
            rows = np.flatnonzero(np.isfinite(values))
            phase = self._phases[name]
            phase.since += len(rows)
            phase.recent.extend((step, False) for step in steps[rows[-OF_ROWS:]].tolist())
            take(phase.habit, values[rows])

    def _look(self, frame: Frame, signal: str, phase: _Phase, seconds: float) -> list[Alarm]:
        phase.since += 1
        habit, step_s = phase.habit, self._step_s.center
        if not habit.ready:
            habit.push(seconds)
            return []
        usual = habit.center
        extra = seconds - usual
        high = extra > max(SHARE * step_s, LEAST_EXTRA_S) and seconds > FACTOR * usual and extra > Z_ALARM * habit.sigma
        phase.recent.append((frame.step, high))
        if not high:
            habit.push(seconds)
            return []
        if extra >= STALL_SHARE * step_s:
            phase.stalls.append((self._row, frame.step, seconds))
        over = [step for step, is_high in phase.recent if is_high]
        if phase.since < REARM_FRAMES:
            return []
        if len(over) >= IN_ROWS:
            phase.since = 0
            message = (
                f"{PHASES[signal]} takes {seconds:.3g} s of each step since step {over[0]:,}, it took {usual:.3g} s"
            )
            return [self._alarm(frame, "sustained_slowdown", signal, message, over[0], seconds, usual)]
        if len(phase.stalls) == STALLS and self._row - phase.stalls[0][0] <= WITHIN_ROWS:
            phase.since = 0
            first, typical = phase.stalls[0][1], median([s for _, _, s in phase.stalls])
            message = f"{STALLS} steps since step {first:,} lost {typical - usual:.3g} s each to {PHASES[signal]}"
            return [self._alarm(frame, "periodic_stall", signal, message, first, typical, usual)]
        return []

    def _alarm(
        self, frame: Frame, kind: str, signal: str, message: str, onset: int, seconds: float, usual: float
    ) -> Alarm:
        by_rank = {r: float(v) for r, v in frame.per_rank(signal).items()}
        slow = tuple(sorted(r for r, v in by_rank.items() if v - usual > (seconds - usual) / 2))
        fixed = kind == "sustained_slowdown" and 0 < len(slow) < len(by_rank)
        return self.fact(
            frame,
            kind,
            signal,
            message,
            onset=onset,
            value=seconds,
            baseline=usual,
            ranks=slow if fixed else (),
            severity=Severity.WARNING,
        )

    def _save(self, frame: Frame, seconds: float) -> list[Alarm]:
        usual = median(list(self._saves)) if len(self._saves) >= SAVES else None
        step_s = self._step_s.center if self._step_s.ready else math.inf
        slow = usual is not None and seconds > SAVE_FACTOR * usual
        slow = slow and usual is not None and seconds - usual > max(SAVE_STEPS * step_s, LEAST_SAVE_S)
        if not slow:
            self._saves.append(seconds)
            self._save_told = False
            return []
        if self._save_told:
            return []
        self._save_told = True
        message = f"saving the checkpoint at step {frame.step:,} took {seconds:.3g} s, others {usual:.3g} s"
        return [
            self.fact(
                frame,
                "checkpoint_slow",
                "t_checkpoint_s",
                message,
                value=seconds,
                baseline=usual if usual is not None else math.nan,
            )
        ]


def _first(chosen: Bools) -> int:
    """The first that is chosen; their number if none is."""
    return int(chosen.argmax()) if chosen.any() else len(chosen)


DETECTOR = PhaseStall
