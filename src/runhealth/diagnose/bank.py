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
    """One of each detector. A detector is asked once a signal that it reads has been met."""

    def __init__(self) -> None:
        self._classes = {cls.name: cls for cls in detector_classes()}
        self.detectors: dict[str, Detector] = {name: cls() for name, cls in self._classes.items()}
        self._asked: list[Callable[[Frame], list[Alarm]]] = []
        self._met = -1
        self.bind(set())

    def bind(self, met: set[str]) -> None:
        """`met`: all signals met so far. Call it before `update` whenever it may have grown."""
        if len(met) != self._met:
            self._met = len(met)
            self._asked = [d.update for d in self.detectors.values() if _reads(d, met)]

    def update(self, frame: Frame) -> list[Alarm]:
        """In the order of the detectors' names."""
        alarms: list[Alarm] = []
        for update in self._asked:
            raised = update(frame)
            if raised:
                alarms.extend(raised)
        return alarms

    def update_block(self, block: FrameBlock, met: set[str]) -> dict[int, list[Alarm]]:
        """Row -> alarms as `update` returns them, ascending. `met`: all signals met before the block."""
        found: list[tuple[int, Alarm]] = []
        for detector in self.detectors.values():
            start = 0 if _reads(detector, met) else block.first(detector.reads)
            if start is not None:
                found.extend((start + row, alarm) for row, alarm in detector.update_block(block.part(start)))
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
            if cls.replay:
                said.extend(self.detectors[name].finish())
                detector = self.detectors[name] = cls()
                for old in before[-REPLAY_FRAMES:]:
                    detector.update(old)
        self._met = -1
        self.bind(met)
        return said

    def finish(self) -> Iterable[list[Alarm]]:
        for detector in self.detectors.values():
            yield detector.finish()

    def state_dict(self) -> dict[str, Any]:
        return {name: detector.state_dict() for name, detector in self.detectors.items()}

    def load_state_dict(self, state: Mapping[str, Any], met: set[str]) -> None:
        for name, detector in self.detectors.items():
            detector.load_state_dict(state[name])
        self._met = -1
        self.bind(met)


def _reads(detector: Detector, met: set[str]) -> bool:
    return not detector.reads or not met.isdisjoint(detector.reads)
