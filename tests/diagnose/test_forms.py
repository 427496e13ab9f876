"""HTML, SARIF and JUnit: what each format demands, and that nothing out of a log gets in as anything but text."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from runhealth.diagnose.codes import CODES
from runhealth.diagnose.explain import KIND_SIGNALS, checked_kinds
from runhealth.diagnose.report import html, junit, sarif, words
from runhealth.diagnose.report.svg import Band, chart
from runhealth.diagnose.service import diagnose
from runhealth.storage.records import Rejected, StepRecord
from runhealth.storage.signals import lookup

EVIL = "x<script>alert(1)</script>\"'&amp;\x1b[2J\x00\u202e]]>"
VOID = {"meta", "br", "link", "img"}


@pytest.fixture(scope="module")
def spiked(source_of):
    return diagnose(source_of(cause="bad_shard", seed=160))


@pytest.fixture(scope="module")
def evil(spiked):
    """Every text that comes out of a log or a plug-in is hostile."""
    findings = tuple(
        replace(
            f,
            summary=EVIL,
            suspects=tuple(
                replace(s, evidence=tuple(replace(e, claim=EVIL, query=EVIL) for e in s.evidence)) for s in f.suspects
            ),
        )
        for f in spiked.findings
    )
    source = replace(
        spiked.source, name=EVIL, source=EVIL, notes=(EVIL,), rejected=(Rejected(line=7, why=EVIL),), rows_rejected=1
    )
    return replace(spiked, findings=findings, source=source)


class Page(HTMLParser):
    """Checks the nesting of a page, and collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def test_html_is_one_file_that_fetches_nothing(spiked):
    shown = html.render([spiked])
    page = Page(shown)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in shown
    assert "@import" not in shown
    assert "prefers-color-scheme: dark" in shown
    assert ("http-equiv", "Content-Security-Policy") in page.attributes
    for said in ("non-recovering loss spike", "bad shard", "shard 0007", "diagnose rollback plan --run made"):
        assert said in page.text


def test_html_draws_every_curve_with_its_incidents(spiked):
    page = html.render([spiked])
    assert page.count("<svg") >= len([name for name in html.CURVES if spiked.curves.get(name)]) + 2
    assert 'class="band error"' in page
    assert "onset 300" in page


def test_what_a_later_attempt_healed_is_not_marked_over_its_steps(spiked):
    onset = spiked.findings[0].onset_step
    bare = replace(spiked, findings=tuple(replace(f, details={}) for f in spiked.findings))  # no zooms
    first = replace(bare.attempts[0], last_step=onset + 20)
    later = replace(first, attempt=first.attempt + 1, first_step=onset - 10, last_step=bare.last_step)
    widths = []
    for attempts in (bare.attempts, (first, later)):
        page = html.render([replace(bare, attempts=attempts)])
        widths.append(max(float(w) for w in re.findall(r'class="band error" [^>]*?width="([0-9.]+)"', page)))
    assert widths[1] < widths[0] / 2


def test_html_of_several_sources_holds_all(spiked, source_of):
    clean = diagnose(source_of(seed=161))
    page = Page(html.render([spiked, clean]))
    assert page.tags.count("main") == 2
    assert "Nothing at warning or above" in page.text


@pytest.mark.parametrize("form", [html, sarif, junit])
def test_hostile_text_stays_text(evil, form):
    shown = form.render([evil])
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", shown)
    if form is html:
        page = Page(shown)
        assert "script" not in page.tags
        assert "x<script>alert(1)</script>\"'&amp;" in page.text
    elif form is junit:
        messages = [f.get("message") for f in ET.fromstring(shown).iter("failure")]
        assert any("x<script>alert(1)</script>\"'&amp;" in message for message in messages)
    else:
        assert "x<script>" in json.loads(shown)["runs"][0]["results"][0]["message"]["text"]


