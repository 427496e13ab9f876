"""The diagnosis of a run that is being watched: in the background, incremental, and not more often than needed."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from runhealth.diagnose.findings import Report
from runhealth.storage.errors import RunhealthError

MIN_INTERVAL_S = 3.0


class Diagnoser(Protocol):
    """One run. `update` reads what is new and returns the report on everything so far. `ended` says that nothing more
    is expected, so what is still open may be settled."""

    def update(self, *, ended: bool) -> Report: ...

    def close(self) -> None: ...


class LiveDiagnosis:
    """Keeps the newest report of one run.

    A thread exists only while the report is being brought up to date. A failure keeps the last good report, says what
    went wrong in `problem`, and starts over with the next new step.
    """

    def __init__(
        self,
        make: Callable[[], Diagnoser],
        *,
        clock: Callable[[], float] = time.monotonic,
        min_interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        self._make = make
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._lock = threading.Lock()
        self._diagnoser: Diagnoser | None = None
        self._thread: threading.Thread | None = None
        self._seen: object = None
        self._ended_at: float | None = None
        self._closed = False
        self.report: Report | None = None
        self.problem = ""
        self.updates = 0

    @property
    def busy(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def request(self, watermark: object, *, ended: bool = False, wait_s: float = 0.0) -> None:
        """Bring the report up to date if `watermark` or `ended` differs from the last call's, unless that is under way
        or was done a moment ago. Waits up to `wait_s` for the result."""
        with self._lock:
            due = self._ended_at is None or self._clock() - self._ended_at >= self._min_interval_s
            if not self._closed and not self.busy and due and (watermark, ended) != self._seen:
                self._seen = (watermark, ended)
                self._thread = threading.Thread(
                    target=self._update, args=(ended,), name="runhealth-diagnosis", daemon=True
                )
                self._thread.start()
            thread = self._thread
        if thread is not None and wait_s > 0:
            thread.join(wait_s)

    def close(self) -> None:
        """No further update starts; one under way ends by itself and then lets its reader go."""
        with self._lock:
            self._closed = True
            if not self.busy:
                self._release()

    def _update(self, ended: bool) -> None:
        try:
            if self._diagnoser is None:
                self._diagnoser = self._make()
            self.report = self._diagnoser.update(ended=ended)
            self.problem = ""
        except RunhealthError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001  a bug in one detector must not take the page down
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self.updates += 1
            self._ended_at = self._clock()
            if self._closed:
                self._release()

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self._release()

    def _release(self) -> None:
        diagnoser, self._diagnoser = self._diagnoser, None
        if diagnoser is not None:
            diagnoser.close()
