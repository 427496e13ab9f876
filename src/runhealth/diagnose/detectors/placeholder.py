"""A logged constant that is no measurement: a gradient norm or a loss of exactly 0 or -1 from the first row on.

Pipeline ranks that hold no head log a loss of -1; several loggers print a gradient norm of 0.0 where none was computed.
Loss and norm both 0 is `no_training_signal`, and not told here.
"""

from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

ROWS = 16
FRAMES = 256  # a constant from the first row on has shown by then
PLACEHOLDERS = (0.0, -1.0)


class Placeholder(Detector):
    name: ClassVar[str] = "placeholder"
    kinds: ClassVar[tuple[str, ...]] = ("placeholder_value",)
    reads: ClassVar[tuple[str, ...]] = ("loss", "grad_norm")
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._frames = 0
        self._rows: dict[tuple[str, int], int] = {}  # signal and rank -> rows of the constant; -1: it is measured
        self._value: dict[tuple[str, int], float] = {}

    def update(self, frame: Frame) -> list[Alarm]:
        if self._frames >= FRAMES:
            return []
        self._frames += 1
        due: dict[str, list[int]] = {}
        for rank, values in frame.ranks.items():
            for signal in ("loss", "grad_norm"):
                value = values.get(signal)
                key = (signal, rank)
                rows = self._rows.get(key, 0)
                if value is None or rows < 0:
                    continue
                if value not in PLACEHOLDERS or self._value.setdefault(key, value) != value:
                    self._rows[key] = -1
                    continue
                self._rows[key] = rows + 1
                if rows + 1 == ROWS:
                    due.setdefault(signal, []).append(rank)
        return [self._alarm(frame, signal, ranks) for signal, ranks in due.items() if self._other_moves(signal)]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        return self.update_rows(block, range(min(len(block), FRAMES - self._frames)))

    def _other_moves(self, signal: str) -> bool:
        other = "grad_norm" if signal == "loss" else "loss"
        measured = [rows < 0 for (name, _), rows in self._rows.items() if name in (other, signal)]
        return any(measured)

    def _alarm(self, frame: Frame, signal: str, ranks: list[int]) -> Alarm:
        value = self._value[signal, ranks[0]]
        some = tuple(ranks) if len(ranks) < len(frame.ranks) else ()
        who = f" on ranks {', '.join(map(str, ranks))}" if some else ""
        message = f"{signal} is {value:g} in every row{who}: a placeholder, not a measurement"
        return self.fact(frame, "placeholder_value", signal, message, value=value, ranks=some)


DETECTOR = Placeholder