def test_a_chart_breaks_at_nan_and_keeps_a_spike_of_one_step():
    points = [(s, 1.0) for s in range(100)]
    points[40], points[70] = (40, float("nan")), (70, 9.0)
    drawn = chart("loss", points, (0, 99), [Band(first=40, last=40, look="error", label="here")])
    assert drawn.count("<polyline") == 2
    assert drawn.count('class="nan"') == 1
    assert "NaN or Inf at step 40" in drawn
    assert float(re.search(r'class="band error"[^>]* width="([\d.]+)"', drawn)[1]) >= 3
    top = min(float(y) for y in re.findall(r",([\d.]+)", " ".join(re.findall(r'points="([^"]+)"', drawn))))
    assert top < 20  # the spike reaches the upper edge


@pytest.mark.parametrize(
    "values", [[None], [float("inf")] * 3, [2.0], [2.0, 2.0], [0.0, 0.0], [1e-30, 1e30], [-5.0, 5.0]]
)
def test_a_chart_of_odd_values_is_drawn(values):
    drawn = chart("x", list(enumerate(values)), (0, max(0, len(values) - 1)), [])
    ET.fromstring(drawn)
    assert "nan" not in re.sub(r'class="nan"|NaN or Inf', "", drawn)


def test_sarif_holds_what_the_format_requires(spiked):
    body = json.loads(sarif.render([spiked]), parse_constant=lambda name: pytest.fail(f"met {name}"))
    assert body["version"] == "2.1.0"
    assert body["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = body["runs"]
    driver = run["tool"]["driver"]
    rules = driver["rules"]
    assert driver["name"] == "diagnose"
    assert len({rule["id"] for rule in rules}) == len(rules) == len(CODES)
    for rule in rules:
        assert rule["help"]["text"]
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    assert len(run["results"]) == len(spiked.findings)
    for result, finding in zip(run["results"], spiked.findings, strict=True):
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == finding.code
        assert result["level"] in ("note", "warning", "error")
        assert result["message"]["text"]
        assert result["partialFingerprints"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "made"
    assert run["results"][0]["level"] == "error"
    assert run["results"][0]["properties"]["verdict"] == "bad_shard"


def test_sarif_names_file_and_line_of_what_could_not_be_read(evil):
    (run,) = json.loads(sarif.render([evil]))["runs"]
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert told["locations"][0]["physicalLocation"]["region"] == {"startLine": 7}


@pytest.mark.parametrize("source", ["logs/a b#1.log", "/abs/ä.log", "s3://bucket/key.log", "c%20.log", EVIL])
def test_sarif_uris_are_uris(source):
    made = sarif.uri(source)
    assert re.fullmatch(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]*", made)
    assert "#" not in made or "://" in source
    if "://" not in source:
        assert unquote(urlsplit(made).path) == source


def test_junit_has_a_case_for_each_kind(spiked):
    suites = ET.fromstring(junit.render([spiked]))
    (suite,) = suites
    cases = suite.findall("testcase")
    assert [case.get("name").split()[1] for case in cases][: len(checked_kinds())] == list(checked_kinds())
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {f"{f.code} {f.kind}" for f in words.loud(spiked)}
    assert int(suite.get("tests")) == len(cases)
    assert int(suite.get("failures")) == int(suites.get("failures")) == len(failed) > 0
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    assert int(suite.get("skipped")) == len(skipped)
    assert "RH106 loss_scale_collapse" in skipped


def test_junit_of_a_clean_run_has_no_failure(source_of, list_source):
    suites = ET.fromstring(junit.render([diagnose(source_of(seed=162)), diagnose(source_of(seed=163))]))
    assert suites.get("failures") == "0"
    assert len(suites) == 2
    bare = [StepRecord(attempt=0, step=s, rank=0, values={"loss": 5.0 - 0.01 * s}) for s in range(150)]
    (suite,) = ET.fromstring(junit.render([diagnose(list_source(bare))]))
    names = {case.get("name") for case in suite if case.find("skipped") is not None}
    assert "RH105 clip_breach" in names
    assert "RH101 loss_spike" not in names


def test_kinds_are_judged_by_signals_that_exist():
    assert set(KIND_SIGNALS) <= set(CODES)
    for groups in KIND_SIGNALS.values():
        for group in groups:
            assert group
            assert all(lookup(signal) is not None for signal in group)
