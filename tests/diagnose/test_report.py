"""The forms of the report: contract, one screen, safe text."""

import io
import json
from dataclasses import replace
from importlib import resources

import jsonschema
import pytest

from runhealth.diagnose.codes import CODES
from runhealth.diagnose.explain import EXPLANATIONS, explain
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.report import json as json_report
from runhealth.diagnose.report import markdown, text, words
from runhealth.diagnose.report.plain import GLUE, Style, cells, readable, safe
from runhealth.diagnose.service import diagnose
from runhealth.storage.records import StepRecord

SCHEMA = json.loads(resources.files("runhealth.diagnose.report").joinpath("schema.json").read_text())
CAUSES = (None, "bad_shard", "fp_overflow", "lr_change", "benign")
PLAIN = Style(colour=False, unicode=True)


@pytest.mark.parametrize("cause", CAUSES)
def test_json_follows_the_schema(source_of, cause):
    report = json.loads(json_report.render(diagnose(source_of(cause=cause, seed=140))))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(report, SCHEMA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.update(schema_version=2),
        lambda r: r.update(extra=1),
        lambda r: r["run"].pop("attempts"),
        lambda r: r["findings"][0].update(severity="fatal"),
        lambda r: r["findings"][0].update(kind="spike"),
        lambda r: r["findings"][0].update(onset_step="300"),
        lambda r: r["findings"][0].pop("summary"),
        lambda r: r["findings"][0]["suspects"][0].update(probability=1.5),
        lambda r: r["findings"][0]["suspects"][0]["for"][0].pop("weight_nats"),
        lambda r: r["findings"][0]["remedy"]["plan"].pop("checkpoint_step"),
    ],
)
def test_the_schema_is_strict_enough_to_fail(source_of, damage):
    report = json_report.report_json(diagnose(source_of(cause="bad_shard", seed=140)))
    jsonschema.validate(report, SCHEMA)
    damage(report)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, SCHEMA)


def test_json_holds_no_nan(list_source):
    rows = [StepRecord(attempt=0, step=s, rank=0, values={"loss": 2.0 if s < 90 else float("nan")}) for s in range(120)]
    rendered = json_report.render(diagnose(list_source(rows)))
    assert json.loads(rendered, parse_constant=lambda name: pytest.fail(f"met {name}"))["findings"]


def test_text_fits_a_screen_and_says_what_matters(source_of):
    shown = text.render(diagnose(source_of(cause="bad_shard", seed=141)), PLAIN)
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines) <= 140
    for said in (
        "RH101",
        "onset 300",
        "bad shard",
        "shard 0007",
        "on rank 1",
        "Against",
        "Next",
        "diagnose rollback plan --run made",
        "checkpoint 250",
    ):
        assert said in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("width", [40, 60, 80, 100, 118])
@pytest.mark.parametrize("cause", CAUSES)
def test_no_line_is_wider_than_the_terminal(source_of, width, cause):
    report = diagnose(source_of(cause=cause, seed=141))
    for style in (Style(width=width), Style(width=width, unicode=False)):
        shown = text.render(report, style, now_ns=report.last_ts_ns + 10**9)
        assert max(cells(line) for line in shown.splitlines()) <= width
        if width >= 80:
            assert len(shown.splitlines()) <= 32
            plan = "diagnose rollback plan --run made"
            assert plan not in shown.replace("\n", " ") or plan in shown  # a command is never broken


def test_a_long_or_wide_name_fits_too(list_source, records_of):
    for name in ("x" * 300, "模型" * 80, "a b " * 60):
        report = diagnose(list_source(records_of(cause="bad_shard", seed=141), name=name))
        shown = text.render(report, Style(width=80))
        assert max(cells(line) for line in shown.splitlines()) <= 80


