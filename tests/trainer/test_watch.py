"""A rank's watch over itself, in this process."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.trainer import watch as watching
from runhealth.trainer.flight_recorder import read_traces
from runhealth.trainer.watch import RankWatch


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RankWatch, list[float]]]:
    """A watch that looks all the time, and the seconds after which it gave up."""
    gave_up: list[float] = []

    def give_up(_watch: RankWatch, seconds: float) -> None:
        gave_up.append(seconds)
        threading.Event().wait()  # for good: the process would end here

    monkeypatch.setattr(watching, "LOOK_S", 0.005)
    monkeypatch.setattr(RankWatch, "_give_up", give_up)

    def make(stall_s: float) -> tuple[RankWatch, list[float]]:
        return RankWatch(str(tmp_path / "a000.json"), 0, stall_s=stall_s), gave_up

    return make


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_loop_that_stands_still_is_given_up(watched: Callable[..., tuple[RankWatch, list[float]]]):
    watch, gave_up = watched(0.05)
    watch.beat(3)
    watch.start()
    until(lambda: gave_up)
    assert gave_up[0] > 0.05


def test_a_save_and_the_start_are_given_more_time(watched: Callable[..., tuple[RankWatch, list[float]]]):
    watch, gave_up = watched(0.05)
    watch.start()  # before the first step: ten times as long
    until(lambda: time.monotonic() - watch._beat_s > 0.2)
    assert not gave_up
    watch.beat(3)
    code = compile("import time\ntime.sleep(0.3)", "/somewhere/async_save.py", "exec")
    exec(code, {})  # the main thread is in a save
    assert not gave_up
    until(lambda: gave_up)


def test_a_trace_says_where_the_main_thread_is(tmp_path: Path):
    launch = tmp_path / "a000.json"
    watch = RankWatch(str(launch), 4, stall_s=60.0)
    watch.beat(17)
    asker = threading.Thread(target=watch.write)

    def stand_here() -> None:
        asker.start()
        asker.join()

    stand_here()
    (trace,) = read_traces(launch, 5)
    assert (trace.rank, trace.step) == (4, 17)
    assert any("stand_here" in line for line in trace.stack)
    assert trace.where


def test_the_trace_of_an_exception_says_where_it_was_raised(tmp_path: Path):
    launch = tmp_path / "a000.json"

    def fall_over() -> None:
        raise ValueError("here")

    try:
        fall_over()
    except ValueError as error:
        RankWatch(str(launch), 0, stall_s=60.0).write(error)
    (trace,) = read_traces(launch, 1)
    assert trace.where.startswith("test_watch.py:")
    assert trace.where.endswith(" fall_over")


def test_a_trace_that_cannot_be_written_harms_nobody(tmp_path: Path):
    (tmp_path / "file").write_text("")
    RankWatch(str(tmp_path / "file" / "a000.json"), 0, stall_s=60.0).write()
