"""What the dashboard reads, on runs written through the storage room."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runhealth.dashboard import queries
from runhealth.dashboard.queries import Attempt
from runhealth.dashboard.views.curves import line_points, non_finite
from runhealth.dashboard.window import Span
from runhealth.storage.reader import RunReader
from runhealth.storage.records import CheckpointStatus, StepRecord

ONE = (Attempt(attempt=0, first_step=0, last_step=10**6),)


class Table:
    """A table `steps` in memory, with the reader's `sql`."""

    def __init__(self, losses: list[float]) -> None:
        self.connection = duckdb.connect()
        frame = pl.DataFrame(
            {
                "attempt": 0,
                "step": range(len(losses)),
                "rank": 0,
                "ts_ns": 0,
                "loss": pl.Series(losses, dtype=pl.Float64),
            }
        )
        self.connection.register("rows", frame.to_arrow())
        self.connection.execute("CREATE TABLE steps AS SELECT * FROM rows")

    def sql(self, query: str, parameters: Any = ()) -> pl.DataFrame:
        frame = pl.from_arrow(self.connection.sql(query, params=list(parameters)).to_arrow_table())
        assert isinstance(frame, pl.DataFrame)
        return frame


any_loss = st.one_of(
    st.floats(-1e6, 1e6, width=32), st.just(math.nan), st.just(math.inf), st.just(-math.inf), st.just(2.0)
)


