"""Every SQL statement of the dashboard.

Each function takes something with the reader's `sql(query, parameters)` and returns plain data. Column names come from
the database itself and are quoted; values are bound as parameters.

A step is superseded when a later attempt began at or before it: the run went back and trained it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from runhealth.dashboard.window import Span, Window
from runhealth.storage.records import EventKind

KEYS = ("attempt", "step", "rank", "ts_ns")
END_OF_TIME = 2**62  # a step that no run reaches
RECENT_STEPS = 200  # the step time that decides on `stale` is the median of so many


class Queryable(Protocol):
    """What the dashboard needs of a `RunReader`."""

    def sql(self, query: str, parameters: Sequence[object] = ()) -> pl.DataFrame: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """`superseded_from` is the first step that a later attempt trained again, None if there is none."""

    attempt: int
    first_step: int
    last_step: int
    superseded_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is. Two equal values mean that nothing new arrived."""

    rows: int
    records: int  # rows of the other tables: a checkpoint or an event redraws the page, too
    attempts: tuple[Attempt, ...]
    ranks: tuple[int, ...]
    last_attempt: int
    last_step: int
    last_ts_ns: int
    median_step_s: float | None
    end: str | None  # message of the latest attempt's ATTEMPT_END, None while it runs or when it died
    exception: str | None  # message of an EXCEPTION in the latest attempt

    @property
    def span(self) -> Span:
        return Span(lo=min(a.first_step for a in self.attempts), hi=max(a.last_step for a in self.attempts))

    def shown(self, window: Window, attempt: int | None) -> Span:
        """The steps that a window means on this run, or on one attempt of it."""
        chosen = next((a for a in self.attempts if a.attempt == attempt), None)
        return window.span(self.span if chosen is None else Span(lo=chosen.first_step, hi=chosen.last_step))


def quoted(name: str) -> str:
    """A column name that may hold anything."""
    return '"' + name.replace('"', '""') + '"'


def signals(source: Queryable) -> tuple[str, ...]:
    """The signals that the table `steps` has a column for."""
    return tuple(name for name in source.sql("SELECT * FROM steps LIMIT 0").columns if name not in KEYS)


_ATTEMPTS = """
SELECT attempt, min(step) AS first_step, max(step) AS last_step, count(*) AS n, max(ts_ns) AS ts_ns,
       min(min(step)) OVER (ORDER BY attempt ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS superseded_from
FROM steps GROUP BY attempt ORDER BY attempt
"""


def progress(source: Queryable) -> Progress | None:
    """How far the run is; None before its first step."""
    found = source.sql(_ATTEMPTS).rows(named=True)
    if not found:
        return None
    attempts = tuple(
        Attempt(
            attempt=row["attempt"],
            first_step=row["first_step"],
            last_step=row["last_step"],
            superseded_from=(
                row["superseded_from"]
                if row["superseded_from"] is not None and row["superseded_from"] <= row["last_step"]
                else None
            ),
        )
        for row in found
    )
    latest = attempts[-1]
    others = source.sql(
        "SELECT (SELECT list_sort(list(rank)) FROM (SELECT DISTINCT rank FROM steps)) AS ranks,"
        " (SELECT count(*) FROM checkpoints) + (SELECT count(*) FROM events) AS records"
    ).row(0, named=True)
    ends = {
        row["kind"]: row["message"] or row["kind"]
        for row in source.sql(
            "SELECT kind, message FROM events WHERE attempt = ? AND kind IN (?, ?) ORDER BY ts_ns",
            [latest.attempt, EventKind.ATTEMPT_END.value, EventKind.EXCEPTION.value],
        ).iter_rows(named=True)
    }
    return Progress(
        rows=sum(row["n"] for row in found),
        records=others["records"],
        attempts=attempts,
        ranks=tuple(others["ranks"]),
        last_attempt=latest.attempt,
        last_step=latest.last_step,
        last_ts_ns=max(row["ts_ns"] for row in found),
        median_step_s=_median_step_s(source, latest),
        end=ends.get(EventKind.ATTEMPT_END.value),
        exception=ends.get(EventKind.EXCEPTION.value),
    )


