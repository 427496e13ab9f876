"""Outcome, severity, remedy and plan of a finding say the same thing; and nothing is over while its cause lasts."""

import dataclasses

import pytest

from runhealth.diagnose.findings import Outcome, Severity
from runhealth.diagnose.report.words import next_step
from runhealth.diagnose.rollback import NOT_NEEDED, build_plan
from runhealth.diagnose.rollback_cli import describe
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import PlanError
from runhealth.storage.records import BatchRecord, StepRecord

CAUSES = ("bad_shard", "fp_overflow", "clip_breach", "lr_change", "optimizer_state", "benign", None)


def mapped(records, change):
    """Each step record's values through `change(step, values)`."""
    return [
        dataclasses.replace(r, values=change(r.step, dict(r.values))) if isinstance(r, StepRecord) else r
        for r in records
    ]


def scaled(records, scale_at, skipped_at=lambda _step: False):
    def change(step, values):
        if "grad_norm" in values:
            values |= {"loss_scale": float(scale_at(step)), "step_skipped": int(skipped_at(step))}
        return values

    return mapped(records, change)


def assert_consistent(report):
    for f in report.findings:
        if not f.suspects:
            continue
        over = f.outcome is Outcome.TRANSIENT or (f.outcome is Outcome.RECOVERING and f.end_step is not None)
        said = next_step(f, report)
        where = (f.kind, f.outcome, f.end_step, f.severity, f.remedy.action, f.verdict)
        assert (f.remedy.action == "continue") == over, where
        assert (f.remedy.action == "continue") == said.sentence.startswith("Continue"), where
        if over:
            assert f.severity is not Severity.ERROR, where
            assert f.remedy.plan is None, where
        if f.outcome is Outcome.NON_RECOVERING:
            assert f.severity is Severity.ERROR, where
        if f.outcome is Outcome.TRANSIENT and f.kind.startswith("loss_"):
            assert f.severity is Severity.INFO, where
        if f.severity is Severity.ERROR:
            assert f.remedy.plan is not None or f.details.get("no_plan"), where
        if f.remedy.plan is not None:
            assert f.remedy.action in ("rollback_and_skip", "rollback_and_repair", "repair", "investigate"), where
            assert f.offered is None
            assert said.command
        plan = f.remedy.plan or f.offered
        if plan is not None:
            assert plan.checkpoint_step <= f.onset_step - 5, where
        if f.details.get("cause_lasts"):
            assert not over, where


@pytest.mark.parametrize("recovers", [False, True])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_report_does_not_contradict_itself(records_of, list_source, cause, recovers):
    for seed in (220, 221):
        records = records_of(cause=cause, seed=seed, recovers=recovers, checkpoint_every=20)
        for end in (302, 306, 320, 350, 420):
            assert_consistent(diagnose(list_source([r for r in records if r.step < end])))


@pytest.mark.parametrize("height", [0.2, 0.6, 1.5])
@pytest.mark.parametrize("length", [1, 6, 25, 80, 500])
def test_nor_does_it_without_a_cause(records_of, list_source, height, length):
    def change(step, values):
        return {**values, "loss": values["loss"] + (height if 300 <= step < 300 + length else 0.0)}

    for batches in (True, False):
        records = [r for r in records_of(seed=222) if batches or not isinstance(r, BatchRecord)]
        assert_consistent(diagnose(list_source(mapped(records, change))))


def test_a_learning_rate_still_off_is_not_over(records_of, list_source):
    """The loss comes back under it, or touches its old level; the twin has its rate restored."""
    for seed in (223, 224, 225):
        twin = records_of(cause="lr_change", seed=seed, recovers=True)
        rates = {
            r.step: r.values["lr"] for r in records_of(cause="lr_change", seed=seed) if "lr" in getattr(r, "values", {})
        }

        def still(step, values, rates=rates):
            return {**values, "lr": rates[step]} if "lr" in values else values

        (over,) = diagnose(list_source(twin)).findings
        (lasting,) = diagnose(list_source(mapped(twin, still))).findings
        assert (over.outcome, over.remedy.action) == ("recovering", "continue")
        assert lasting.verdict == over.verdict == "lr_change"
        assert "learning rate is still off" in lasting.summary
        assert lasting.remedy.action == "rollback_and_repair"
        assert lasting.remedy.plan is not None
        assert lasting.end_step is None


@pytest.mark.parametrize("seed", [226, 227])
@pytest.mark.parametrize("touch", [(320, 322), (330, 333), (316, 320)])
def test_two_low_points_are_no_return(records_of, list_source, seed, touch):
    def raised(until):
        def change(step, values):
            low = touch[0] <= step < touch[1]
            return {**values, "loss": values["loss"] * (1.4 if 300 <= step < until and not low else 1.0)}

        return change

    records = records_of(seed=seed)
    never = diagnose(list_source(mapped(records, raised(10_000)))).findings
    assert [(f.outcome, f.severity) for f in never] == [("non_recovering", "error")]
    assert never[0].remedy.action != "continue"
    (twin,) = diagnose(list_source(mapped(records, raised(touch[0])))).findings
    assert twin.remedy.action == "continue"


@pytest.mark.parametrize("seed", [228, 229])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_collapsed_loss_scale_is_not_healed(records_of, list_source, seed, every):
    def fallen(step):
        return max(1.0, 65536.0 / 2 ** max(0, (step - 300) // every + 1)) if step >= 300 else 65536.0

    records = scaled(records_of(seed=seed, fp8=False), fallen, lambda step: step >= 300)
    report = diagnose(list_source(records))
    finding = next(f for f in report.findings if f.kind == "loss_scale_collapse")
    assert (finding.outcome, finding.severity) == ("non_recovering", "error")
    assert finding.remedy.action != "continue"
    assert finding.remedy.plan is not None
    claims = [e.claim for s in finding.suspects for e in s.evidence if s.suspect == "fp_overflow"]
    assert any("loss scale fell from 65536" in c for c in claims)
    assert not any("within the run's habit" in c for c in claims)
    assert_consistent(report)


def test_a_loss_scale_that_grows_again_is_over(records_of, list_source):
    def dip(step):
        return 65536.0 / 2 ** min(6, max(0, step - 299)) * 2 ** min(6, max(0, (step - 320) // 8))

    report = diagnose(list_source(scaled(records_of(seed=230, fp8=False), dip)))
    (finding,) = report.findings
    assert (finding.kind, finding.outcome, finding.severity) == ("loss_scale_collapse", "recovering", "warning")
    assert finding.remedy.action == "continue"
    steady = scaled(records_of(seed=230, fp8=False), lambda step: 65536.0 / (1 + (step == 300)))
    assert diagnose(list_source(steady)).findings == ()


def test_an_incident_that_came_back_can_be_planned_by_name(records_of, list_source):
    source = list_source(records_of(cause="bad_shard", seed=231, recovers=True))
    report = diagnose(source)
    finding = report.findings[0]
    assert finding.remedy.action == "continue"
    with pytest.raises(PlanError, match=f"--incident {finding.id}"):
        build_plan(report, None, source)
    plan = build_plan(report, finding.id, source)
    assert plan.checkpoint_step == 250
    assert NOT_NEEDED in describe(plan)
    benign = list_source(records_of(cause="benign", seed=231))
    report = diagnose(benign)
    with pytest.raises(PlanError, match="came back by itself"):
        build_plan(report, report.findings[0].id, benign)
