"""What is drawn and said, as pure functions."""

import json
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from runhealth.dashboard.queries import Attempt, Progress
from runhealth.dashboard.views import curves, findings, heatmap, overview, states, text
from runhealth.dashboard.views.palette import DARK, LIGHT, palette
from runhealth.dashboard.views.verdict import RunState, next_command, run_state, stale_after_s, verdict, verdict_html
from runhealth.dashboard.window import Span, Window, around
from runhealth.diagnose.findings import (
    Evidence,
    Finding,
    Missing,
    Outcome,
    Remedy,
    Report,
    Severity,
    Status,
    SuspectResult,
)  # fmt: skip
from runhealth.diagnose.plans import Cost, RollbackPlan, SkipRange
from runhealth.storage.errors import AmbiguousRunError, RunNotFoundError
from runhealth.storage.records import SourceInfo

EVIL = '<img src=x onerror="alert(1)">](javascript:x) **bold** `code`\n# head | cell\u202e'
NOW_NS = 1_800_000_000_000_000_000
ATTEMPTS = (
    Attempt(attempt=0, first_step=0, last_step=99, superseded_from=60),
    Attempt(attempt=1, first_step=60, last_step=199),
)
NO_CHECKPOINTS = pl.DataFrame(schema={"step": pl.Int64, "status": pl.String, "attempt": pl.Int64})


def finding(**changes: Any) -> Finding:
    usual = Finding(
        id="a", code="RH101", kind="loss_spike", severity=Severity.ERROR, outcome=Outcome.NON_RECOVERING, attempt=1,
        onset_step=120, peak_step=125, end_step=None, summary="it rose", verdict="bad_shard",
        suspects=(
            SuspectResult(
                suspect="bad_shard", status=Status.IMPLICATED, probability=0.93,
                evidence=(Evidence(claim="entropy 1.2", weight_nats=5.0, value=1.2, baseline=4.8),),
            ),
            SuspectResult(
                suspect="lr_change", status=Status.NOT_OBSERVED, probability=0.07,
                evidence=(Evidence(claim="lr on its course", weight_nats=-2.0),),
                missing=(Missing(signal="update_ratio", would_tell="more"),),
            ),
        ),
        remedy=Remedy(action="rollback_and_skip"),
    )  # fmt: skip
    return replace(usual, **changes)


def report(*found: Finding) -> Report:
    return Report(
        source=SourceInfo(name="r", source="", format="runhealth"), attempts=(), findings=found, missing=(),
        first_step=0, last_step=199,
    )  # fmt: skip


def progress(**changes: Any) -> Progress:
    usual = Progress(
        rows=400, records=0, attempts=ATTEMPTS, ranks=(0, 1), last_attempt=1, last_step=199,
        last_ts_ns=NOW_NS - 14_000_000_000, median_step_s=0.1, end=None, exception=None,
    )  # fmt: skip
    return replace(usual, **changes)


def points(rows: list[tuple[int, bool, int, float | None, int, int, int]]) -> pl.DataFrame:
    names = ("attempt", "superseded", "step", "value", "broken", "bad_steps", "bad_last")
    types = (pl.Int64, pl.Boolean, pl.Int64, pl.Float64, pl.Int64, pl.Int64, pl.Int64)
    return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")


def steady(first: int, last: int, attempt: int = 1, *, superseded: bool = False) -> list[Any]:
    return [(attempt, superseded, step, 3.0 + step % 3, 0, 0, step) for step in range(first, last + 1)]


def chart(frames: dict[str, pl.DataFrame], span: Span, **changes: Any) -> Any:
    usual: dict[str, Any] = {
        "attempts": ATTEMPTS, "findings": (), "checkpoints": NO_CHECKPOINTS, "palette": LIGHT,
    }  # fmt: skip
    return curves.curves(frames, span, **{**usual, **changes})


def series(spec: Any, name: str) -> list[Any]:
    return [s for s in spec["series"] if s["name"] == name]


# curves


def test_every_panel_shares_the_window_the_app_owns() -> None:
    frame = points(steady(100, 150))
    spec = chart({"loss": frame, "grad_norm": frame, "lr": frame, "t_step_s": frame}, Span(lo=100, hi=150))
    assert len(spec["grid"]) == len(spec["title"]) == 4
    assert [(axis["min"], axis["max"]) for axis in spec["xAxis"]] == [(100, 150)] * 4
    assert [axis["type"] for axis in spec["yAxis"]] == ["value"] * 2 + ["log"] + ["value"] * 5
    assert "dataZoom" not in spec


