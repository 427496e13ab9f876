"""Time of Python's garbage collector within a step."""

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from runhealth.instrument.clock import Clock
from runhealth.instrument.draft import Draft, Probe
from runhealth.instrument.phases import Phases


class CollectionProbe(Probe):
    """`step_s`: collections on any thread, since each holds up all of them; 0 where there was none. The phase in which
    one falls counts its time as well. Collections that the loop times itself, as the phase `gc`, count there only.

    The collector calls back at its start and its end, one collection at a time; a step reads the running total."""

    name = "garbage collection"

    def __init__(self, clock: Clock, phases: Phases) -> None:
        self._clock = clock
        self._phases = phases
        self._start_s: float | None = None
        self._begin_s = 0.0
        self.total_s = 0.0  # since the probe was made
        self.waited_s = 0.0  # of that, while data was waited for between steps
        self.step_s = 0.0  # in the step that ended last
        reference = weakref.ref(self)

        def heard(phase: str, info: Mapping[str, Any]) -> None:  # noqa: ARG001  the collector's signature
            probe = reference()
            if probe is not None:
                probe._hear(phase)

        gc.callbacks.append(heard)
        self._remove = weakref.finalize(self, _forget, heard)
        self._remove.atexit = False

    def _hear(self, phase: str) -> None:
        if phase == "start":
            self._start_s = self._clock.perf_s()
        elif self._start_s is not None:
            seconds, self._start_s = self._clock.perf_s() - self._start_s, None
            if not self._phases.is_open("gc"):
                self.total_s += seconds

    def begin(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self._begin_s = self.total_s

    def collect(self, draft: Draft) -> None:  # noqa: ARG002  the probe protocol
        self.step_s = self.total_s - self._begin_s + self.waited_s
        self.waited_s = 0.0

    def close(self) -> None:
        self._remove()


def _forget(heard: Callable[[str, Mapping[str, Any]], None]) -> None:
    if heard in gc.callbacks:
        gc.callbacks.remove(heard)