@settings(max_examples=60, deadline=None)
@given(losses=st.lists(any_loss, min_size=1, max_size=300), buckets=st.integers(1, 40), lo=st.integers(0, 20))
def test_decimation_loses_nothing_a_reader_looks_for(losses: list[float], buckets: int, lo: int) -> None:
    hi = max(lo, len(losses) - 1)
    table = Table(losses)
    frame = queries.curve(table, "loss", Span(lo=lo, hi=hi), attempts=ONE, buckets=buckets)
    table.connection.close()
    points = frame.filter(pl.col("bad_steps") == 0)
    drawn = dict(points.select("step", "value").iter_rows())
    visible = dict(enumerate(losses))
    finite = {step: value for step, value in visible.items() if step >= lo and math.isfinite(value)}
    bad = [step for step, value in visible.items() if step >= lo and not math.isfinite(value)]

    assert all(losses[step] == value for step, value in drawn.items())
    if finite:
        assert min(finite) in drawn
        assert max(finite) in drawn
    by_bucket: dict[int, dict[int, float]] = {}
    for step, value in finite.items():
        by_bucket.setdefault((step - lo) * buckets // (hi - lo + 1), {})[step] = value
    for members in by_bucket.values():
        shown = [drawn[step] for step in members if step in drawn]
        assert min(members.values()) == min(shown)
        assert max(members.values()) == max(shown)
        assert {min(members), max(members)} <= set(drawn)
    assert points.height <= 4 * buckets

    marks = frame.filter(pl.col("bad_steps") > 0)
    assert marks["bad_steps"].sum() == len(bad)
    assert marks.height <= buckets
    if bad:
        assert marks["step"].min() == bad[0]
        assert marks["bad_last"].max() == bad[-1]
        assert sum(stretch.steps for stretch in non_finite(frame)) == len(bad)

    # a line is drawn between two points only if every step between them is finite
    line = line_points(frame).rows()
    for (before, low), (after, high) in itertools.pairwise(line):
        if low is not None and high is not None:
            assert not any(before < step < after for step in bad)
    # and it is broken nowhere else
    breaks = sum(value is None for _, value in line)
    steps = sorted(drawn)
    assert breaks == sum(any(a < step < b for step in bad) for a, b in itertools.pairwise(steps))


def test_one_step_spike_survives_any_zoom(new_run: Callable[..., Any]) -> None:
    run = new_run("spike")
    run.steps(0, 4999, {3217: 9.0, 3218: math.nan})
    run.publish()
    with RunReader.open("spike") as reader:
        for buckets in (1, 50, 600):
            frame = queries.curve(reader, "loss", Span(lo=0, hi=4999), attempts=ONE, buckets=buckets)
            assert frame.filter(pl.col("value") == 9.0)["step"].to_list() == [3217]
            assert frame.filter(pl.col("bad_steps") > 0)["step"].to_list() == [3218]


def test_a_step_that_is_nan_on_one_rank_breaks_the_line(new_run: Callable[..., Any]) -> None:
    run = new_run("one-rank", ranks=3)
    run.steps(0, 9, {4: math.nan}, on_rank=1)
    with RunReader.open("one-rank") as reader:
        frame = queries.curve(reader, "loss", Span(lo=0, hi=9), attempts=ONE, buckets=100)
    assert non_finite(frame)[0].first == 4
    assert line_points(frame).filter(pl.col("value").is_null())["step"].to_list() == [4.5]


def test_progress_tells_attempts_and_what_they_superseded(new_run: Callable[..., Any]) -> None:
    run = new_run("tree")
    run.steps(0, 99)
    run.new_attempt()
    run.steps(60, 149)
    run.new_attempt()
    run.steps(150, 160)
    run.checkpoints([60])
    run.publish()
    run.event("attempt_end")
    run.close()
    with RunReader.open("tree") as reader:
        progress = queries.progress(reader)
        assert progress is not None
        assert [(a.first_step, a.last_step, a.superseded_from) for a in progress.attempts] == [
            (0, 99, 60), (60, 149, None), (150, 160, None),
        ]  # fmt: skip
        assert progress.last_attempt == 2
        assert progress.end is not None
        assert progress.exception is None
        assert progress.ranks == (0, 1)
        assert progress.median_step_s == pytest.approx(0.1)
        frame = queries.curve(reader, "loss", progress.span, attempts=progress.attempts)
        faint = frame.filter("superseded")
        assert (faint["attempt"].unique().to_list(), faint["step"].min(), faint["step"].max()) == ([0], 60, 99)


def test_no_step_yet_is_no_progress(new_run: Callable[..., Any]) -> None:
    new_run("empty")
    with RunReader.open("empty") as reader:
        assert queries.progress(reader) is None


def test_heat_keeps_the_most_deviating_step_of_a_bucket(new_run: Callable[..., Any]) -> None:
    run = new_run("heat", ranks=4)
    run.steps(0, 999)
    for rank, log in enumerate(run.logs):
        values = {"t_step_s": 5.0, "loss": math.nan} if rank == 3 else {"t_step_s": 0.1, "loss": 3.0}
        log.append([StepRecord(attempt=0, step=1000, rank=rank, values=values)])
    with RunReader.open("heat") as reader:
        cells = queries.heat(reader, "t_step_s", Span(lo=0, hi=1000), attempts=ONE, buckets=10)
        assert cells.height == 40
        worst = cells.sort("deviation").row(-1, named=True)
        assert (worst["rank"], worst["step"], worst["bucket"]) == (3, 1000, 9)
        assert worst["deviation"] == pytest.approx(4.9, abs=0.01)
        losses = queries.heat(reader, "loss", Span(lo=0, hi=1000), attempts=ONE, buckets=10)
        assert losses.filter(pl.col("bad_steps") > 0).select("rank", "bad_step").rows() == [(3, 1000)]


def test_a_signal_with_an_odd_name_is_quoted(new_run: Callable[..., Any]) -> None:
    run = new_run("odd", ranks=1)
    name = 'x"; DROP TABLE steps; --'
    run.logs[0].append([StepRecord(attempt=0, step=s, rank=0, values={name: float(s)}) for s in range(5)])
    with RunReader.open("odd") as reader:
        column = queries.signals(reader)[0]
        frame = queries.curve(reader, column, Span(lo=0, hi=4), attempts=ONE)
        assert frame["value"].to_list() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_checkpoints_say_their_last_state(new_run: Callable[..., Any]) -> None:
    run = new_run("saves", ranks=1)
    run.steps(0, 30)
    run.checkpoints([10, 20], CheckpointStatus.SAVED)
    run.now_ns += 1
    run.checkpoints([20], CheckpointStatus.FAILED)
    run.checkpoints([10], CheckpointStatus.LOADED)
    with RunReader.open("saves") as reader:
        found = queries.checkpoints(reader, Span(lo=0, hi=30))
    assert found.select("step", "status").rows() == [(10, "saved"), (20, "failed")]


def test_csv_holds_every_row_and_spells_nan(new_run: Callable[..., Any]) -> None:
    run = new_run("csv")
    run.steps(0, 20, {5: math.nan})
    with RunReader.open("csv") as reader:
        lines = queries.write_csv(queries.rows(reader, Span(lo=4, hi=6))).splitlines()
    assert len(lines) == 1 + 3 * 2
    assert lines[0].startswith("attempt,step,rank,ts_ns,")
    assert sum("NaN" in line for line in lines) == 2