def test_marks_are_on_every_panel() -> None:
    frame = points(steady(0, 199))
    saves = pl.DataFrame({"step": [50, 100], "status": ["verified", "failed"], "attempt": [0, 1]})
    spec = chart({"loss": frame, "lr": frame}, Span(lo=0, hi=199), findings=[finding()], checkpoints=saves)
    for marks in series(spec, "marks"):
        assert [line["xAxis"] for line in marks["markLine"]["data"]] == [120, 60]
        (band,) = marks["markArea"]["data"]
        assert (band[0]["xAxis"], band[1]["xAxis"]) == (120, 199)
    assert len(series(spec, "marks")) == 2
    assert [s["data"] for s in series(spec, "checkpoint")] == [[[50, 0.04]]] * 2
    assert [s["data"] for s in series(spec, "failed checkpoint")] == [[[100, 0.04]]] * 2
    labelled = [line["label"]["show"] for marks in series(spec, "marks") for line in marks["markLine"]["data"]]
    assert labelled == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "bands"),
    [
        ({"end_step": 130}, 1),
        ({"outcome": Outcome.ONGOING}, 1),
        ({"outcome": Outcome.TRANSIENT, "count": 9, "end_step": 190}, 0),  # nine events, not one of 70 steps
        ({"outcome": Outcome.NONE}, 0),  # a fact, such as a corrupt checkpoint, is a moment
        ({"onset_step": 10, "end_step": 20}, 0),  # before the window
        ({"onset_step": 10, "end_step": 160}, 1),  # reaches into it
    ],
)
def test_bands_of_findings(changes: dict[str, Any], bands: int) -> None:
    spec = chart({"loss": points(steady(100, 199))}, Span(lo=100, hi=199), findings=[finding(**changes)])
    assert len(series(spec, "marks")[0]["markArea"]["data"]) == bands


def test_a_line_is_never_drawn_across_nan_and_nan_is_marked() -> None:
    frame = points([(0, False, 1, 2.0, 0, 0, 1), (0, False, 2, None, 3, 3, 4), (0, False, 5, 2.5, 3, 0, 5),
                    (0, False, 6, 2.5, 3, 0, 6)])  # fmt: skip
    spec = chart({"loss": frame}, Span(lo=0, hi=9))
    line = spec["dataset"][series(spec, "loss")[0]["datasetIndex"]]["source"]
    assert line.rows() == [(1.0, 2.0), (4.5, None), (5.0, 2.5), (6.0, 2.5)]
    assert series(spec, "loss")[0]["connectNulls"] is False
    assert series(spec, "not finite")[0]["data"] == [[2, 0.9]]
    # the point at step 1 has no neighbour to be joined with, and gets a dot
    (dots,) = [s for s in series(spec, "loss") if s["type"] == "scatter"]
    assert spec["dataset"][dots["datasetIndex"]]["source"].rows() == [(1.0, 2.0)]


def test_attempts_are_separate_lines_and_superseded_ones_are_faint() -> None:
    frame = points([*steady(0, 59, 0), *steady(60, 99, 0, superseded=True), *steady(60, 199, 1)])
    spec = chart({"loss": frame}, Span(lo=0, hi=199))
    lines = [s for s in spec["series"] if s["type"] == "line" and s["name"] != "marks"]
    assert [(s["name"], s["lineStyle"]["opacity"]) for s in lines] == [
        ("loss (attempt 0, superseded)", 0.7), ("loss", 1.0), ("loss", 1.0),
    ]  # fmt: skip
    sizes = [spec["dataset"][s["datasetIndex"]]["source"].height for s in lines]
    assert sizes == [40, 60, 140]
    alone = chart({"loss": frame.filter(pl.col("attempt") == 0)}, Span(lo=0, hi=99), attempt=0)
    assert {s["lineStyle"]["opacity"] for s in alone["series"] if s["type"] == "line" and "lineStyle" in s} == {1.0}


def test_zero_stays_visible_on_the_log_axis() -> None:
    frame = points([(0, False, 1, 0.0, 0, 0, 1), (0, False, 2, 0.3, 0, 0, 2), (0, False, 3, 40.0, 0, 0, 3)])
    spec = chart({"grad_norm": frame}, Span(lo=1, hi=3))
    line = spec["dataset"][series(spec, "grad_norm")[0]["datasetIndex"]]["source"]
    assert line["value"].to_list() == [0.3, 0.3, 40.0]
    assert (spec["yAxis"][0]["min"], spec["yAxis"][0]["max"]) == pytest.approx((0.2, 50.0))