def test_minor_findings_fold_beside_a_loud_one_and_show_alone(source_of):
    loud = diagnose(source_of(cause="bad_shard", seed=141))
    minor = tuple(
        replace(loud.findings[0], severity=Severity.INFO, kind=kind, id=kind, suspects=(), count=count)
        for kind, count in (("slow_step", 795), ("restart", 1))
    )
    both = text.render(replace(loud, findings=(loud.findings[0], *minor)), PLAIN)
    assert "and 2 minor notes: slow step (795 times), restart; all of them: diagnose --run made --format json" in both
    alone = text.render(replace(loud, findings=minor), PLAIN)
    assert "nothing at warning or above" in alone
    assert "minor note" not in alone
    assert sum("slow step" in line for line in alone.splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("amax was 3.4e+02 x the one", "amax was 340 x the one"),
        ("ratio 1.938245 against 1.42108", "ratio 1.938 against 1.421"),
        ("steps take 0.0835 s since", "steps take 83.5 ms since"),
        ("took 0.00004 s", "took 40 us"),
        ("took 12.34567 s", "took 12.35 s"),
        ("+1.03e+10 nats", "+1.03e10 nats"),
        ("lr 3e-05 at step 4,128", "lr 3e-5 at step 4,128"),
        ("blocks.0.qkv v1.2345.6 10.0.0.1 a/1.23456 x1.23456", "blocks.0.qkv v1.2345.6 10.0.0.1 a/1.23456 x1.23456"),
        ("65536 and 12345.678", "65536 and 12,346"),
    ],
)
def test_numbers_are_readable(said, shown):
    assert readable(said).replace(GLUE, " ") == shown


def test_columns_set_the_width(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Style.of(stream).width == 118
    for said, width in (("80", 80), ("10", 40), ("500", 118), ("x", 118)):
        monkeypatch.setenv("COLUMNS", said)
        assert Style.of(stream).width == width


def test_what_a_finding_of_each_kind_is_called():
    assert set(words.NAMES) <= set(CODES)
    names = [words.kind_name(kind) for kind in CODES]
    assert len(set(names)) == len(names)
    assert not any("_" in name for name in names)


def test_a_clean_run_says_so(source_of):
    assert "nothing at warning or above" in text.render(diagnose(source_of(seed=142)), PLAIN)


def test_a_stream_without_unicode_gets_text_twins(source_of):
    shown = text.render(diagnose(source_of(cause="bad_shard", seed=141)), Style(colour=False, unicode=False))
    assert shown.isascii()
    assert "ERROR RH101" in shown


def test_markdown_is_at_most_forty_lines(source_of):
    for cause in CAUSES:
        assert len(markdown.render(diagnose(source_of(cause=cause, seed=140))).splitlines()) <= 40


@pytest.mark.parametrize(
    ("environment", "colour"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True),
    ],
)
def test_colour_follows_the_environment(monkeypatch, environment, colour):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Style.of(io.TextIOWrapper(io.BytesIO(), "utf-8")).colour is colour


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_a_terminal_has_colour_unless_it_is_dumb(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(Terminal(io.BytesIO(), "utf-8")) == Style(colour=True, unicode=True)
    assert not Style.of(Terminal(io.BytesIO(), "ascii")).unicode
    monkeypatch.setenv("TERM", "dumb")
    assert Style.of(Terminal(io.BytesIO(), "utf-8")) == Style(colour=False, unicode=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of(Terminal(io.BytesIO(), "utf-8")).colour


def test_a_sparkline_loses_no_spike_and_no_nan():
    values = [1.0] * 500
    values[77] = 9.0
    values[300] = float("nan")
    bar = PLAIN.bar(values)
    assert bar.count("█") == 1
    assert bar.count("!") == 1
    assert Style(unicode=False).bar(values).isascii()
    assert PLAIN.bar([]) == ""
    assert PLAIN.bar([None, None]) == "!!"


def test_untrusted_text_cannot_drive_a_terminal(list_source, records_of):
    evil = "x\x1b[2J\x1b]0;owned\x07\u202e\u2028y\r\n"
    assert not any(c in safe(evil) for c in "\x1b\x07\u202e\u2028\r\n")
    assert safe("grün 模型") == "grün 模型"
    report = diagnose(list_source(records_of(cause="bad_shard", seed=141), name=evil))
    for shown in (text.render(report, PLAIN), markdown.render(report)):
        assert not any(c in shown for c in "\x1b\x07\u202e\u2028\r")


def test_every_code_is_explained():
    assert set(EXPLANATIONS) == set(CODES)
    for kind, code in CODES.items():
        assert explain(code.lower()) == explain(kind)
        assert code in explain(kind)
    assert explain("RH999") is None


def test_severities_are_ordered():
    assert [s.level for s in (Severity.INFO, Severity.WARNING, Severity.ERROR)] == [0, 1, 2]
