"""A run folder that came from somewhere: pipes, links, huge and garbage files where plans and replays are expected."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from runhealth.diagnose import apply as applying
from runhealth.diagnose import replays
from runhealth.diagnose.plain_file import read_text
from runhealth.diagnose.plans import Cost, RollbackPlan
from runhealth.diagnose.replays import Replayed, Tried
from runhealth.storage.errors import CorruptDataError, PlanError, StoreError

PLAN = RollbackPlan(
    run="r",
    incident="a0-s40",
    attempt=0,
    cause="lr_change",
    probability=0.99,
    onset_step=40,
    checkpoint_step=30,
    checkpoint_path="checkpoints/step-00000030",
    cost=Cost(steps=10, tokens=0, samples_skipped=0),
)
RESULT = Replayed(
    run="r",
    incident="a0-s40",
    attempt=0,
    onset_step=40,
    channel="loss",
    unit="nats",
    baseline=1.0,
    score=2.0,
    first_step=40,
    last_step=43,
    checkpoint_step=30,
    checkpoint_path="checkpoints/step-00000030",
    deterministic=True,
    equal_steps=14,
    parted_step=None,
    parted_ranks=(),
    band=0.0,
    tried=(
        Tried(change="as_is", path="replays/a0-s40/as_is", steps=14, score=2.0, ratio=1.0, vanished=False),
        Tried(change="fp32", path="replays/a0-s40/fp32", steps=14, score=0.1, ratio=0.05, vanished=True, shards=("1",)),
    ),
    verdict_before="undetermined",
    probability_before=0.2,
    made_ns=1,
)
GARBAGE = (None, True, -1, 10**400, "x", [], {}, [[]], [1, "a"], 0.5, float("nan"), float("inf"))


@pytest.mark.parametrize("name", sorted(asdict(RESULT)))
def test_what_is_read_has_the_type_that_was_written(name):
    """Whatever else stands there is a CorruptDataError, never another error and never a surprise later on."""
    written = getattr(RESULT, name)
    allowed = (int, float) if isinstance(written, float) else (int, type(None)) if written is None else type(written)
    for value in GARBAGE:
        try:
            found = Replayed.from_json({**RESULT.to_json(), name: value}, "here")
        except CorruptDataError:
            continue
        assert isinstance(getattr(found, name), allowed)
        assert isinstance(getattr(found, name), bool) == isinstance(written, bool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("onset_step", 40.5),
        ("onset_step", -1),
        ("onset_step", 10**400),
        ("score", 10**400),
        ("baseline", "high"),
        ("deterministic", 1),
        ("incident", ["a0-s40"]),
        ("parted_ranks", ["0"]),
        ("tried", [1]),
        ("tried", RESULT.to_json()["tried"] * 100),
    ],
)
def test_garbage_in_a_stored_result_is_refused(name, value):
    with pytest.raises(CorruptDataError, match=r"here: expected the result of a replay, met .*"):
        Replayed.from_json({**RESULT.to_json(), name: value}, "here")


def test_a_result_is_evidence_of_its_own_incident_only(tmp_path):
    folder = tmp_path / "replays" / "a0-s99"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(RESULT.to_json()))
    found, notes = replays.read_all(str(tmp_path))
    assert found == ()
    assert "expected incident a0-s99, met 'a0-s40'" in notes[0]


def test_pipes_and_huge_files_do_not_hold_a_reader_up(tmp_path):
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="plain file"):
        read_text(pipe)
    with pytest.raises(ValueError, match="at most"):
        read_text(huge)
    for name, kept in (("a0-s1", pipe), ("a0-s2", huge)):
        folder = tmp_path / "replays" / name
        folder.mkdir(parents=True)
        (folder / "result.json").symlink_to(kept)
    found, notes = replays.read_all(str(tmp_path))
    assert (found, len(notes)) == ((), 2)
    plans = tmp_path / "plans"
    plans.mkdir()
    for suffix in (".applied.json", ".failed.json", ".apply.json", ".json"):
        os.mkfifo(plans / f"x{suffix}")
    (plans / "y.apply.json").mkdir()
    assert applying.applied_plans(str(tmp_path)) == []
    assert not applying.waits(str(tmp_path))
    with pytest.raises(PlanError, match="no plan to apply"):
        applying.newest_plan(str(tmp_path))
    os.mkfifo(tmp_path / "supervisor.json")
    assert applying.live_supervisor(str(tmp_path)) is None


@pytest.mark.parametrize("pid", ["1e999", "[]", str(10**400), '"x"', "-7.5e300"])
def test_a_garbage_process_id_is_no_supervisor(tmp_path, pid):
    (tmp_path / "supervisor.json").write_text(f'{{"pid": {pid}}}')
    (tmp_path / "supervisor.lock").touch()
    assert applying.live_supervisor(str(tmp_path)) is None


def test_a_status_that_may_not_be_read_is_no_supervisor(tmp_path, monkeypatch):
    def denied(*_args, **_more):
        raise PermissionError(13, "denied")

    monkeypatch.setattr(applying, "read_text", denied)
    assert applying.live_supervisor(str(tmp_path)) is None


@pytest.mark.parametrize("at", ["replays", "replays/a0-s40", "replays/a0-s40/.lock"])
def test_a_replay_writes_nothing_through_a_link(tmp_path, at):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    precious = outside / "precious"
    precious.write_text("mine")
    link = run / at
    link.parent.mkdir(parents=True)
    link.symlink_to(precious if at.endswith(".lock") else outside)
    with pytest.raises(StoreError), replays.claim(str(run), "a0-s40"):
        pass
    assert precious.read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["precious"]


def keep(run: Path, suffix: str, plan: RollbackPlan) -> None:
    (run / "plans").mkdir(exist_ok=True)
    (run / "plans" / f"{plan.incident}{suffix}").write_text(plan.dumps())


def test_a_plan_that_was_applied_is_not_offered_again(tmp_path):
    keep(tmp_path, ".json", PLAN)
    assert applying.newest_plan(str(tmp_path)).endswith("a0-s40.json")
    keep(tmp_path, ".applied.json", PLAN)
    with pytest.raises(PlanError, match="was applied already"):
        applying.newest_plan(str(tmp_path))
    broken = [check.sentence for check in applying.check(PLAN, "r", str(tmp_path)) if not check.holds]
    assert "no rollback to this checkpoint was made for this incident" in broken
    keep(tmp_path, ".json", replace(PLAN, checkpoint_step=20))  # further back is another matter
    assert applying.newest_plan(str(tmp_path)).endswith("a0-s40.json")
    further = applying.check(replace(PLAN, checkpoint_step=20), "r", str(tmp_path))
    assert "no rollback to this checkpoint was made for this incident" in [c.sentence for c in further if c.holds]


@pytest.mark.parametrize("name", ["incident", "checkpoint_path", "cause", "run"])
@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_text_that_no_file_can_have_as_its_name_is_no_plan(name, text):
    """A supervisor reads what is dropped: an error of another kind than PlanError would end the training."""
    with pytest.raises(PlanError, match=f"expected {name} as text"):
        RollbackPlan.loads(json.dumps({**PLAN.to_json(), name: text}))


def test_numbers_of_a_plan_have_64_bits():
    for changes in (
        {"attempt": 10**400},
        {"probability": 10**400},
        {"cost": {**asdict(PLAN.cost), "seconds": 10**400}},
    ):
        with pytest.raises(PlanError, match="64 bits"):
            RollbackPlan.loads(json.dumps({**PLAN.to_json(), **changes}))


def test_a_checkpoint_of_a_name_too_long_does_not_hold(tmp_path):
    plan = replace(PLAN, checkpoint_path=f"checkpoints/{'x' * 5000}")
    assert not applying.check(plan, "r", str(tmp_path))[1].holds