def _median_step_s(source: Queryable, latest: Attempt) -> float | None:
    """Median distance in time of the newest steps of the lowest rank that wrote them."""
    median: float | None = source.sql(
        "SELECT median(gap) / 1e9 FROM (SELECT ts_ns - lag(ts_ns) OVER (ORDER BY step) AS gap FROM"
        " (SELECT step, arg_min(ts_ns, rank) AS ts_ns FROM steps WHERE attempt = ? AND step > ? GROUP BY step)"
        " WHERE ts_ns > 0)",
        [latest.attempt, latest.last_step - RECENT_STEPS],
    ).item()
    return median


# How one step's ranks become one point of the curve. A step is as slow as its slowest rank.
ACROSS_RANKS = {"loss": "avg", "grad_norm": "max", "lr": "max", "t_step_s": "max"}

# Four points a bucket at most: the first, the last, the lowest and the highest step whose value is finite. `broken`
# counts the non-finite steps up to a point, so two neighbours with different counts must not be joined by a line.
# Non-finite steps are reported a bucket: the first, the last, and how many.
_CURVE = """
WITH spans(attempt, superseded_from) AS (VALUES {spans}),
per_step AS (
  SELECT attempt, step, {across}(x) FILTER (WHERE isfinite(x)) AS value, bool_or(NOT isfinite(x)) AS bad
  FROM (SELECT attempt, step, CAST({signal} AS DOUBLE) AS x FROM steps WHERE step BETWEEN $lo AND $hi {attempt})
  WHERE x IS NOT NULL GROUP BY attempt, step
),
numbered AS (
  SELECT attempt, step, value, bad, step >= superseded_from AS superseded,
         (step - $lo) * $buckets // ($hi - $lo + 1) AS bucket,
         sum(bad::INT) OVER (PARTITION BY attempt ORDER BY step ROWS UNBOUNDED PRECEDING) AS broken
  FROM per_step JOIN spans USING (attempt)
),
bucketed AS (
  SELECT attempt, superseded, bucket,
         list_distinct([min(point), arg_min(point, value), arg_max(point, value), max(point)]) AS points,
  FROM (SELECT *, {{'step': step, 'value': value, 'broken': broken}} AS point FROM numbered WHERE NOT bad)
  GROUP BY attempt, superseded, bucket
),
spread AS (SELECT attempt, superseded, unnest(points, recursive := true) FROM bucketed)
SELECT attempt, superseded, step, value, CAST(broken AS BIGINT) AS broken, 0 AS bad_steps, step AS bad_last
FROM spread
UNION ALL
SELECT attempt, superseded, min(step), NULL, CAST(max(broken) AS BIGINT), count(*), max(step)
FROM numbered WHERE bad GROUP BY attempt, superseded, bucket
ORDER BY attempt, step
"""


def _spans(attempts: Sequence[Attempt]) -> str:
    """The rows of `spans`: numbers only."""
    return ", ".join(
        f"({a.attempt:d}, {END_OF_TIME if a.superseded_from is None else a.superseded_from:d})" for a in attempts
    )


def curve(
    source: Queryable,
    signal: str,
    span: Span,
    *,
    attempts: Sequence[Attempt],
    attempt: int | None = None,
    buckets: int = 600,
) -> pl.DataFrame:
    """One signal over steps, thinned so that nothing a reader looks for is lost.

    Returns rows ordered by (attempt, step): attempt, superseded, step, value, broken, bad_steps, bad_last. A row with
    `bad_steps` 0 is a point of the line. Any other row stands for `bad_steps` non-finite steps between `step` and
    `bad_last`, and its value is null. At most 5 rows an attempt and bucket.
    """
    query = _CURVE.format(
        spans=_spans(attempts),
        across=ACROSS_RANKS.get(signal, "avg"),
        signal=quoted(signal),
        attempt="" if attempt is None else f"AND attempt = {int(attempt)}",
    )
    return source.sql(
        query.replace("$lo", "?1").replace("$hi", "?2").replace("$buckets", "?3"), [span.lo, span.hi, buckets]
    )


