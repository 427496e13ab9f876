"""Host time of the parts of a step.

On an accelerator the host runs ahead of the device, so forward, backward and optimizer are launch times there; the
step as a whole, the data wait and checkpoints are true times once the loop reads a number a step.
"""

from types import TracebackType

from runhealth.instrument.clock import Clock


class Phases:
    """Seconds by phase name. Phases may come again (micro-batches add up) and nest: the inner one's time is not the
    outer one's as well."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[tuple[str, float, float]] = []  # name, start, seconds of inner phases
        self._by_loop: set[str] = set()  # names that the loop has used
        self.seconds: dict[str, float] = {}

    def enter(self, name: str) -> None:
        self._by_loop.add(name)
        self._open.append((name, self._clock.perf_s(), 0.0))

    def leave(self) -> None:
        if not self._open:
            return
        name, start_s, inner_s = self._open.pop()
        whole_s = self._clock.perf_s() - start_s
        self.add(name, whole_s - inner_s)
        if self._open:
            outer, outer_start_s, outer_inner_s = self._open[-1]
            self._open[-1] = (outer, outer_start_s, outer_inner_s + whole_s)

    def is_open(self, name: str) -> bool:
        return any(name == opened[0] for opened in self._open)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def measured(self, name: str, seconds: float) -> None:
        """A part that was timed without the loop's help; what the loop itself times counts instead."""
        if name not in self._by_loop and not self.is_open(name):
            self.add(name, seconds)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


class Phase:
    """`with monitor.phase("forward"):`"""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._phases.enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.leave()