def test_neighbouring_non_finite_buckets_become_one_stretch() -> None:
    frame = points([(0, False, 1, 2.0, 0, 0, 1), (0, False, 2, None, 9, 9, 10), (0, False, 11, None, 19, 10, 20),
                    (0, False, 21, 1.0, 19, 0, 21), (0, False, 22, None, 20, 1, 22)])  # fmt: skip
    assert [(s.first, s.last, s.steps) for s in curves.non_finite(frame)] == [(2, 20, 19), (22, 22, 1)]


def test_everything_outside_of_the_datasets_is_json() -> None:
    frame = points([*steady(0, 5), (1, False, 6, None, 1, 1, 6)])
    spec = chart({"loss": frame, "grad_norm": frame}, Span(lo=0, hi=9), findings=[finding(onset_step=2)])
    del spec["dataset"]
    json.dumps(spec, allow_nan=False)


# heat map


def cells(rows: list[tuple[int, int, int | None, float | None, float | None, int, int | None]]) -> pl.DataFrame:
    names = ("bucket", "rank", "step", "value", "deviation", "bad_steps", "bad_step")
    types = (pl.Int64, pl.Int64, pl.Int64, pl.Float64, pl.Float64, pl.Int64, pl.Int64)
    return pl.DataFrame(rows, schema=dict(zip(names, types, strict=True)), orient="row")


def test_heat_map_places_ranks_by_row_and_keeps_nan_apart() -> None:
    frame = cells([(0, 0, 0, 1.0, -0.1, 0, None), (0, 7, 1, 1.2, 0.1, 0, None), (1, 7, None, None, None, 3, 12)])
    spec = heatmap.heatmap(frame, "loss", Span(lo=0, hi=19), ranks=(0, 7), buckets=2, palette=DARK)
    good, bad = (dataset["source"] for dataset in spec["dataset"])
    assert good.select("row", "deviation").rows() == [(0, -0.1), (1, 0.1)]
    assert bad.select("row", "step", "bad_steps").rows() == [(1, 12, 3)]
    assert spec["xAxis"]["data"] == ["0", "10"]
    assert spec["visualMap"]["seriesIndex"] == 0
    assert spec["visualMap"]["max"] == -spec["visualMap"]["min"] > 0


