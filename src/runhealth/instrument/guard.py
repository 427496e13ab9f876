"""Errors of our own are latched: counted, said once in one line, never raised into the training step."""

import sys
from collections import Counter
from collections.abc import Callable
from types import TracebackType


def say(line: str) -> None:
    """Write one line to stderr; a closed or full stderr is no reason to fail."""
    try:
        sys.stderr.write(f"runhealth: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # AttributeError: sys.stderr is None under pythonw and some daemons
        return


class Latch:
    """Collects the errors of the probes. `latch.guard(probe)` is a context manager that swallows any
    `Exception`; `KeyboardInterrupt` and `SystemExit` pass. The first error of each probe is said on stderr, and
    `on_first` is told."""

    def __init__(self, who: str, on_first: Callable[[str, str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._who = who
        self._on_first = on_first
        self._guards: dict[str, Guard] = {}

    def guard(self, probe: str) -> "Guard":
        guard = self._guards.get(probe)
        if guard is None:
            guard = self._guards[probe] = Guard(self, probe)
        return guard

    def caught(self, probe: str, error: BaseException) -> None:
        self.note(probe, f"{type(error).__name__}: {error}")

    def note(self, probe: str, why: str) -> None:
        """Latch something that is no exception, such as a measurement that is left out."""
        self.counts[probe] += 1
        if self.counts[probe] > 1:
            return
        why = " ".join(why.split())[:400]
        say(f"{self._who}: '{probe}' is not measured ({why}); training goes on, further cases are counted only")
        self._on_first(probe, why)


class Guard:
    """Re-enterable: it keeps no state of its own."""

    __slots__ = ("_latch", "_probe")

    def __init__(self, latch: Latch, probe: str) -> None:
        self._latch = latch
        self._probe = probe

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._latch.caught(self._probe, error)
        return True
