"""The clock as a parameter: tests bring their own."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`now_ns` is the wall clock that stamps records, `perf_s` the monotonic clock that measures durations."""

    now_ns: Callable[[], int] = time.time_ns
    perf_s: Callable[[], float] = time.perf_counter