def test_heat_map_of_fewer_steps_than_buckets_has_one_column_a_step() -> None:
    assert heatmap.bucket_steps(Span(lo=10, hi=12), 150) == [10, 11, 12]
    assert heatmap.bucket_steps(Span(lo=0, hi=9), 3) == [0, 4, 7]
    assert [(step * 3) // 10 for step in (3, 4, 6, 7)] == [0, 1, 1, 2]


def test_habitual_jitter_stays_pale() -> None:
    assert heatmap.scale_limit(pl.Series([0.1] * 99 + [5.0])) == 5.0
    assert heatmap.scale_limit(pl.Series([0.1] * 1000)) == pytest.approx(0.3)
    assert heatmap.scale_limit(pl.Series([0.0])) > 0


# window


@pytest.mark.parametrize(
    ("window", "span"),
    [
        (Window(), (10, 500)),
        (Window(tail=100), (401, 500)),
        (Window(tail=10_000), (10, 500)),
        (Window(first=200), (200, 500)),
        (Window(first=200, last=300), (200, 300)),
        (Window(first=300, last=200), (200, 300)),
        (Window(last=300), (10, 300)),
        (Window(last=3), (3, 3)),
    ],
)
def test_window(window: Window, span: tuple[int, int]) -> None:
    shown = window.span(Span(lo=10, hi=500))
    assert (shown.lo, shown.hi) == span


def test_a_frozen_window_does_not_move_and_counts_newer_steps() -> None:
    frozen = Window(first=100, last=200)
    assert frozen.span(Span(lo=0, hi=500)) == frozen.span(Span(lo=0, hi=9000))
    assert frozen.newer_steps(Span(lo=0, hi=512)) == 312
    assert Window(first=100).newer_steps(Span(lo=0, hi=512)) == 0


def test_a_window_around_an_incident_shows_what_came_before() -> None:
    assert around(1000, None, Span(lo=0, hi=5000)) == Window(first=850, last=1150)
    assert around(1000, 3000, Span(lo=0, hi=5000)) == Window(first=0, last=4000)


# verdict


@pytest.mark.parametrize(
    ("now", "state"),
    [
        (progress(), RunState.RUNNING),
        (progress(last_ts_ns=NOW_NS - 61_000_000_000), RunState.STALE),
        (progress(last_ts_ns=NOW_NS - 61_000_000_000, median_step_s=20.0), RunState.RUNNING),
        (progress(last_ts_ns=NOW_NS - 101_000_000_000, median_step_s=20.0), RunState.STALE),
        (progress(end="", last_ts_ns=0), RunState.FINISHED),
        (progress(end="", exception="boom"), RunState.FAILED),
        (None, RunState.NO_DATA),
    ],
)
def test_run_state(now: Progress | None, state: RunState) -> None:
    assert run_state(now, NOW_NS) is state


def test_stale_after_sixty_seconds_or_five_median_steps() -> None:
    assert stale_after_s(None) == stale_after_s(1.0) == 60.0
    assert stale_after_s(30.0) == 150.0


def test_the_worst_finding_leads_with_its_cause() -> None:
    mild = finding(id="b", severity=Severity.INFO, onset_step=1)
    shown = verdict(progress(), report(mild, finding()), NOW_NS, run="r", store=None)
    assert shown.finding == finding()
    assert (shown.cause, shown.probability, shown.others) == ("bad_shard", 0.93, 1)
    assert shown.action == "diagnose rollback plan --run r"
    page = verdict_html(shown, LIGHT, diagnosing=False)
    for words in ("running", "14 s", "RH101", "bad_shard", "p 0.93", "1 more below"):
        assert words in page


def test_next_command_fits_the_state() -> None:
    assert next_command(None, RunState.RUNNING, run="a b", store=None) == "diagnose --run 'a b'"
    assert next_command(None, RunState.NO_DATA, run="r", store="s3://x") == "diagnose doctor --run r --store s3://x"
    quiet = finding(remedy=Remedy(action="continue"))
    assert next_command(quiet, RunState.STALE, run="; rm -rf /", store=None) == "diagnose --run '; rm -rf /'"


def test_an_incident_that_a_later_attempt_went_behind_no_longer_leads() -> None:
    healed = finding(attempt=0, onset_step=70)
    mild = finding(id="b", attempt=1, severity=Severity.WARNING, remedy=Remedy(action="none"))
    assert verdict(progress(), report(healed, mild), NOW_NS, run="r", store=None).finding == mild
    fact = finding(id="c", attempt=1, severity=Severity.INFO, remedy=Remedy(action="none"))
    assert verdict(progress(), report(fact, healed), NOW_NS, run="r", store=None).finding == healed
    alone = verdict(progress(), report(healed), NOW_NS, run="r", store=None)
    assert (alone.finding, alone.superseded_by, alone.action) == (healed, 1, "diagnose --run r")
    assert "went back behind it" in verdict_html(alone, LIGHT, diagnosing=False)
    before = finding(attempt=0, onset_step=59)  # the new attempt began after its onset
    assert verdict(progress(), report(before), NOW_NS, run="r", store=None).action.startswith("diagnose rollback")
    frame = points(steady(0, 199))
    spec = chart({"loss": frame}, Span(lo=0, hi=199), findings=[healed, finding()])
    styles = [line["lineStyle"]["type"] for line in series(spec, "marks")[0]["markLine"]["data"]]
    assert styles == ["dotted", "solid", "dashed"]


def test_a_plan_is_told() -> None:
    plan = RollbackPlan(
        run="r", incident="a", attempt=1, cause="bad_shard", probability=0.93, onset_step=120, checkpoint_step=100,
        checkpoint_path="c", skip=(SkipRange(shard=EVIL, first_sample=3, last_sample=9),),
        cost=Cost(steps=20, tokens=1, samples_skipped=7, seconds=240.0),
    )  # fmt: skip
    told = findings.facts_html(finding(remedy=Remedy(action="rollback_and_skip", plan=plan)))
    assert "back to checkpoint <b>100</b>, skip samples 3–9 of &lt;img" in told
    assert "20 steps again, about 4 min" in told


def test_a_failed_diagnosis_and_a_pending_one_are_said() -> None:
    shown = verdict(progress(), None, NOW_NS, run="r", store=None)
    assert "Reading the records" in verdict_html(shown, LIGHT, diagnosing=True)
    assert "failed: boom" in verdict_html(shown, LIGHT, diagnosing=False, problem="boom")
    assert "No finding" in verdict_html(
        verdict(progress(), report(), NOW_NS, run="r", store=None), LIGHT, diagnosing=False
    )


def test_notes_alone_do_not_head_the_page() -> None:
    notes = report(*(finding(id=i, severity=Severity.INFO, remedy=Remedy(action="none")) for i in "ab"))
    told = verdict_html(verdict(progress(), notes, NOW_NS, run="r", store=None), LIGHT, diagnosing=False)
    assert "nothing at warning or above" in told
    assert "2 minor notes below" in told
    assert finding().code not in told


# untrusted text


def evil() -> Finding:
    return finding(
        summary=EVIL, signals=(EVIL,), kind=EVIL, code=EVIL, verdict=EVIL,
        suspects=(
            SuspectResult(
                suspect=EVIL, status=Status.CRASHED, probability=0.5, error=EVIL,
                evidence=(Evidence(claim=EVIL, weight_nats=1.0), Evidence(claim=EVIL, weight_nats=-1.0)),
                missing=(Missing(signal=EVIL, would_tell=EVIL),),
            ),
        ),
    )  # fmt: skip


def test_no_text_of_a_run_reaches_the_page_as_html() -> None:
    shown = verdict(progress(exception=EVIL), report(evil()), NOW_NS, run=EVIL, store=None)
    pages = [
        verdict_html(shown, LIGHT, diagnosing=False),
        verdict_html(shown, LIGHT, diagnosing=False, problem=EVIL),
        findings.facts_html(evil()),
        findings.suspects_html(evil(), LIGHT),
        states.state_html(states.unknown_run(EVIL, RunNotFoundError("x", (EVIL,)), ()), LIGHT),
        states.state_html(states.unreadable_run(EVIL, OSError(EVIL), None), LIGHT),
        curves.legend_html({EVIL: points([(0, False, 1, None, 1, 1, 1)])}, LIGHT),
    ]
    for page in pages:
        assert "alert(1)" in page
        assert "<img" not in page
        assert 'onerror="' not in page
        assert "\u202e" not in page


def test_markdown_escapes_all_that_markdown_reads() -> None:
    safe = text.markdown(EVIL)
    assert "\n" not in safe
    for mark in ("<", "[", "]", "(", "*", "`", "#", "|"):
        assert all(safe[index - 1] == "\\" for index, char in enumerate(safe) if char == mark)
    assert text.markdown(":red[x] $y$").startswith("\\:red\\[")


def test_text_helpers() -> None:
    assert [text.duration(s) for s in (-3, 14, 119, 120, 7200, 172800)] == [
        "0 s",
        "14 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]
    assert text.number(1234567.0) == "1,234,567"
    assert text.number(0.00012345) == "0.0001234"
    assert len(text.plain("x" * 1000, 50)) == 50


def test_suspects_are_sorted_with_evidence_in_its_column() -> None:
    page = findings.suspects_html(finding(), LIGHT)
    assert page.index("bad shard") < page.index("lr change")
    assert page.index("entropy 1.2") < page.index("lr on its course")
    assert "1.200" in page or "1.2 (normal 4.8)" in page
    assert "update_ratio: would tell more" in page
    assert findings.suspects_html(finding(suspects=()), LIGHT) == ""


# states, overview


def test_states_name_the_next_command() -> None:
    assert states.no_runs("s").action == "runhealth demo"
    nearest = states.unknown_run("demo-spik", RunNotFoundError("no", ("demo-spike",)), ("x",))
    assert nearest.action == "runhealth dashboard --run demo-spike"
    assert nearest.names == ("demo-spike",)
    assert "more than one" in states.unknown_run("d", AmbiguousRunError("two"), ("d1", "d2")).title
    assert states.unreadable_run("r", OSError("bad"), None).action == "runhealth compact r"
    assert states.no_telemetry("r", None).action == "diagnose doctor --run r"
    assert states.choose_run().action


def test_overview_selection() -> None:
    assert overview.selected({"selection": {"window": {"step": [10.4, 99.6]}}}) == (10, 100)
    assert overview.selected({"selection": {"window": {"step": [99.6, 10.4]}}}) == (10, 100)
    for nothing in (
        None,
        {},
        {"selection": {}},
        {"selection": {"window": {}}},
        {"selection": {"window": {"step": [5, 5]}}},
    ):
        assert overview.selected(nothing) is None
    shown = overview.overview(Span(lo=0, hi=100), Span(lo=10, hi=20), LIGHT)
    assert shown["layer"][1]["data"]["values"] == [{"lo": 10, "hi": 20}]
    assert len(overview.overview(Span(lo=0, hi=100), Span(lo=0, hi=100), LIGHT)["layer"]) == 1


def test_palette_follows_the_theme() -> None:
    assert palette("dark") is DARK
    assert palette("light") is palette(None) is LIGHT
