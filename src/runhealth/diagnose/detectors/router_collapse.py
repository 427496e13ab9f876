"""A router sends nearly all tokens to one expert: a load over one half and 1.5 x its habit in four of five rows."""

from collections import deque
from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.robust import Baseline

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


DETECTOR = RouterCollapse
