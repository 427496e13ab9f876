"""Counterfactual replay without a trainer: what is chosen, what is scored, what it is worth, what is refused."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from runhealth.diagnose import experiments, replays
from runhealth.diagnose.cli import main
from runhealth.diagnose.experiments import choose, evidence, own_test, probabilities, proven, with_replays
from runhealth.diagnose.findings import Evidence, Finding, Outcome, Report, Severity, Status, SuspectResult
from runhealth.diagnose.plans import CHANGES, ReplayOrder
from runhealth.diagnose.port import ReplayProcess
from runhealth.diagnose.replay import Inquiry, check_run, pick, start_of
from runhealth.diagnose.replay_cli import _told
from runhealth.diagnose.replay_measure import compare, read_steps, target_of
from runhealth.diagnose.replay_words import attach
from runhealth.diagnose.replays import Replayed, Tried
from runhealth.diagnose.report.json import finding_json
from runhealth.diagnose.report.markdown import render as render_markdown
from runhealth.diagnose.report.plain import Style
from runhealth.diagnose.report.text import render as render_text
from runhealth.diagnose.suspect import VETO_NATS, Needs, Suspect
from runhealth.storage.errors import CorruptDataError, PlanError, ReplayError
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    EventKind,
    RunEvent,
    SourceInfo,
    StepRecord,
)
from runhealth.storage.store import Store

ONSET, LAST = 40, 59
CONFIG = {
    "world": 2,
    "steps": 60,
    "model": {"precision": "fp8"},
    "data": {},
    "optim": {},
    "parallel": {"kind": "ddp", "tp": 1, "pp": 1},
}


def suspect(name, probability, *weights, status=Status.INCONCLUSIVE):
    said = tuple(Evidence(claim="c", weight_nats=w) for w in weights)
    return SuspectResult(suspect=name, status=status, probability=probability, evidence=said)


def finding(kind="loss_spike", onset=ONSET, suspects=None, **changes):
    known = suspects or (suspect("bad_shard", 0.5, 2.0), suspect("lr_change", 0.3, 1.5), suspect("undetermined", 0.2))
    made = Finding(
        id=f"a0-s{onset}",
        code="RH101",
        kind=kind,
        severity=Severity.ERROR,
        outcome=Outcome.NON_RECOVERING,
        attempt=0,
        onset_step=onset,
        peak_step=onset,
        end_step=None,
        summary="loss rose.",
        suspects=known,
    )
    return replace(made, **changes)


def report_of(*findings, attempts=()):
    info = SourceInfo(name="r", source="r", format="runhealth")
    return Report(source=info, attempts=attempts, findings=findings, missing=(), first_step=0, last_step=LAST)


def tried(change="as_is", ratio=1.0, **changes):
    vanished = ratio < replays.VANISHED_BELOW
    return replace(
        Tried(change=change, path=f"replays/x/{change}", steps=12, score=2 * ratio, ratio=ratio, vanished=vanished),
        **changes,
    )


def result(*outcomes, **changes):
    made = Replayed(
        run="r",
        incident=f"a0-s{ONSET}",
        attempt=0,
        onset_step=ONSET,
        channel="loss",
        unit="nats",
        baseline=1.0,
        score=2.0,
        first_step=ONSET,
        last_step=ONSET + 3,
        checkpoint_step=30,
        checkpoint_path="checkpoints/step-00000030",
        deterministic=True,
        equal_steps=14,
        parted_step=None,
        parted_ranks=(),
        band=0.0,
        tried=outcomes or (tried(),),
        verdict_before="undetermined",
        probability_before=0.2,
        made_ns=1,
    )
    return replace(made, **changes)


def record(last=LAST, onset=ONSET, height=2.0, odd=None, ranks=2, **more):
    """{step: {rank: row}}: loss 1 up to the onset, then `height` more, on one rank only where `odd` names it."""
    steps = {}
    for step in range(last + 1):
        rows = {}
        for rank in range(ranks):
            up = height if step >= onset and odd in (None, rank) else 0.0
            rows[rank] = {"loss": 1.0 + 0.01 * ((step + rank) % 3) + up, "grad_norm": 0.5, "grad_norm_rank": 0.4}
            rows[rank] |= {name: value(step, rank) for name, value in more.items()}
        steps[step] = rows
    return steps


class Played:
    """Stands for the trainer: writes what a replay would have recorded. `heights`: excess of the loss by change."""

    def __init__(self, folder, heights, exact=True, breaks=""):
        self.folder, self.heights, self.exact, self.breaks = folder, heights, exact, breaks
        self.orders = []

    def play(self, order):
        self.orders.append(order)
        if order.change == self.breaks:
            raise ReplayError("the ranks of the replay failed")
        store = Store(str(self.folder / f"{len(self.orders)}"))
        run = store.create_run(order.name, CONFIG)
        claimed = store.claim_attempt(run, "k")
        noise = 0.0 if self.exact else 1e-4 * len(self.orders)
        first = int(order.checkpoint.rpartition("-")[2])
        write(claimed.path, record(height=self.heights.get(order.change, 2.0)), range(first, order.stop_step), noise)
        return run.path


def write(path, steps, wanted, noise=0.0):
    for rank in range(2):
        log = RankLog.create(path, rank)
        log.append([RunEvent(attempt=0, step=0, rank=rank, kind=EventKind.ATTEMPT_START, data={"world_size": 2})])
        for step in wanted:
            values = {k: v + noise for k, v in steps[step][rank].items()}
            log.append([StepRecord(attempt=0, step=step, rank=rank, ts_ns=step, values=values)])
            log.append(
                [
                    BatchRecord(
                        attempt=0,
                        step=step,
                        rank=rank,
                        micro_batch=0,
                        shard=f"{rank:04d}",
                        first_sample=0,
                        last_sample=1,
                        samples=2,
                        values={},
                        ts_ns=step,
                    )
                ]
            )
        log.close()


@pytest.fixture
def run(tmp_path):
    """A run of 60 steps with checkpoints at 10, 20, 30 and 50, whose loss jumps at `ONSET`."""
    store = Store(str(tmp_path / "runs"))
    made = store.create_run("r", CONFIG)
    claimed = store.claim_attempt(made, "k")
    write(claimed.path, record(), range(LAST + 1))
    log = RankLog.create(claimed.path, 99)
    for step in (10, 20, 30, 50):
        path = f"checkpoints/step-{step:08d}"
        log.append(
            [
                CheckpointRecord(attempt=0, step=step, rank=99, path=path, status=status)
                for status in (CheckpointStatus.SAVED, CheckpointStatus.VERIFIED)
            ]
        )
    log.close()
    with RunReader.open(made.path) as reader:
        yield reader


def inquire(run, **changes):
    return Inquiry(run, report_of(), finding(**changes), lambda _: None)


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_as_it_was_comes_first():
    assert choose({"bad_shard": 0.99, "undetermined": 0.01}, ["mask_shards"], set()) == "as_is"


def test_the_leaders_own_test_comes_before_anything_else():
    beliefs = {"lr_change": 0.98, "bad_shard": 0.01, "undetermined": 0.01}
    possible = ["mask_shards", "scheduled_lr", "fp32"]
    assert choose(beliefs, possible, {"as_is"}) == "scheduled_lr"
    assert choose(beliefs, possible, {"as_is", "scheduled_lr"}) is None


def test_two_suspects_are_told_apart_by_a_change_that_tells_them_apart():
    beliefs = {"lr_change": 0.45, "fp_overflow": 0.45, "undetermined": 0.1}
    assert choose(beliefs, ["half_clip", "cap_logits", "fp32"], {"as_is"}) == "fp32"


def test_nothing_is_tried_that_would_tell_nothing():
    assert choose({"gc_pause": 0.6, "undetermined": 0.4}, ["half_clip"], {"as_is"}) is None


def test_a_suspect_without_a_change_of_its_own_has_no_own_test():
    assert own_test("clip_breach", ["half_clip", "mask_shards"]) is None
    assert own_test("silent_corruption", ["as_is", "mask_shards"]) == "as_is"


def test_every_change_has_rates_and_words():
    assert set(experiments.RATES) == set(experiments.WORDS) == set(CHANGES)


# -- what an outcome is worth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_clipped_and_signed(change):
    for name, p in experiments.RATES[change].items():
        gone, stays = (experiments.weight_nats(change, name, vanished) for vanished in (True, False))
        assert abs(gone) <= 3.5
        assert abs(stays) <= 3.5
        if p is None:
            assert gone == stays == 0.0
        elif p > 0.5:
            assert gone > 1.5 > 0 > stays
        elif p == 0.0:
            assert gone < -2.0 < 0 < stays < 0.2


def test_the_own_test_decides_between_two_suspects():
    before = probabilities(finding(), None)
    gone = probabilities(finding(), result(tried(), tried("scheduled_lr", 0.1)))
    stays = probabilities(finding(), result(tried(), tried("scheduled_lr", 1.0)))
    assert before["bad_shard"] > before["lr_change"]
    assert gone["lr_change"] > 0.7 > before["lr_change"] > stays["lr_change"]


def test_a_suspect_whose_signals_are_missing_may_be_shown_at_work():
    known = (suspect("adam_staleness", 0.0, status=Status.NOT_OBSERVED), suspect("undetermined", 1.0))
    shown = result(tried(), tried("clip_updates", 0.1))
    assert probabilities(finding(suspects=known), shown)["adam_staleness"] > 0.7
    crashed = (suspect("adam_staleness", 0.0, status=Status.CRASHED), suspect("undetermined", 1.0))
    assert probabilities(finding(suspects=crashed), shown)["adam_staleness"] == 0.0

    def blind(_):
        raise AssertionError("it cannot look")

    plain = Suspect(
        name="adam_staleness",
        title="t",
        needs=Needs(all=("adam_rms",)),
        investigate=blind,
        action="repair",
        remedy="r",
        explains="e",
    )
    (knowing,) = with_replays([plain], [shown])
    case = type("C", (), {"incident": type("I", (), {"id": shown.incident}), "has": lambda *_: False})()
    assert knowing.shown_in == {shown.incident}
    assert sum(e.weight_nats for e in knowing.investigate(case)) > 2.0
    (other,) = with_replays([plain], [result(tried(), tried("clip_updates", 1.0))])
    assert other.shown_in == frozenset()


def test_what_does_not_come_back_exactly_refutes_every_cause_that_would():
    known = (
        suspect("clip_breach", 0.9, 3.5, 2.0, 1.5),
        suspect("silent_corruption", 0.0, VETO_NATS),
        suspect("undetermined", 0.1),
    )
    parted = result(tried(ratio=0.05), equal_steps=9, parted_step=39, parted_ranks=(1,))
    after = probabilities(finding(suspects=known), parted)
    assert proven(parted) == {"silent_corruption"}
    assert after["silent_corruption"] > 0.85
    assert after["clip_breach"] < 0.01


def test_masking_does_not_tell_hard_data_from_bad_ones():
    masked = result(tried(), tried("mask_shards", 0.0, shards=("0007",)))
    known = (suspect("benign", 0.1, VETO_NATS), suspect("bad_shard", 0.1, 1.0), suspect("undetermined", 0.8))
    assert proven(masked) == {"bad_shard"}
    assert probabilities(finding(suspects=known), masked)["benign"] < 0.05


def test_a_replay_that_is_not_deterministic_proves_nothing():
    vague = result(tried(ratio=0.05), equal_steps=0, parted_step=30, deterministic=False)
    assert evidence(vague) == {}
    assert probabilities(finding(), vague) == probabilities(finding(), None)


def test_two_like_replays_that_differ_from_the_record_weigh_less_than_an_exact_one():
    parted = {"parted_step": 30, "parted_ranks": (0, 1)}
    loose = result(tried(ratio=0.05), tried(ratio=0.05), equal_steps=0, **parted)
    exact = result(tried(ratio=0.05), equal_steps=9, **parted)
    weights = [evidence(r)["silent_corruption"][0].weight_nats for r in (loose, exact)]
    assert 2.0 < weights[0] < weights[1] == 3.5
    assert proven(loose) == frozenset()


def test_suspects_know_of_their_own_incident_only():
    class FakeCase:
        def __init__(self, name):
            self.incident = type("I", (), {"id": name})

    plain = Suspect(
        name="lr_change",
        title="t",
        needs=Needs(),
        investigate=lambda _: [Evidence(claim="veto", weight_nats=VETO_NATS)],
        action="repair",
        remedy="r",
        explains="e",
    )
    (knowing,) = with_replays([plain], [result(tried(), tried("scheduled_lr", 0.1))])
    assert [e.claim for e in knowing.investigate(FakeCase("a0-s99"))] == ["veto"]
    said = list(knowing.investigate(FakeCase(f"a0-s{ONSET}")))
    assert all(e.claim.startswith("replayed ") for e in said), "its veto falls: the cause was seen at work"
    assert sum(e.weight_nats for e in said) > 2.0


# -- what is scored ---------------------------------------------------------------------------------------------------


def test_the_record_is_scored_where_it_is_far_over_its_level():
    target = target_of(finding(), record())
    assert target.channel == "loss"
    assert target.steps == (40, 41, 42, 43)
    assert target.score == pytest.approx(2.0, abs=0.02)
    assert target.score_of(record(height=0.2)) == pytest.approx(0.2, abs=0.02)
    assert target.odd_rank is None


def test_the_rank_where_it_happened_is_named_and_moves_with_its_data():
    target = target_of(finding(), record(odd=1))
    assert target.odd_rank == 1
    assert target.moved(record(odd=0), 2)
    assert not target.moved(record(odd=1), 2)
    assert not target.moved(record(height=0.0), 2)


def test_values_that_are_not_finite_are_scored():
    steps = record(last=50, height=0.0)
    for step in range(ONSET, 51):
        steps[step][1]["loss"] = math.nan
    target = target_of(finding("non_finite"), steps)
    assert target.score == 1.0
    assert target.score_of(record()) == 0.0
    assert target_of(finding(), steps).score == 10.0


@pytest.mark.parametrize(
    ("kind", "steps", "said"),
    [
        ("straggler", record(), "a replay answers what loss, gradients and updates do"),
        ("loss_spike", record(height=0.0), "nothing that could vanish"),
        ("loss_spike", record(last=ONSET + 5, onset=2), "no level"),
        ("update_jump", record(), "met 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(kind, steps, said):
    onset = 2 if said == "no level" else ONSET
    with pytest.raises(ReplayError, match=said):
        target_of(finding(kind, onset=onset), steps)


def test_a_replay_that_broke_off_has_no_score():
    target = target_of(finding(), record())
    with pytest.raises(ReplayError, match="step 42"):
        target.score_of(record(last=41))


def test_a_replay_that_lost_the_rank_where_it_happened_has_no_score():
    """A full disk may take the telemetry of one rank; the others look healthy."""
    target = target_of(finding(), record(odd=1))
    played = record(odd=1)
    assert target.score_of(played) > 0
    del played[ONSET + 1][1]
    with pytest.raises(ReplayError, match=f"step {ONSET + 1} of rank 1"):
        target.score_of(played)


def test_steps_that_an_attempt_went_back_over_are_not_its_record(tmp_path):
    """Attempt 1 began at step 20 and has come to 29: what attempt 0 did from 20 on, it never saw."""
    store = Store(str(tmp_path / "runs"))
    made = store.create_run("r", CONFIG)
    write(store.claim_attempt(made, "k").path, record(height=5.0), range(LAST + 1))
    again = store.claim_attempt(made, "l")
    for rank in range(2):
        log = RankLog.create(again.path, rank)
        values = {"loss": 1.5}
        log.append([StepRecord(attempt=1, step=s, rank=rank, ts_ns=s, values=values) for s in range(20, 30)])
        log.close()
    with RunReader.open(made.path) as reader:
        assert list(read_steps(reader, 15, LAST, 1)) == list(range(15, 30))
        assert {rows[0]["loss"] for step, rows in read_steps(reader, 15, LAST, 1).items() if step >= 20} == {1.5}
        assert list(read_steps(reader, 15, LAST, 0)) == list(range(15, LAST + 1))


def test_bits_are_compared():
    played = {step: rows for step, rows in record().items() if step >= 30}
    match = compare(record(), played, ONSET)
    assert (match.equal_steps, match.parted_step, match.band) == (30, None, 0.0)
    played[38] = {0: {**played[38][0], "grad_norm": 0.6}, 1: {**played[38][1], "grad_norm": 0.6, "grad_norm_rank": 9.0}}
    match = compare(record(), played, ONSET)
    assert (match.equal_steps, match.parted_step, match.parted_ranks) == (8, 38, (1,))
    played[30] = {rank: {**row, "loss": row["loss"] + 1e-6} for rank, row in played[30].items()}
    match = compare(record(), played, ONSET)
    assert (match.equal_steps, match.parted_step, match.parted_ranks) == (0, 30, (0, 1))
    assert match.band == pytest.approx(1e-6)


# -- an inquiry -------------------------------------------------------------------------------------------------------


def test_an_inquiry_masks_the_shard_that_the_finding_names(run, tmp_path):
    said = []
    known = (suspect("bad_shard", 0.99, 3.5, 3.5), suspect("undetermined", 0.01))
    inquiry = Inquiry(run, report_of(), finding(details={"shards": ["0007"]}, suspects=known), said.append)
    trainer = Played(tmp_path, {"mask_shards": 0.1})
    found = inquiry.run(trainer, now_ns=lambda: 7)
    assert [order.change for order in trainer.orders] == ["as_is", "mask_shards"]
    first, second = trainer.orders
    assert (first.checkpoint, first.stop_step, first.resumes) == ("checkpoints/step-00000030", 44, False)
    assert second.shards == ("0007",)
    assert found.reproduced
    assert found.equal_steps == 14
    assert found.tried[1].ratio == pytest.approx(0.05, abs=0.01)
    assert found.made_ns == 7
    assert any("bit-equal to the record in all 14 steps" in line for line in said)


def test_three_replays_at_most(run, tmp_path):
    trainer = Played(tmp_path, {})
    found = inquire(run).run(trainer)
    assert len(trainer.orders) == len(found.tried) == 3
    assert found.steps == 42


def test_nothing_is_changed_where_the_control_does_not_come_back(run, tmp_path):
    trainer = Played(tmp_path, {"as_is": 0.0})
    found = inquire(run).run(trainer)
    assert [order.change for order in trainer.orders] == ["as_is"]
    assert not found.reproduced
    assert found.deterministic
    assert found.parted_step == ONSET


def test_a_control_that_differs_from_the_start_is_made_twice(run, tmp_path):
    trainer = Played(tmp_path, {"as_is": 0.0}, exact=False)
    found = inquire(run).run(trainer)
    assert [order.name for order in trainer.orders] == ["as_is", "as_is_again"]
    assert not found.deterministic
    assert found.band == pytest.approx(1e-4, rel=1e-2)


def test_a_failed_replay_is_an_error_and_no_result(run, tmp_path):
    with pytest.raises(ReplayError, match="failed"):
        inquire(run).run(Played(tmp_path, {}, breaks="as_is"))


def test_only_what_the_config_allows_is_possible(run):
    assert inquire(run).possible == [
        "scheduled_lr",
        "fp32",
        "configured_optimizer",
        "clip_updates",
        "cap_logits",
        "half_clip",
    ]
    assert "mask_shards" in inquire(run, details={"shard": "0001"}).possible


def test_start_is_the_last_good_checkpoint_before_the_onset(run):
    start = start_of(run, report_of(), finding())
    assert (start.step, start.resumes, start.before) == (30, False, "checkpoints/step-00000020")


def test_no_checkpoint_before_the_onset_is_refused(run):
    with pytest.raises(ReplayError, match="no checkpoint to replay from before the onset at step 8"):
        start_of(run, report_of(), finding(onset=8))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_an_incident_must_exist_and_be_one_that_a_replay_answers():
    report = report_of(finding("straggler", onset=5), finding())
    assert pick(report, None).kind == "loss_spike"
    assert pick(report, f"a0-s{ONSET}").kind == "loss_spike"
    with pytest.raises(ReplayError, match=r"a0-s5 is a straggler.*of this run: a0-s40"):
        pick(report, "a0-s5")
    with pytest.raises(ReplayError, match=r"no incident 'nope'.*known are: a0-s40"):
        pick(report, "nope")
    with pytest.raises(ReplayError, match="nothing was found"):
        pick(report_of(), None)


def test_a_run_without_a_config_is_refused(tmp_path):
    Store(str(tmp_path)).create_run("imported", {"format": "csv"})
    with RunReader.open("imported", str(tmp_path)) as reader, pytest.raises(ReplayError, match="an imported log"):
        check_run(reader)


@pytest.mark.parametrize(
    "changes",
    [
        {"world": "x"},
        {"world": 0},
        {"world": True},
        {"world": 1e300},
        {"parallel": {"tp": "a"}},
        {"parallel": {"pp": 0}},
    ],
)
def test_numbers_of_the_config_are_checked_before_anything_is_trained(tmp_path, changes):
    store = Store(str(tmp_path / "runs"))
    made = store.create_run("r", {**CONFIG, **changes})
    write(store.claim_attempt(made, "k").path, record(), range(3))
    with RunReader.open(made.path) as reader, pytest.raises(ReplayError, match="as a number over 0"):
        check_run(reader)


def test_the_bundled_run_is_refused(capsys):
    assert main(["replay", "--run", "40k-spike"]) == 3
    assert "without its checkpoints" in capsys.readouterr().err


def test_one_replay_of_an_incident_at_a_time(tmp_path):
    with replays.claim(str(tmp_path), "a0-s1"):
        refused = pytest.raises(ReplayError, match=rf"a0-s1 is being replayed by process {os.getpid()} already")
        with refused, replays.claim(str(tmp_path), "a0-s1"):
            pass
        with replays.claim(str(tmp_path), "a0-s2"):
            pass
    with replays.claim(str(tmp_path), "a0-s1"):
        pass


# -- what is kept and told --------------------------------------------------------------------------------------------


def test_a_result_is_kept_whole(tmp_path):
    made = result(tried(), tried("mask_shards", 0.1, shards=("0007",)))
    with replays.claim(str(tmp_path), made.incident):
        replays.write(str(tmp_path), made)
    assert replays.read_all(str(tmp_path)) == ((made,), ())


def test_a_damaged_result_is_told_and_left_out(tmp_path):
    folder = tmp_path / "replays" / "a0-s1"
    folder.mkdir(parents=True)
    whole = json.dumps(result().to_json())
    for text in (whole[: len(whole) // 2], "[]", whole.replace('"as_is"', '"other"'), whole.replace("2.0", "null")):
        (folder / "result.json").write_text(text)
        found, notes = replays.read_all(str(tmp_path))
        assert found == ()
        assert "a stored replay is not taken into account" in notes[0]
    with pytest.raises(CorruptDataError, match="version"):
        Replayed.from_json({**result().to_json(), "version": 9}, "here")


def test_a_finding_tells_of_its_replay_and_a_lost_incident_is_a_note():
    made = result(tried(), tried("scheduled_lr", 0.1))
    asked = finding(verdict="lr_change", summary="x (the two disagree, so replay).")
    told = attach(report_of(asked), (made, replace(made, incident="a9-s9")))
    assert told.findings[0].replay == made
    assert told.findings[0].summary.startswith("x (the two disagree). Replayed as it was")
    assert told.findings[0].summary.endswith(
        "comes back bit by bit; replayed at the scheduled learning rate, the anomaly vanishes"
        " (loss 2.00 to 0.20 nats over its level)."
    )
    assert told.source.notes == ("a9-s9 was replayed, but is not found any more",)


def test_the_json_of_a_replay_has_the_keys_of_the_schema():
    schema = json.loads((files("runhealth.diagnose.report") / "schema.json").read_text())["$defs"]
    said = finding_json(replace(finding(), replay=result(tried(), tried("fp32", 0.1))))
    assert set(said) <= set(schema["finding"]["properties"])
    assert set(said["replay"]) == set(schema["replay"]["properties"]) == set(schema["replay"]["required"])
    entry = schema["replay"]["properties"]["tried"]["items"]["properties"]
    assert set(said["replay"]["tried"][1]) == set(entry)
    assert set(entry["change"]["enum"]) == set(CHANGES)
    assert finding_json(finding())["replay"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"change": "sleep"}, "expected a change out of"),
        ({"stop_step": "9"}, "expected stop_step as int"),
        ({"resumes": 1}, "expected resumes as bool"),
        ({"shards": [1]}, "list of strings"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_an_order_is_checked(changes, said):
    raw = ReplayOrder(
        incident="i", name="n", attempt=0, change="as_is", checkpoint="c", stop_step=9, shards=("1",)
    ).to_json()
    assert ReplayOrder.from_json(json.loads(json.dumps(raw))).shards == ("1",)
    with pytest.raises(PlanError, match=said):
        ReplayOrder.from_json({**raw, **changes})
    with pytest.raises(PlanError, match="stop_step"):
        ReplayOrder.from_json({key: value for key, value in raw.items() if key != "stop_step"})


def test_replays_lie_beside_a_run_and_are_no_runs(run):
    folder = Path(run.info.path) / "replays" / "a0-s40"
    made = Store(str(folder)).create_run("as_is", CONFIG)
    assert [r.name for r in Store(str(Path(run.info.path).parent)).runs() if not r.bundled] == ["r"]
    with RunReader.open(made.path) as reader:
        assert reader.info.name == "as_is"


def test_text_and_markdown_tell_of_the_replays():
    made = result(tried(), tried("mask_shards", 0.005, shards=("0007",)))
    report = attach(report_of(finding(verdict="bad_shard")), (made,))
    text = " ".join(render_text(report, Style(unicode=True)).split())
    assert "Replayed as it was, the anomaly comes back (loss 2 nats over its level); bit-equal to the record" in text
    assert "with the rows of shard 0007 masked, the anomaly vanishes (loss 2 to 0.01 nats over its level)" in text
    assert "(2 replays, 24 steps in all)" in text
    assert "\n- replayed as it was, the anomaly comes back" in render_markdown(report)
    parted = result(tried(ratio=0.1), equal_steps=9, parted_step=39, parted_ranks=(1,))
    text = " ".join(render_text(attach(report_of(finding()), (parted,)), Style(unicode=True)).split())
    assert "bit-equal to the record up to step 38; they part at step 39, on rank 1 (1 replay, 12 steps in all)" in text
    assert "Replayed" not in render_text(report_of(finding()), Style(unicode=True))


def test_an_odd_rank_is_scored_by_the_gap_to_its_peers():
    steps = record(height=0.0)
    for step in range(ONSET, LAST + 1):
        steps[step][1] = {**steps[step][1], "grad_norm_rank": 4.0}
    target = target_of(finding("rank_outlier"), steps)
    assert target.score == pytest.approx(math.log(10.0))
    assert target.score_of(record(height=0.0)) == 0.0


def test_a_minor_finding_is_shown_with_what_was_replayed():
    made = result(tried(), tried("scheduled_lr", 0.1))
    minor = replace(
        attach(report_of(finding(verdict="lr_change", summary="long. " * 40)), (made,)).findings[0],
        severity=Severity.INFO,
    )
    text = render_text(report_of(_told(minor)), Style(unicode=True, colour=False, width=110))
    assert "the anomaly vanishes (loss 2 to 0.2 nats" in " ".join(text.split())
    loud = replace(minor, severity=Severity.ERROR)
    assert _told(loud) is loud


def test_what_a_step_has_or_has_not_is_told_as_a_share():
    made = result(
        tried(score=1.0), tried("mask_shards", 0.0, score=0.0), channel="non_finite", unit="of the steps", score=1.0
    )
    assert experiments.outcome(made, made.tried[0]).endswith("comes back (non finite in 100 % of the scored steps)")
    assert experiments.outcome(made, made.tried[1]).endswith("(non finite in 100 to 0 % of the scored steps)")


def test_a_trainer_that_was_killed_is_not_said_to_have_told_why():
    replay = ReplayProcess.__new__(ReplayProcess)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    pipe = subprocess.PIPE
    replay._child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    order = ReplayOrder(incident="i", name="n", attempt=0, change="as_is", checkpoint="c", stop_step=1)
    with replay, pytest.raises(ReplayError, match=r"the trainer was killed \(signal 9\)$"):
        replay.play(order)
