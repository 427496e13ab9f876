"""Which checkpoint, which samples, at what cost; and when there is no plan."""

import pytest

from runhealth.diagnose.batches import BatchOutlier, Deviation
from runhealth.diagnose.lastgood import choose
from runhealth.diagnose.plans import RollbackPlan
from runhealth.diagnose.rollback import build_plan, extent, merge_ranges
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import PlanError
from runhealth.storage.records import BatchRecord, CheckpointRecord, CheckpointStatus, EventKind, RunEvent

S = CheckpointStatus


def checkpoint(step, status=S.VERIFIED, attempt=0, ts_ns=0, reason=""):
    return CheckpointRecord(
        attempt=attempt,
        step=step,
        rank=0,
        path=f"checkpoints/step-{step:08d}",
        status=status,
        ts_ns=ts_ns,
        reason=reason,
    )


def saved(*steps, attempt=0):
    return [checkpoint(s, status, attempt, ts) for s in steps for ts, status in enumerate((S.SAVED, S.VERIFIED))]


def pick(records, onset=300, attempt=0, firsts=None, vain=()):
    return choose(records, attempt=attempt, onset_step=onset, attempt_first_steps=firsts or {0: 0}, used_in_vain=vain)


def test_the_newest_five_steps_before_the_onset():
    good = pick(saved(200, 250, 295, 296, 300, 350))
    assert good.step == 295
    assert [(r.step, r.why) for r in good.rejected] == [
        (350, "saved after the onset"),
        (300, "within 5 steps of the onset"),
        (296, "within 5 steps of the onset"),
    ]


def test_unverified_and_failed_ones_are_rejected_with_their_reason():
    records = [
        *saved(100),
        checkpoint(200, S.SAVED),
        *saved(250),
        checkpoint(250, S.FAILED, ts_ns=9, reason="bad hash"),
    ]
    good = pick(records)
    assert good.step == 100
    assert [r.why for r in good.rejected] == ["failed verification: bad hash", "not verified"]


def test_a_checkpoint_that_was_verified_again_after_a_failure_is_good():
    records = [checkpoint(200, S.FAILED, ts_ns=1), checkpoint(200, S.VERIFIED, ts_ns=2)]
    assert pick(records).step == 200


def test_the_branch_that_was_given_up_is_not_gone_back_to():
    records = [*saved(100, 200, 280), *saved(150, attempt=1)]
    good = pick(records, attempt=1, firsts={0: 0, 1: 100})
    assert good.step == 150
    assert {r.why for r in good.rejected} == {"belongs to attempt 0, which was given up at step 100"}
    assert pick(saved(100, 200), attempt=1, firsts={0: 0, 1: 200}).step == 200  # the fork itself is on the branch


def test_a_checkpoint_used_in_vain_is_not_used_again():
    good = pick(saved(100, 200), vain={200})
    assert (good.step, good.rejected[0].why) == (100, "a rollback to it has already failed for this incident")


def test_no_checkpoint_says_why():
    with pytest.raises(PlanError, match="no checkpoint was recorded"):
        pick([])
    with pytest.raises(PlanError, match=r"none of 2 checkpoints qualifies.*310: saved after the onset"):
        pick([*saved(310), checkpoint(200, S.SAVED)])


def outlier(step, z=9.0, hash_mismatch=False, shard="7"):
    batch = BatchRecord(attempt=0, step=step, rank=0, shard=shard, first_sample=10 * step, last_sample=10 * step + 9)
    deviation = Deviation(signal="token_entropy", value=1.0, baseline=4.0, z=z)
    return BatchOutlier(batch=batch, deviations=(deviation,), hash_mismatch=hash_mismatch)


def steps(outliers):
    return [o.batch.step for o in outliers]


def test_extent_joins_gaps_of_up_to_four_steps():
    assert steps(extent([outlier(300), outlier(305), outlier(310, z=4.5)], 300)) == [300, 305, 310]
    assert steps(extent([outlier(290), outlier(300), outlier(301)], 300)) == [300, 301]
    assert steps(extent([outlier(300, z=4.5)], 300)) == []
    assert steps(extent([outlier(20, hash_mismatch=True), outlier(300, hash_mismatch=True)], 300)) == [20, 300]


