"""Scoring against results made by hand, where every figure can be counted on the fingers."""

from typing import Any

import pytest
from bench.faults import held_out, plan, rules, score
from bench.faults.kinds import GENERATION, HELD_OUT, KINDS, REPORT_SEEDS, TUNING_SEEDS


def said(kind: str = "loss_spike", onset: int = 100, severity: str = "warning", **changes: Any) -> dict[str, Any]:
    return {
        "id": f"a0-s{onset}",
        "at": onset + 2,
        "alarm": onset,
        "kind": kind,
        "severity": severity,
        "outcome": "none",
        "attempt": 0,
        "onset": onset,
        "ranks": None,
        "verdict": "lr_change",
        "suspects": [["lr_change", 0.95], ["bad_shard", 0.05]],
        "crashed": [],
        **changes,
    }


def result(cause: str = "lr_change", kind: str = "lr_jump", found: Any = (), **changes: Any) -> dict[str, Any]:
    truth = {
        "kind": kind,
        "cause": cause,
        "held_out": False,
        "level": 0,
        "base": "fp32-0",
        "precision": "fp32",
        "fork_step": 90,
        "onset_step": 100,
        "ranks": [0, 1, 2, 3],
        **changes.pop("truth", {}),
    }
    final = [{k: v for k, v in one.items() if k != "at"} for one in found]
    return {
        "name": "x",
        "truth": truth,
        "last_step": 140,
        "said": list(found),
        "final": final,
        "hash_live": "a",
        "hash_post": "a",
        "spike": {"step": 100, "excess": 1.0, "steps": 3},
        "rules": {rule.name: [] for rule in rules.RULES},
        **changes,
    }


def test_a_named_fault_counts_and_a_missed_one_does_not() -> None:
    figures = score.summary([result(found=[said()]), result(), result(cause="bad_shard", found=[said()])])
    assert figures["recall"] == pytest.approx(2 / 3, abs=1e-4)
    assert figures["detected"] == pytest.approx(2 / 3, abs=1e-4)
    assert figures["top1"] == 0.5
    assert figures["top2"] == 1.0
    assert figures["confusion"] == {"bad_shard": {"lr_change": 1}, "lr_change": {"lr_change": 1}}


def test_what_was_said_before_the_fault_is_no_detection() -> None:
    early = said(onset=80)
    assert score.first_alarm(result(found=[early])) is None
    assert score.first_alarm(result(found=[said(onset=98, at=99, alarm=99)])) is None
    assert score.first_alarm(result(found=[said(onset=98, at=102, alarm=100)])) is not None


def test_the_answer_is_the_one_that_stood_two_steps_after_the_alarm() -> None:
    first = said(suspects=[["bad_shard", 0.9]], verdict="bad_shard")
    later = said(at=110)
    one = result(found=[first, later])
    assert score.named(score.answer_at(one)) == [("bad_shard", 0.9)]


def test_ranks_must_be_exactly_the_culprits() -> None:
    right = result(found=[said(ranks=[2])], truth={"ranks": [2]})
    more = result(found=[said(ranks=[1, 2])], truth={"ranks": [2]})
    everyone = result(found=[said(ranks=[1, 2])])
    assert score.summary([right, more, everyone])["rank_accuracy"] == 0.5


def test_false_alarms_on_twins_and_benign_runs() -> None:
    twin = result(cause="none", kind="", spike=None, found=[said(onset=60)], truth={"onset_step": None})
    hard = result(cause="benign", kind="hard_batch", found=[said(severity="info")])
    loud = result(cause="benign", kind="hard_batch", found=[said(severity="warning")])
    figures = score.summary([twin, hard, loud])
    assert figures["false_alarms"] == 2  # the twin's, and the loud one; a bump that is there may be told quietly
    assert figures["healthy_steps"] == (140 - 48 + 1) + 2 * (140 - 90 + 1)
    assert figures["errors_on_healthy"] == 0


def test_steps_that_two_twins_share_count_once() -> None:
    one = result(cause="none", kind="", spike=None, truth={"onset_step": None, "fork_step": 90})
    two = result(cause="none", kind="", spike=None, truth={"onset_step": None, "fork_step": 120}, last_step=170)
    assert [(first, last) for _, first, last in score.healthy([two, one])] == [(48, 140), (90, 170)]


def test_calibration_error_of_a_known_case() -> None:
    points = [(0.95, True)] * 3 + [(0.95, False)] + [(0.55, True), (0.55, False)]
    assert score.calibration_error(points) == pytest.approx((4 * 0.2 + 2 * 0.05) / 6, abs=1e-4)


def test_splits_share_nothing_that_matters() -> None:
    runs = list(plan.runs())
    tuning = [run for run in runs if run.split == "tuning"]
    report = [run for run in runs if run.split == "report"]
    assert len(runs) >= 600
    assert len({run.name for run in runs}) == len(runs)
    assert {run.scene.seed for run in tuning} == set(TUNING_SEEDS)
    assert {run.scene.seed for run in report} == set(REPORT_SEEDS)
    assert not {run.kind for run in tuning} & set(HELD_OUT)
    assert set(HELD_OUT) <= {run.kind for run in report}
    assert {run.kind for run in tuning} - {""} == {kind.name for kind in KINDS} - set(HELD_OUT)
    assert set(HELD_OUT) == {kind.name for kind in held_out.KINDS}
    assert all(f"generation {GENERATION}/" in run.draw for run in runs if run.kind)
    assert {run.kind for run in report} - {""} == {kind.name for kind in KINDS}


def test_a_part_of_the_bench_is_the_same_as_in_the_whole() -> None:
    whole = {run.name: run for run in plan.runs()}
    part = list(plan.runs([201]))
    assert part
    assert all(whole[run.name] == run for run in part)


def test_the_rules_of_others_fire_where_their_formulas_say() -> None:
    flat = {step: 2.0 + 0.01 * (step % 3) for step in range(160)}
    spiked = {**flat, 150: 2.5}
    blown = {**flat, **dict.fromkeys(range(150, 160), 40.0)}
    fired = {
        rule.name: (rule.alarms(flat, {}), rule.alarms(spiked, {}), rule.alarms(blown, {})) for rule in rules.RULES
    }
    assert fired["OLMo-core"] == ([], [150], [150, 151, 152, 153])  # then its own deviation hides them
    assert fired["Lightning"] == ([], [], list(range(150, 160)))
    assert fired["llm-foundry"][:2] == ([], [])
    assert fired["llm-foundry"][2][0] == 154
    assert fired["Megatron-LM"] == ([], [], list(range(150, 160)))
    assert fired["trainscope (CUSUM)"][1] == [150]
    assert fired["trainscope (z-score)"][1] == [150]
