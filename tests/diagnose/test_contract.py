"""What every suspect and detector must do, over all that are registered."""

import dataclasses
import math

import pytest

from runhealth.diagnose.calibration import current
from runhealth.diagnose.case import Case
from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Alarm, Evidence, Incident, Severity, Status
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.judge import walk
from runhealth.diagnose.service import diagnose
from runhealth.diagnose.suspect import Needs, Suspect, load_suspects, validate
from runhealth.diagnose.tracked import CAUSAL_KINDS
from runhealth.storage.records import BatchRecord, EventKind, LayerSample, RunEvent, StepRecord

SEEDS = (110, 111)
SUSPECTS = {suspect.name: suspect for suspect in load_suspects()}
NAMES = (
    "loss",
    "grad_norm",
    "lr",
    "t_step_s",
    "loss_scale",
    "update_ratio",
    "overflow_count",
    "clip_threshold",
    "epoch",
)
SEED_LIST = ("bad_shard", "fp_overflow", "clip_breach", "lr_change", "optimizer_state", "benign")


def alarm(step=300, kind="loss_spike", signal="loss"):
    return Alarm(
        detector="test",
        kind=kind,
        signal=signal,
        attempt=0,
        step=step,
        onset_step=step,
        score=9.0,
        value=4.0,
        baseline=2.0,
    )


def incident():
    return Incident(id="a0-s300", attempt=0, onset_step=300, alarms=(alarm(),), last_alarm_step=300)


def spike_of(report):
    return next((f for f in report.findings if f.suspects), None)


def strip(records, *, signals=(), batches=False, layers=False):
    out = []
    for record in records:
        if isinstance(record, StepRecord):
            record = dataclasses.replace(record, values={k: v for k, v in record.values.items() if k not in signals})
        if isinstance(record, BatchRecord) and batches:
            continue
        if isinstance(record, LayerSample) and layers:
            continue
        out.append(record)
    return out


@pytest.mark.parametrize("name", sorted(SUSPECTS))
def test_a_suspect_stands_an_empty_case(name):
    assert list(SUSPECTS[name].investigate(Case(incident(), []))) is not None
    results, verdict = walk(Case(incident(), []), [SUSPECTS[name]])
    assert verdict == "undetermined"
    assert results[0].suspect == "undetermined"
    assert {r.status for r in results[1:]} <= {Status.NOT_OBSERVED}


@pytest.mark.parametrize("name", sorted(SUSPECTS))
def test_missing_signals_are_listed_and_never_innocence(name, records_of):
    needs = SUSPECTS[name].needs
    wanted = {*needs.all, *needs.any} - {"loss"}
    if not wanted or "loss" in needs.any:
        pytest.skip("needs nothing but the loss")
    records = strip(records_of(cause="bad_shard", seed=SEEDS[0]), signals=wanted, batches=True, layers=True)
    kind = (SUSPECTS[name].kinds or CAUSAL_KINDS)[0]
    told = dataclasses.replace(incident(), alarms=(alarm(kind=kind),))
    results, _ = walk(Case(told, _frames(records)), [SUSPECTS[name]])
    result = next(s for s in results if s.suspect == name)
    assert result.status is Status.NOT_OBSERVED
    assert wanted <= {m.signal for m in result.missing}
    assert all(m.would_tell for m in result.missing)
    assert not result.evidence


@pytest.mark.parametrize("cause", SEED_LIST)
@pytest.mark.parametrize("seed", SEEDS)
def test_implicates_its_own_fault_and_no_sibling(cause, seed, source_of):
    finding = spike_of(diagnose(source_of(cause=cause, seed=seed)))
    assert finding is not None
    assert finding.verdict == cause
    implicated = [s.suspect for s in finding.suspects if s.status is Status.IMPLICATED]
    assert implicated == [cause]
    assert finding.suspects[0].probability >= 0.7


@pytest.mark.parametrize("seed", [*SEEDS, 112, 113])
def test_the_clean_twin_is_quiet(seed, source_of):
    assert diagnose(source_of(cause=None, seed=seed)).findings == ()


def test_a_hard_batch_is_info_and_needs_no_rollback(source_of):
    finding = spike_of(diagnose(source_of(cause="benign", seed=114)))
    assert finding.severity is Severity.INFO
    assert finding.remedy.action == "continue"
    assert finding.remedy.plan is None


@pytest.mark.parametrize("cause", ["bad_shard", "clip_breach"])
def test_the_walk_is_deterministic(cause, source_of):
    first, second = (diagnose(source_of(cause=cause, seed=115)) for _ in range(2))
    assert first.findings == second.findings


def test_the_injected_label_is_never_read(records_of, list_source):
    label = RunEvent(
        attempt=0, step=300, rank=0, kind=EventKind.FAULT_INJECTED, message="lr_change", data={"fault": "lr_change"}
    )
    records = records_of(cause="bad_shard", seed=116)
    with_label = [*records[:200], label, *records[200:]]
    assert diagnose(list_source(with_label)).findings == diagnose(list_source(records)).findings


def test_bad_shard_names_shard_ranks_and_steps(source_of):
    finding = spike_of(diagnose(source_of(cause="bad_shard", seed=117, ranks=4)))
    best = finding.suspects[0]
    assert finding.details["shard"] == "0007"
    assert finding.ranks == (1,)
    assert finding.onset_step == 300
    assert any("token" in e.claim and e.steps[0] == 300 for e in best.evidence)
    assert any("manifest" in e.claim for e in best.evidence)


def test_bad_shard_is_found_without_hashes_and_at_other_telemetry_rates(source_of):
    finding = spike_of(diagnose(source_of(cause="bad_shard", seed=118, hashes=False, fp8=False, updates_every=10)))
    assert finding.verdict == "bad_shard"