HEAT_METRICS = {
    "t_step_s": ("step time", "s", ("t_step_s",)),
    "compute_s": ("compute", "s", ("t_forward_s", "t_backward_s")),
    "t_wait_s": ("wait", "s", ("t_wait_s",)),
    "t_data_s": ("data wait", "s", ("t_data_s",)),
    "loss": ("loss", "nats", ("loss",)),
    "grad_norm_rank": ("gradient norm before the reduce", "", ("grad_norm_rank",)),
}

# The cell of a bucket is its most deviating step, so a one-step straggler stays visible at any zoom.
_HEAT = """
WITH spans(attempt, superseded_from) AS (VALUES {spans}),
rows AS (
  SELECT step, rank, CAST({metric} AS DOUBLE) AS x
  FROM steps JOIN spans USING (attempt) WHERE step BETWEEN ?1 AND ?2 AND {which}
),
medians AS (SELECT step, median(x) FILTER (WHERE isfinite(x)) AS middle FROM rows GROUP BY step),
deviating AS (
  SELECT step, rank, x, x - middle AS deviation, (step - ?1) * ?3 // (?2 - ?1 + 1) AS bucket
  FROM rows JOIN medians USING (step) WHERE x IS NOT NULL
)
SELECT CAST(bucket AS BIGINT) AS bucket, rank,
       arg_max(step, abs(deviation)) FILTER (WHERE isfinite(x)) AS step,
       arg_max(x, abs(deviation)) FILTER (WHERE isfinite(x)) AS value,
       arg_max(deviation, abs(deviation)) FILTER (WHERE isfinite(x)) AS deviation,
       count(*) FILTER (WHERE NOT isfinite(x)) AS bad_steps,
       min(step) FILTER (WHERE NOT isfinite(x)) AS bad_step
FROM deviating GROUP BY bucket, rank ORDER BY bucket, rank
"""


def heat(
    source: Queryable,
    metric: str,
    span: Span,
    *,
    attempts: Sequence[Attempt],
    attempt: int | None = None,
    buckets: int = 150,
) -> pl.DataFrame:
    """Rank × step deviation from the median of the ranks at each step.

    Returns bucket, rank, step, value, deviation (of the step of the bucket that deviates most), bad_steps, bad_step.
    Without `attempt`, superseded steps are left out.
    """
    columns = HEAT_METRICS[metric][2]
    query = _HEAT.format(
        spans=_spans(attempts),
        metric=" + ".join(quoted(name) for name in columns),
        which="step < superseded_from" if attempt is None else f"attempt = {int(attempt)}",
    )
    return source.sql(query, [span.lo, span.hi, min(buckets, span.steps)])


def heat_metrics(known: Sequence[str]) -> tuple[str, ...]:
    """The heat map metrics whose signals are all recorded."""
    return tuple(name for name, (_, _, columns) in HEAT_METRICS.items() if all(c in known for c in columns))


def checkpoints(source: Queryable, span: Span, *, attempt: int | None = None) -> pl.DataFrame:
    """step, status, attempt: the last word on each checkpoint in the window (`loaded` says nothing about its state)."""
    which = "" if attempt is None else f"AND attempt = {int(attempt)}"
    return source.sql(
        "SELECT step, arg_max(status, ts_ns) AS status, max(attempt) AS attempt FROM checkpoints"
        f" WHERE step BETWEEN ? AND ? AND status <> 'loaded' {which} GROUP BY step ORDER BY step",
        [span.lo, span.hi],
    )


def rows(source: Queryable, span: Span, *, attempt: int | None = None) -> pl.DataFrame:
    """Every recorded row of the window, not thinned: what the CSV export holds."""
    which = "" if attempt is None else f"AND attempt = {int(attempt)}"
    return source.sql(
        f"SELECT * FROM steps WHERE step BETWEEN ? AND ? {which} ORDER BY attempt, step, rank", [span.lo, span.hi]
    )


def write_csv(frame: pl.DataFrame) -> str:
    """CSV with NaN and infinities spelled out; an empty cell means not measured."""
    return frame.write_csv()
