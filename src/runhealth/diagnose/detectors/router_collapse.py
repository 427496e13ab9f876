"""A router sends nearly all tokens to one expert: a load over one half and 1.5 x its habit in four of five rows."""

from collections import deque
from typing import ClassVar

import numpy as np

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline
from runhealth.diagnose.windows import push
from runhealth.storage.blocks import Floats, Ints

COLLAPSED = 0.5
OVER_HABIT = 1.5
NEARLY_ALL = 0.95
OF_ROWS, IN_ROWS = 5, 4
REARM_ROWS = 256


class RouterCollapse(Detector):
    name: ClassVar[str] = "router_collapse"
    kinds: ClassVar[tuple[str, ...]] = ("router_collapse",)
    reads: ClassVar[tuple[str, ...]] = ("router_load_max", "layer.router_load_max")

    def __init__(self) -> None:
        self._habit = Baseline(64, least=64)
        self._recent: deque[tuple[int, bool]] = deque(maxlen=OF_ROWS)
        self._since = REARM_ROWS

    def update(self, frame: Frame) -> list[Alarm]:
        load = frame.largest("router_load_max")
        if load is None:
            shares = [v for s in frame.layers if (v := s.values.get("router_load_max")) is not None and v == v]
            load = max(shares, default=None)
        if load is None:
            return []
        self._since += 1
        if not self._habit.ready:
            self._habit.push(float(load))
            return []
        usual = self._habit.quantile(0.95)
        high = load > max(COLLAPSED, min(NEARLY_ALL, OVER_HABIT * usual))
        if not high:
            self._habit.push(float(load))
        self._recent.append((frame.step, high))
        over = [step for step, is_high in self._recent if is_high]
        if not high or len(over) < IN_ROWS or self._since < REARM_ROWS:
            return []
        self._since = 0
        message = f"one expert gets {load:.0%} of the tokens since step {over[0]:,}; it used to be {usual:.0%} at most"
        return [
            self.fact(frame, "router_collapse", "router_load_max", message, onset=over[0], value=load, baseline=usual)
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        loads = _loads(block)
        rows = np.flatnonzero(~np.isnan(loads))
        found: list[tuple[int, Alarm]] = []
        at = 0
        for loud in [*np.flatnonzero(loads[rows] > COLLAPSED).tolist(), len(rows)]:
            if loud > at:
                self._pass(loads[rows[at:loud]], block.steps[rows[at:loud]])
            if loud < len(rows):
                found.extend(self.update_rows(block, (int(rows[loud]),)))
            at = loud + 1
        return found

    def _pass(self, loads: Floats, steps: Ints) -> None:
        """Take in loads that are not high, whatever the habit is."""
        habit = self._habit
        self._since += len(loads)
        young = max(0, habit.least - len(habit.values))
        push(habit, loads[:young])
        if len(loads) > young:  # the habit is refreshed before each of the others: what the last one saw counts
            push(habit, loads[young:-1])
            habit.refresh()
            push(habit, loads[-1:])
            self._recent.extend((step, False) for step in steps[young:][-OF_ROWS:].tolist())


def _loads(block: FrameBlock) -> Floats:
    """(n,): the load of each row as `update` reads it; NaN where there is none."""
    signal, layers = block.largest("router_load_max"), block.layers()
    loads = np.full(len(block), np.nan) if signal is None else signal.values
    column = layers[0].columns.get("router_load_max") if layers is not None else None
    if layers is None or column is None:
        return loads
    low, high = layers[1][0], layers[1][-1]
    values, rows = column.values[low:high].astype(np.float64), np.repeat(np.arange(len(block)), np.diff(layers[1]))
    if column.present is not None:
        values = np.where(column.present[low:high], values, np.nan)
    most = np.full(len(block), np.nan)
    np.fmax.at(most, rows, values)
    return np.where(np.isnan(loads), most, loads)


DETECTOR = RouterCollapse