def test_overflow_names_the_tensor(source_of):
    finding = spike_of(diagnose(source_of(cause="fp_overflow", seed=119)))
    best = finding.suspects[0]
    assert any("blocks.1.mlp" in e.layers for e in best.evidence)
    assert finding.lead_steps["overflow_count"] == 3


def test_an_unusual_batch_long_before_the_loss_is_no_cause(records_of, list_source):
    records = []
    for record in records_of(cause="lr_change", seed=120):
        if isinstance(record, BatchRecord) and record.step in (250, 251):
            record = dataclasses.replace(record, values={**record.values, "token_entropy": 7.9})
        records.append(record)
    assert spike_of(diagnose(list_source(records))).verdict == "lr_change"


def test_a_crashing_suspect_is_reported_and_harms_nobody(records_of, list_source):
    def explode(_case):
        raise ZeroDivisionError("on purpose")

    bad = Suspect(
        name="explosive",
        title="t",
        needs=Needs(all=("loss",)),
        investigate=explode,
        action="repair",
        remedy="r",
        explains="e",
    )
    nan = dataclasses.replace(bad, name="nan", investigate=lambda _case: [Evidence(claim="c", weight_nats=math.nan)])
    engine = Engine(suspects=(*load_suspects(), bad, nan))
    source = list_source(records_of(cause="bad_shard", seed=121))
    for record in source.records():
        engine.feed_quietly(record)
    engine.finish()
    finding = spike_of(engine.report(source.describe()))
    crashed = {s.suspect: s for s in finding.suspects if s.status is Status.CRASHED}
    assert set(crashed) == {"explosive", "nan"}
    assert "ZeroDivisionError: on purpose" in crashed["explosive"].error
    assert finding.verdict == "bad_shard"
    assert sum(s.probability for s in finding.suspects) == pytest.approx(1)


def test_weak_evidence_stays_undetermined():
    weak = Suspect(
        name="weak",
        title="t",
        needs=Needs(),
        investigate=lambda _c: [Evidence(claim="c", weight_nats=2.9)],
        action="repair",
        remedy="r",
        explains="e",
    )
    results, verdict = walk(Case(incident(), []), [weak])
    assert verdict == "undetermined"
    strong = dataclasses.replace(weak, investigate=lambda _c: [Evidence(claim=str(i), weight_nats=3.0) for i in (1, 2)])
    results, verdict = walk(Case(incident(), []), [strong])
    assert verdict == "weak"
    assert results[0].probability > 0.7


def test_one_observation_is_clipped_and_a_veto_is_not():
    loud = Suspect(
        name="loud",
        title="t",
        needs=Needs(),
        investigate=lambda _c: [Evidence(claim="c", weight_nats=99.0)],
        action="repair",
        remedy="r",
        explains="e",
    )
    vetoed = dataclasses.replace(
        loud,
        name="vetoed",
        investigate=lambda _c: [Evidence(claim="c", weight_nats=3.5), Evidence(claim="v", weight_nats=-5.0)],
    )
    results, _ = walk(Case(incident(), []), [loud, vetoed])
    by_name = {r.suspect: r.probability for r in results}
    raws = {"loud": 3.5, "vetoed": -1.5, "undetermined": current().undetermined_nats}
    expected = current().probabilities(raws)
    assert by_name == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"name": "Bad Name"}, ValueError),
        ({"name": "undetermined"}, ValueError),
        ({"repairs": ("pray",)}, ValueError),
        ({"investigate": None}, TypeError),
    ],
)
def test_suspects_are_validated_when_loaded(change, error):
    with pytest.raises(error, match="somewhere"):
        validate(dataclasses.replace(SUSPECTS["benign"], **change), "somewhere")
    with pytest.raises(TypeError, match="expected SUSPECT"):
        validate("text", "somewhere")


@pytest.mark.parametrize("cls", detector_classes(), ids=lambda cls: cls.name)
def test_a_detector_stands_empty_and_non_finite_frames(cls):
    detector = cls()
    for step in range(40):
        frame = Frame(0, step)
        for rank in range(2):
            if step % 3:
                frame.ranks[rank] = dict.fromkeys(NAMES, math.nan if step % 3 == 1 else 0)
        frame.seal()
        for raised in detector.update(frame):
            assert raised.kind in cls.kinds
    detector.finish()


@pytest.mark.parametrize("cls", detector_classes(), ids=lambda cls: cls.name)
def test_a_detector_goes_on_from_its_state(cls, records_of):
    frames = _frames(records_of(cause="clip_breach", seed=122))
    whole, first, second = cls(), cls(), cls()
    expected = [a for f in frames for a in whole.update(f)]
    got = [a for f in frames[:290] for a in first.update(f)]
    second.load_state_dict(first.state_dict())
    got += [a for f in frames[290:] for a in second.update(f)]
    assert got == expected


def _frames(records):
    from runhealth.diagnose.batches import BatchHabit
    from runhealth.diagnose.frames import FrameAssembler

    assembler, habit, frames = FrameAssembler(), BatchHabit(), []
    for record in records:
        if isinstance(record, StepRecord | BatchRecord | LayerSample):
            frames += assembler.feed(record)
    frames += assembler.finish()
    for frame in frames:
        frame.outliers = habit.judge(frame.batches)
    return frames


def test_a_signal_that_was_not_sampled_in_time_is_no_alibi(source_of):
    finding = spike_of(diagnose(source_of(cause="optimizer_state", seed=123, updates_every=10)))
    result = next(s for s in finding.suspects if s.suspect == "optimizer_state")
    assert finding.verdict == "undetermined"
    assert result.status is not Status.EXONERATED
    assert result.probability > max(s.probability for s in finding.suspects if s.suspect == "bad_shard")
