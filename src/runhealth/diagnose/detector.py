"""What a detector is, and how the detectors in `detectors/` are found.

A detector is one file with one class and a constant `DETECTOR` that names the class. It sees each closed frame once,
keeps its own state, does no I/O, and returns alarms. An alarm of kind `CHANNEL` is no finding by itself: it joins the
incident that another alarm opens, with its lead time.
"""

import copy
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import runhealth.diagnose.detectors as folder
from runhealth.diagnose.codes import CODES
from runhealth.diagnose.findings import Alarm, Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

CHANNEL = "channel"


class Detector(ABC):
    """Base of the detectors. `kinds` lists every kind an alarm of this detector may have.

    `replay` says whether the detector's baseline is rebuilt from the frames before a restart; a detector that compares
    attempts with each other keeps its state instead. `reads` names signals; without any of them there is nothing to
    see, and the detector is not asked before one has been met. Empty: it is always asked.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    replay: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def update(self, frame: Frame) -> list[Alarm]:
        """Look at the next frame."""

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        """Look at many frames at once: alarms with the row of `block` that raised them, in the order of rows.

        It must leave the same state and return the same alarms, to the last bit, as `update(block.frame(i))` for each
        row in turn, which is what it does here. A detector that costs something overrides it: find with arrays the
        next row at which anything but the quiet path happens, take the quiet rows before it into the state at once,
        give that row to `update`, and go on. The rows begin with the first one that has one of the signals of `reads`;
        none of them starts an attempt.
        """
        return self.update_rows(block, range(len(block)))

    def update_rows(self, block: FrameBlock, rows: Iterable[int]) -> list[tuple[int, Alarm]]:
        """`update` of some rows, one after the other."""
        found: list[tuple[int, Alarm]] = []
        update, frame = self.update, block.frame
        for i in rows:
            raised = update(frame(i))
            if raised:
                found.extend((i, alarm) for alarm in raised)
        return found

    def fact(
        self,
        frame: Frame,
        kind: str,
        signal: str,
        message: str,
        *,
        onset: int | None = None,
        value: float = math.nan,
        baseline: float = math.nan,
        ranks: tuple[int, ...] = (),
        severity: Severity | None = None,
    ) -> Alarm:
        """An alarm that is a fact rather than a measure of surprise: its score is 1."""
        return Alarm(
            detector=self.name,
            kind=kind,
            signal=signal,
            attempt=frame.attempt,
            step=frame.step,
            onset_step=frame.step if onset is None else onset,
            score=1.0,
            value=float(value),
            baseline=float(baseline),
            ranks=ranks,
            message=message,
            severity=severity,
        )

    def finish(self) -> list[Alarm]:
        """The data ends here: say what only the whole series shows."""
        return []

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))


def detector_classes() -> list[type[Detector]]:
    """The classes of the folder, sorted by name.

    Raises:
        TypeError: a module without a valid `DETECTOR`, or two detectors of one name.
    """
    found: dict[str, type[Detector]] = {}
    for module_info in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{module_info.name}")
        found_class = getattr(module, "DETECTOR", None)
        where = f"{folder.__name__}.{module_info.name}"
        if not (isinstance(found_class, type) and issubclass(found_class, Detector)):
            raise TypeError(f"{where}: expected DETECTOR to be a Detector class, met {found_class!r}")
        unknown = set(found_class.kinds) - CODES.keys() - {CHANNEL}
        if unknown or found_class.name in found:
            raise TypeError(f"{where}: expected a new name and known kinds, met {found_class.name}, {sorted(unknown)}")
        found[found_class.name] = found_class
    return [found[name] for name in sorted(found)]
