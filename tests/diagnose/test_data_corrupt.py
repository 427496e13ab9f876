"""Bad data are news by themselves, whatever the loss does; and the way back leads to before the first of them."""

import dataclasses

import pytest

from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.rollback import build_plan
from runhealth.diagnose.service import diagnose, verdict_hash
from runhealth.storage.records import BatchRecord, StepRecord

FIRST, SHARD = 300, "0007"
STATISTICS = {
    "repeat": {"token_entropy": 3.0, "token_unique_share": 0.04, "token_repeat_share": 0.95},
    "zeros": {"token_entropy": 0.0, "token_unique_share": 0.001, "token_repeat_share": 1.0},
    "noise": {"token_entropy": 7.95, "token_unique_share": 0.99, "token_repeat_share": 0.004},
    "none": {},
}
LOSS = {"repeat": -1.0, "zeros": -1.5, "noise": 3.0, "none": 0.0}
HEADLINES = {"repeat": {"data_corrupt"}, "zeros": {"data_corrupt"}, "noise": {"loss_spike"}, "none": {"data_corrupt"}}


def corrupted(records, mode, *, steps=47, hashes=True, loss=None, first=FIRST):
    """The same run with a bad visit of a shard on rank 1."""
    out = []
    for record in records:
        if first <= record.step < first + steps and record.rank == 1:
            if isinstance(record, BatchRecord):
                values = {**record.values, **STATISTICS[mode]}
                wrong = 1 if hashes else record.shard_hash
                record = dataclasses.replace(record, shard=SHARD, shard_hash=wrong, values=values)
            elif isinstance(record, StepRecord):
                moved = record.values["loss"] + (LOSS[mode] if loss is None else loss)
                record = dataclasses.replace(record, values={**record.values, "loss": moved})
        out.append(record)
    return out


@pytest.mark.parametrize("seed", [200, 201, 202])
@pytest.mark.parametrize(("mode", "hashes"), [*((m, True) for m in STATISTICS), ("repeat", False), ("zeros", False)])
def test_a_bad_visit_is_one_finding_with_a_way_back(records_of, list_source, mode, hashes, seed):
    source = list_source(corrupted(records_of(seed=seed, checkpoint_every=20), mode, hashes=hashes))
    report = diagnose(source)
    (finding,) = report.findings
    assert finding.kind in HEADLINES[mode]
    assert finding.severity is not Severity.INFO
    assert (finding.verdict, finding.onset_step, finding.ranks) == ("bad_shard", FIRST, (1,))
    assert finding.details["shard"] == SHARD
    plan = build_plan(report, finding.id, source)
    assert plan.checkpoint_step == 280
    assert {s.shard for s in plan.skip} == {SHARD}


@pytest.mark.parametrize("steps", [1, 3, 10, 47])
def test_a_wrong_hash_needs_no_length(records_of, list_source, steps):
    report = diagnose(list_source(corrupted(records_of(seed=203), "none", steps=steps)))
    assert [(f.kind, f.verdict, f.severity) for f in report.findings] == [
        ("data_corrupt", "bad_shard", Severity.WARNING)
    ]
    assert report.findings[0].end_step == FIRST + steps - 1
    assert report.findings[0].remedy.action == "rollback_and_skip"


def test_bad_data_still_being_read_are_an_error(records_of, list_source):
    report = diagnose(list_source(corrupted(records_of(seed=204), "repeat", steps=500)))
    assert [(f.kind, f.severity, f.outcome) for f in report.findings] == [("data_corrupt", "error", "ongoing")]


@pytest.mark.parametrize("first", [300, 303, 311, 317])
@pytest.mark.parametrize("loss", [-1.0, -0.6, 0.0, 0.6, 2.0])
def test_the_checkpoint_lies_before_all_bad_data(records_of, list_source, first, loss):
    source = list_source(corrupted(records_of(seed=205, checkpoint_every=5), "repeat", first=first, loss=loss))
    report = diagnose(source)
    plans = [p for f in report.findings if (p := f.remedy.plan or f.offered)]
    assert plans
    assert all(first - 10 <= p.checkpoint_step <= first - 5 for p in plans)


@pytest.mark.parametrize("seed", [206, 207])
def test_benign_twins_stay_quiet(records_of, list_source, seed):
    records = records_of(seed=seed)
    other_language = {"token_entropy": 4.0, "token_unique_share": 0.5}
    unlike = [
        dataclasses.replace(r, shard=SHARD, values={**r.values, **other_language})
        if isinstance(r, BatchRecord) and r.rank == 1 and FIRST <= r.step < FIRST + 47
        else r
        for r in records
    ]
    assert diagnose(list_source(unlike)).findings == ()
    one_batch = corrupted(records, "zeros", steps=3, hashes=False, loss=0.0)
    assert diagnose(list_source(one_batch)).findings == ()
    no_manifest = [
        dataclasses.replace(r, shard_hash=r.step % 7, manifest_hash=None) if isinstance(r, BatchRecord) else r
        for r in records
    ]
    assert diagnose(list_source(no_manifest)).findings == ()


def test_a_manifest_that_is_wrong_altogether_is_one_finding(records_of, list_source):
    stale = [dataclasses.replace(r, shard_hash=9) if isinstance(r, BatchRecord) else r for r in records_of(seed=208)]
    (finding,) = diagnose(list_source(stale)).findings
    assert finding.kind == "data_corrupt"
    assert len(finding.details["shards"]) > 8


def test_damage_that_goes_on_in_the_next_shard_is_one_finding(records_of, list_source):
    """Of both shards the bad samples are skipped; a bad visit much later is news of its own."""
    both = [
        dataclasses.replace(r, shard="0008") if isinstance(r, BatchRecord) and r.shard == SHARD and r.step >= 320 else r
        for r in corrupted(records_of(seed=211), "repeat")
    ]
    source = list_source(both)
    report = diagnose(source)
    (finding,) = report.findings
    assert finding.end_step == FIRST + 46
    assert {s.shard for s in build_plan(report, None, source).skip} == {SHARD, "0008"}
    later = diagnose(list_source(corrupted(both, "none", first=405, steps=5)))
    assert sorted(f.onset_step for f in later.findings) == [FIRST, 405]


def test_bad_data_that_are_not_the_cause_are_told_beside_it(records_of, list_source):
    records = corrupted(records_of(cause="lr_change", seed=209), "none", first=330, steps=10)
    told = {f.kind: f for f in diagnose(list_source(records)).findings}
    assert told["loss_spike"].verdict == "lr_change"
    assert told["data_corrupt"].details["shard"] == SHARD


@pytest.mark.parametrize("mode", ["repeat", "noise"])
def test_live_in_chunks_and_whole_agree(records_of, list_source, mode):
    records = corrupted(records_of(seed=210), mode)
    source = list_source(records)
    engine = Engine()
    for index, record in enumerate(records):
        engine.feed(record)
        if index % 700 == 699:
            state = engine.state_dict()
            engine = Engine()
            engine.load_state_dict(state)
    engine.finish()
    assert verdict_hash(engine.report(source.describe())) == verdict_hash(diagnose(source))
