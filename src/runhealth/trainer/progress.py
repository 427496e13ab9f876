"""Showing progress: one line that is redrawn on a terminal, plain lines every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import IO

from runhealth.trainer.attempt import Progress

PLAIN_INTERVAL_S = 5.0


class ProgressLine:
    """Call it with every `Progress`; `close()` ends the line. Writes to stderr."""

    def __init__(self, label: str, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._clock = clock
        self._tty = self._stream.isatty()
        self._last_s = float("-inf")
        self._drawn = ""

    def __call__(self, progress: Progress) -> None:
        done = progress.step + 1
        line = f"{self._label}  step {done:,}/{progress.stop_step:,}  loss {progress.loss:.3f}"
        if progress.attempt:
            line += f"  attempt {progress.attempt}"
        if self._tty:
            width = 24
            filled = width * done // max(1, progress.stop_step)
            line = f"[{'█' * filled}{'·' * (width - filled)}] {line}"
            self._stream.write(f"\r{line.ljust(len(self._drawn))}")
            self._drawn = line
            self._stream.flush()
        elif self._clock() - self._last_s >= PLAIN_INTERVAL_S or done == progress.stop_step:
            self._last_s = self._clock()
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def close(self) -> None:
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = ""
