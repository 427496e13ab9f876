"""Time of the garbage collector, in the step in which it fell."""

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from runhealth.instrument import Clock, Monitor

Make = Callable[..., Monitor]


class Ticks:
    """A clock that moves by what is due whenever the collector starts: a collection takes exactly that long."""

    def __init__(self) -> None:
        self.s = 0.0
        self.clock = Clock(perf_s=lambda: self.s)

    def hear(self, phase: str, info: object) -> None:  # noqa: ARG002
        self.s += 0.5 if phase == "stop" else 0.0


@pytest.fixture
def ticks() -> Iterator[Ticks]:
    """The collector runs only when it is told to. Heard before the monitor is: its `start` comes before the time."""
    ticks = Ticks()
    gc.collect()
    gc.disable()
    gc.callbacks.insert(0, ticks.hear)
    yield ticks
    gc.callbacks.remove(ticks.hear)
    gc.enable()


def test_a_collection_counts_in_the_step_in_which_it_falls(monitor_for: Make, log, ticks: Ticks) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=ticks.clock)
    for step in range(4):
        with monitor.step(step) as s, s.phase("forward"):
            for _ in range({1: 2, 3: 1}.get(step, 0)):
                gc.collect()
        gc.collect()  # between steps: no step's time
    assert [record.values["t_gc_s"] for record in log.steps] == [0.0, 1.0, 0.0, 0.5]
    assert [record.values["t_step_s"] for record in log.steps] == [0.0, 1.0, 0.0, 0.5]
    assert log.steps[1].values["t_forward_s"] == 1.0  # the phase is as long as it was


def test_a_collection_while_data_is_waited_for_counts_as_the_waiting_does(monitor_for: Make, log, ticks: Ticks) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=ticks.clock)

    def load() -> Iterator[int]:
        for number in range(3):
            if number == 1:
                gc.collect()
            yield number

    for step in monitor.iterate(load()):
        with monitor.step(step):
            pass
    assert [record.values["t_gc_s"] for record in log.steps] == [0.0, 0.5, 0.0]
    assert [record.values.get("t_data_s") for record in log.steps] == [0.0, 0.5, 0.0]


def test_what_the_loop_times_itself_counts_once(monitor_for: Make, log, ticks: Ticks) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=ticks.clock)
    for step in range(2):
        with monitor.step(step) as s:
            if step == 0:
                with s.phase("gc"):
                    gc.collect()
            else:
                gc.collect()
    assert [record.values["t_gc_s"] for record in log.steps] == [0.5, 0.5]


def test_collections_on_another_thread_count(monitor_for: Make, log, ticks: Ticks) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(clock=ticks.clock)
    with monitor.step(0):
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
    assert log.steps[0].values["t_gc_s"] == 0.5


def test_the_real_collector_with_the_real_clock(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    kept = [[number] for number in range(100_000)]  # something to walk through
    for step in range(2):
        with monitor.step(step):
            if step:
                gc.collect()
    del kept
    values = log.steps[1].values
    assert 0.0 < values["t_gc_s"] <= values["t_step_s"]
    assert log.steps[0].values["t_gc_s"] < values["t_gc_s"]


def test_nothing_is_left_behind(monitor_for: Make) -> None:
    before = list(gc.callbacks)
    monitor = monitor_for()
    assert len(gc.callbacks) == len(before) + 1
    monitor.close()
    monitor.close()
    assert gc.callbacks == before
    dropped = Monitor("dropped", opener=lambda: (_ for _ in ()).throw(OSError("no store")))
    assert len(gc.callbacks) == len(before) + 1
    del dropped  # never closed
    gc.collect()
    assert gc.callbacks == before
