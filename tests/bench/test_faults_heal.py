"""What is counted of runs that were brought back, and one run that is."""

import pytest
from bench.faults import heal_score


def result(kind, policy, gap, *, rolled=1, spiky=True, again=30, skipped=2.0):
    return {
        "name": f"{kind}-{policy}",
        "kind": kind,
        "spiky": spiky,
        "policy": policy,
        "gap_nats": gap,
        "rollbacks": [{"checkpoint": 200}] * rolled,
        "steps_again": again * rolled,
        "batches_skipped": skipped * rolled,
        "asked": "",
    }


def test_back_is_within_the_band_and_a_lost_run_is_not_back():
    figures = heal_score.summary(
        [
            result("a", "auto", 0.03),
            result("b", "auto", -0.031),
            result("c", "auto", None),
            result("d", "auto", 0.0, rolled=0),
            result("e", "asked", 0.0, spiky=False, rolled=0),
            result("f", "asked", 0.0, spiky=False),
        ]
    )["auto"]
    assert figures["runs"] == 4
    assert figures["rolled_back"] == 3
    assert figures["back"] == 0.5
    assert figures["back_of_rolled_back"] == pytest.approx(1 / 3, abs=1e-4)
    assert figures["steps_again"] == 30
    assert (figures["healthy_rolled_back"], figures["healthy_runs"]) == (1, 2)


def test_policies_stand_side_by_side_by_kind():
    results = [result("a", "nothing", 0.4, rolled=0), result("a", "auto", 0.0), result("b", "auto", 0.4)]
    results.append(result("b", "nothing", 0.4, rolled=0))
    assert list(heal_score.by_kind(results, ("nothing", "auto"))) == [("a", 1, [0, 1]), ("b", 1, [0, 0])]
