"""All detectors together: which of them are asked, and what they say about frames and blocks of frames."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from runhealth.diagnose.detector import Detector, detector_classes
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame

REPLAY_FRAMES = 256  # frames before a restart that rebuild the detectors' baselines


class DetectorBank:
    """One of each detector. A detector is asked once a signal that it reads has been met.

    One that raises is left out from then on, and named in `crashed` with its error: a fault of ours must not cost the
    user what all the others have to say.
    """

    def __init__(self) -> None:
        self._classes = {cls.name: cls for cls in detector_classes()}
        self.detectors: dict[str, Detector] = {name: cls() for name, cls in self._classes.items()}
        self.crashed: dict[str, str] = {}
        self._asked: list[tuple[str, Callable[[Frame], list[Alarm]]]] = []
        self._met = -1
        self.bind(set())

    def bind(self, met: set[str]) -> None:
        """`met`: all signals met so far. Call it before `update` whenever it may have grown."""
        if len(met) != self._met:
            self._met = len(met)
            self._asked = [(name, d.update) for name, d in self.detectors.items() if _reads(d, met)]

    def update(self, frame: Frame) -> list[Alarm]:
        """In the order of the detectors' names."""
        alarms: list[Alarm] = []
        for name, update in self._asked:
            try:
                raised = update(frame)
            except Exception as error:  # noqa: BLE001
                self.leave_out(name, error)
                continue
            if raised:
                alarms.extend(raised)
        return alarms

    def update_block(self, block: FrameBlock, met: set[str]) -> dict[int, list[Alarm]]:
        """Row -> alarms as `update` returns them, ascending. `met`: all signals met before the block."""
        found: list[tuple[int, Alarm]] = []
        for name, detector in tuple(self.detectors.items()):
            try:
                start = 0 if _reads(detector, met) else block.first(detector.reads)
                if start is not None:
                    found.extend([(start + row, alarm) for row, alarm in detector.update_block(block.part(start))])
            except Exception as error:  # noqa: BLE001
                self.leave_out(name, error)
        found.sort(key=itemgetter(0))  # stable: within a row the order of the detectors stays
        rows: dict[int, list[Alarm]] = {}
        for row, alarm in found:
            rows.setdefault(row, []).append(alarm)
        return rows

    def restart(self, before: Sequence[Frame], met: set[str]) -> list[Alarm]:
        """A new attempt: baselines are rebuilt from the frames before its first step. Returns what the detectors of
        the attempt before have left to say."""
        said: list[Alarm] = []
        for name, cls in self._classes.items():
            if cls.replay and name in self.detectors:
                try:
                    said.extend(self.detectors[name].finish())
                    detector = self.detectors[name] = cls()
                    for old in before[-REPLAY_FRAMES:]:
                        detector.update(old)
                except Exception as error:  # noqa: BLE001
                    self.leave_out(name, error)
        self._met = -1
        self.bind(met)
        return said

    def finish(self) -> Iterable[list[Alarm]]:
        for name, detector in tuple(self.detectors.items()):
            try:
                yield detector.finish()
            except Exception as error:  # noqa: BLE001
                self.leave_out(name, error)

    def leave_out(self, name: str, error: Exception) -> None:
        self.crashed[name] = f"{type(error).__name__}: {error}"
        del self.detectors[name]
        self._asked = [asked for asked in self._asked if asked[0] != name]

    def state_dict(self) -> dict[str, Any]:
        states = {name: detector.state_dict() for name, detector in self.detectors.items()}
        return {"states": states, "crashed": dict(self.crashed)}

    def load_state_dict(self, state: Mapping[str, Any], met: set[str]) -> None:
        self.crashed = dict(state["crashed"])
        self.detectors = {name: cls() for name, cls in self._classes.items() if name not in self.crashed}
        for name, detector in self.detectors.items():
            detector.load_state_dict(state["states"][name])
        self._met = -1
        self.bind(met)


def _reads(detector: Detector, met: set[str]) -> bool:
    return not detector.reads or not met.isdisjoint(detector.reads)
