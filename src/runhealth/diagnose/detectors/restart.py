"""A new attempt begins: the step number goes back, or the run was resumed. Info, unless something else is wrong."""

from typing import ClassVar

from runhealth.diagnose.detector import Detector
from runhealth.diagnose.findings import Alarm
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame


class Restart(Detector):
    name: ClassVar[str] = "restart"
    kinds: ClassVar[tuple[str, ...]] = ("restart",)
    replay: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None  # attempt, step

    def update(self, frame: Frame) -> list[Alarm]:
        last, self._last = self._last, (frame.attempt, frame.step)
        if last is None or last[0] == frame.attempt:
            return []
        again = last[1] - frame.step + 1
        how = f"{again:,} steps are done again" if again > 0 else "no step is done again"
        return [
            Alarm(
                detector=self.name,
                kind="restart",
                signal="step",
                attempt=frame.attempt,
                step=frame.step,
                onset_step=frame.step,
                score=1.0,
                value=float(frame.step),
                baseline=float(last[1]),
                message=f"attempt {frame.attempt} starts at step {frame.step:,}; attempt {last[0]} had come to step "
                f"{last[1]:,}, {how}",
            )
        ]

    def update_block(self, block: FrameBlock) -> list[tuple[int, Alarm]]:
        found = self.update_rows(block, (0,))
        self._last = (block.attempt, int(block.steps[-1]))
        return found


DETECTOR = Restart