def test_ranges_are_merged():
    assert merge_ranges([(10, 19), (0, 9), (30, 31), (15, 22)]) == [(0, 22), (30, 31)]


def test_the_plan_skips_the_measured_samples_only(source_of):
    source = source_of(cause="bad_shard", seed=130)
    plan = build_plan(diagnose(source), None, source)
    assert (plan.cause, plan.checkpoint_step, plan.onset_step) == ("bad_shard", 250, 300)
    assert {s.shard for s in plan.skip} == {"0007"}
    covered = {n for s in plan.skip for n in range(s.first_sample, s.last_sample + 1)}
    bad = {n for step in range(300, 330) for n in range(16 * (step % 31), 16 * (step % 31) + 16)}
    assert covered == bad
    assert plan.cost.samples_skipped == len(bad)
    assert plan.cost.steps == 420 - 250
    assert plan.cost.tokens == plan.cost.steps * 2048
    assert plan.cost.seconds == pytest.approx(0.1 * plan.cost.steps, rel=0.1)
    assert plan.repairs == ()
    assert RollbackPlan.loads(plan.dumps()) == plan


@pytest.mark.parametrize(
    ("cause", "repairs"),
    [
        ("fp_overflow", {"fresh_amax", "higher_precision"}),
        ("clip_breach", {"lower_clip_threshold"}),
        ("lr_change", {"restore_lr_schedule"}),
    ],
)
def test_other_causes_are_repaired_and_nothing_is_skipped(source_of, cause, repairs):
    source = source_of(cause=cause, seed=131)
    plan = build_plan(diagnose(source), None, source)
    assert {r.kind for r in plan.repairs} == repairs
    assert plan.skip == ()
    targets = [r.target for r in plan.repairs if r.kind == "higher_precision"]
    assert targets == (["blocks.1.mlp"] if cause == "fp_overflow" else [])
    values = [r.value for r in plan.repairs if r.kind == "lower_clip_threshold"]
    assert values == ([0.5] if cause == "clip_breach" else [])


def test_what_recovered_needs_no_plan(source_of):
    source = source_of(cause="lr_change", seed=132, recovers=True)
    report = diagnose(source)
    assert report.findings[0].remedy.action == "continue"
    with pytest.raises(PlanError, match="came back by itself"):
        build_plan(report, None, source)


def test_a_clean_run_and_an_unknown_incident_have_no_plan(source_of):
    clean = source_of(seed=133)
    with pytest.raises(PlanError, match="nothing was found"):
        build_plan(diagnose(clean), None, clean)
    spiked = source_of(cause="bad_shard", seed=133)
    with pytest.raises(PlanError, match=r"no incident 'a9-s9'.*a0-s300"):
        build_plan(diagnose(spiked), "a9-s9", spiked)


def test_without_checkpoints_the_reason_is_told(records_of, list_source):
    records = [r for r in records_of(cause="bad_shard", seed=134) if not isinstance(r, CheckpointRecord)]
    source = list_source(records)
    with pytest.raises(PlanError, match="no plan for a0-s300"):
        build_plan(diagnose(source), None, source)
    late = [r for r in records_of(cause="bad_shard", seed=134) if not isinstance(r, CheckpointRecord) or r.step > 300]
    source = list_source(late)
    with pytest.raises(PlanError, match="saved after the onset"):
        build_plan(diagnose(source), None, source)


def test_a_rollback_that_did_not_help_is_not_repeated(records_of, list_source):
    first = records_of(cause="bad_shard", seed=135)
    second = records_of(cause="bad_shard", seed=135, attempt=1, first_step=250)
    event = RunEvent(
        attempt=1,
        step=250,
        rank=-1,
        kind=EventKind.ROLLBACK,
        data={"incident": "a0-s300", "onset_step": 300, "checkpoint_step": 250},
    )
    source = list_source([*first, event, *second])
    report = diagnose(source)
    again = next(f for f in report.findings if f.attempt == 1 and f.suspects)
    plan = build_plan(report, again.id, source)
    assert plan.checkpoint_step == 200
    assert "already failed" in next(r.why for r in plan.rejected if r.step == 250)
