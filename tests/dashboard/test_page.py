"""The page in each of its states, as Streamlit runs it."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import streamlit.logger
from streamlit.testing.v1 import AppTest

from runhealth.dashboard import live
from runhealth.dashboard.launch import APP
from runhealth.dashboard.pages import run as page

WAIT_S = 60


@pytest.fixture(autouse=True)
def quiet_streamlit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is shared with other tests, and whatever Streamlit warns of (deprecations above all) is an error."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "missing ScriptRunContext" not in record.getMessage():  # AppTest itself causes it
                said.append(f"{record.name}: {record.getMessage()}")

    page.open_run.clear()
    handler = Keep(level=logging.WARNING)
    loggers = [log for name, log in streamlit.logger._loggers.items() if name.startswith("streamlit")]
    for log in loggers:
        log.addHandler(handler)
    monkeypatch.setattr(page, "FIRST_DIAGNOSIS_S", 60.0)
    yield
    for log in loggers:
        log.removeHandler(handler)
    page.open_run.clear()
    assert said == []


def open_page(**query: str) -> AppTest:
    # the page by itself: after `st.navigation`, AppTest runs nothing a second time
    at = AppTest.from_string("from runhealth.dashboard.pages.run import page\npage()", default_timeout=WAIT_S)
    for key, value in query.items():
        at.query_params[key] = value
    return run(at)


def run(at: AppTest) -> AppTest:
    at.run()
    assert list(at.exception) == []
    return at


def words(at: AppTest) -> str:
    return "\n".join(element.value for kind in ("html", "caption", "code", "markdown") for element in at.get(kind))


def test_a_store_without_runs_names_the_demo(store_root: str) -> None:
    at = open_page()
    assert "No runs yet" in words(at)
    assert at.code[0].value == "runhealth demo"
    assert store_root in words(at)


def test_an_unreadable_store_says_why(store_root: str) -> None:
    shutil.rmtree(store_root)
    Path(store_root).write_text("not a folder")
    at = open_page()
    assert store_root in words(at)
    assert len(at.code) == 1


def test_an_unknown_run_names_the_nearest(new_run: Callable[..., Any]) -> None:
    new_run("demo-spike").steps(0, 5)
    at = open_page(run="demo-spiek")
    assert "demo-spiek is not in the store" in words(at)
    assert at.code[0].value == "runhealth dashboard --run demo-spike"
    assert at.selectbox(key="run").value is None
    at.selectbox(key="run").select("demo-spike")
    assert "is not in the store" not in words(run(at))


def test_a_prefix_and_latest_are_resolved(new_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    new_run("first-run", age_s=50).steps(0, 5)
    new_run("second-run").steps(0, 5)
    assert open_page(run="fir").selectbox(key="run").value == "first-run"
    assert open_page(run="latest").selectbox(key="run").value == "second-run"
    monkeypatch.setenv("RUNHEALTH_RUN", "first-run")
    assert open_page().selectbox(key="run").value == "first-run"
    assert open_page(run="second-run").selectbox(key="run").value == "second-run"


def test_a_run_without_a_step_waits(new_run: Callable[..., Any]) -> None:
    run_ = new_run("young")
    at = open_page(run="young")
    assert "Waiting for the first step" in words(at)
    assert at.code[0].value.startswith("diagnose doctor --run young")
    run_.steps(0, 30)
    assert "running" in words(run(at))


def test_a_damaged_database_is_told_with_the_way_out(new_run: Callable[..., Any]) -> None:
    made = new_run("broken")
    made.steps(0, 30)
    made.publish()
    made.close()
    shutil.rmtree(Path(made.info.path) / "log")
    (Path(made.info.path) / "run.duckdb").write_bytes(b"no database" * 1000)
    at = open_page(run="broken")
    assert "cannot be read" in words(at)
    assert at.code[0].value.startswith("runhealth compact broken")


def test_a_run_that_cannot_be_read_for_a_moment_comes_back(
    new_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    new_run("blinks").steps(0, 99)
    read = live.queries.curve

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise duckdb.IOException("stale file handle\nsecond line")

    monkeypatch.setattr(live.queries, "curve", fail)
    monkeypatch.setattr(live.LiveRun, "strip", lambda *_: None)
    at = open_page(run="blinks")
    assert "cannot be read" in words(at)
    assert "stale file handle" in words(at)
    monkeypatch.setattr(live.queries, "curve", read)
    said = words(run(at))
    assert "cannot be read" not in said
    assert "step <b>99</b>" in said
    assert "No finding" in said


def test_a_finished_run_with_a_spike(new_run: Callable[..., Any]) -> None:
    made = new_run("spike", age_s=3600)
    made.steps(0, 599, {400: 9.0})
    made.checkpoints([100, 200, 300])
    made.event("attempt_end", step=599)
    made.publish()
    at = open_page(run="spike")
    said = words(at)
    assert "finished" in said
    assert "60 min" in said
    assert "nothing at warning or above" in said  # a spike that is gone at the next steps is a note
    assert any("RH101" in expander.label for expander in at.expander)
    assert len(at.get("echarts_chart")) == 2
    assert at.query_params["run"] == "spike"
    assert at.code[0].value.startswith("diagnose --run spike")
    assert not any("newer" in button.label for button in at.button)


def test_a_nan_run_says_so_and_shows_how_many(new_run: Callable[..., Any]) -> None:
    made = new_run("nan", age_s=3600)
    made.steps(0, 399, dict.fromkeys(range(300, 400), math.nan))
    made.event("exception", "RuntimeError: <script>alert(1)</script>", step=399)
    at = open_page(run="nan")
    said = words(at)
    assert "failed" in said
    assert "RH103" in said
    assert "loss 100" in said
    assert "<script>" not in said
    assert "&lt;script&gt;" in said


def test_a_live_run_grows_between_two_looks(new_run: Callable[..., Any]) -> None:
    made = new_run("live")
    made.steps(0, 199)
    at = open_page(run="live")
    assert "running" in words(at)
    assert "step <b>199</b>" in words(at)
    made.steps(200, 299)
    assert "step <b>299</b>" in words(run(at))


def test_new_steps_do_not_move_a_frozen_window(new_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []
    read = live._curves

    def spy(*args: Any) -> Any:
        snapshot = read(*args)
        spans.append((snapshot.span.lo, snapshot.span.hi))
        return snapshot

    monkeypatch.setattr(live, "_curves", spy)
    monkeypatch.setattr(live, "DUTY", 0.0)
    made = new_run("frozen")
    made.steps(0, 199)
    at = open_page(run="frozen", **{"from": "50", "to": "150"})
    assert spans[-1] == (50, 150)
    made.steps(200, 299)
    run(at)
    assert spans[-1] == (50, 150)
    (follow,) = [button for button in at.button if "newer steps" in button.label]
    assert follow.label == "+149 newer steps: follow"
    follow.click()
    run(at)
    assert spans[-1] == (0, 299)
    assert "from" not in at.query_params
    at.number_input(key="from").set_value(100)
    run(at)
    assert spans[-1] == (100, 299)


def test_attempts_can_be_chosen_and_a_new_one_appears(new_run: Callable[..., Any]) -> None:
    made = new_run("tree")
    made.steps(0, 99)
    at = open_page(run="tree")
    assert at.selectbox(key="attempt").options == ["all", "0"]
    made.new_attempt()
    made.steps(60, 149)
    run(at)
    assert at.selectbox(key="attempt").options == ["all", "1", "0"]
    at.selectbox(key="attempt").select("0")
    assert at.selectbox(key="attempt").value == "0"
    assert open_page(run="tree", attempt="1").selectbox(key="attempt").value == "1"
    assert open_page(run="tree", attempt="7").selectbox(key="attempt").value == "all"


def test_a_stale_run_says_since_when(new_run: Callable[..., Any]) -> None:
    new_run("stuck", age_s=600).steps(0, 99)
    said = words(open_page(run="stuck"))
    assert "stale" in said
    assert "10 min" in said


def test_one_rank_has_nothing_to_compare(new_run: Callable[..., Any]) -> None:
    new_run("alone", ranks=1).steps(0, 99)
    at = open_page(run="alone")
    assert "nothing to compare" in words(at)
    assert len(at.get("echarts_chart")) == 1


def test_the_heat_map_shows_what_the_link_says(new_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = live.queries.heat

    def spy(source: Any, metric: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(metric)
        return read(source, metric, *args, **kwargs)

    monkeypatch.setattr(live.queries, "heat", spy)
    new_run("ranks").steps(0, 99)
    at = open_page(run="ranks", heat="wait")
    assert asked == ["t_wait_s"]
    at.radio(key="heat").set_value("loss")
    run(at)
    assert asked == ["t_wait_s", "loss"]
    assert open_page(run="ranks", heat="nonsense").radio(key="heat").value == "t_step_s"


def test_a_window_without_data_says_so(new_run: Callable[..., Any]) -> None:
    new_run("short").steps(0, 99)
    at = open_page(run="short", **{"from": "5000", "to": "6000"})
    assert "Nothing is recorded between steps 5,000 and 6,000" in at.info[0].value


def test_the_page_writes_nothing_into_the_store(new_run: Callable[..., Any], store_root: str) -> None:
    made = new_run("kept")
    made.steps(0, 199)
    made.publish()
    made.close()

    def contents() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(Path(store_root).rglob("*")) if p.is_file()}

    before = contents()
    open_page(run="kept")
    assert contents() == before


def test_the_script_that_streamlit_runs_shows_the_page(new_run: Callable[..., Any]) -> None:
    new_run("served").steps(0, 99)
    at = AppTest.from_file(APP, default_timeout=WAIT_S)
    assert "step <b>99</b>" in words(run(at))
