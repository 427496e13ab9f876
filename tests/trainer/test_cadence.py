"""The interval between checkpoints: the formulas against a simulation, their limits, and the arithmetic in words."""

import math
import random

import pytest

from runhealth.storage.errors import ConfigError
from runhealth.trainer import cadence as cadences
from runhealth.trainer.cadence import cadence, daly_s, effective_training, job_mtbf_s, young_s


def simulated_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float, seed: int) -> float:
    """Share of wall time that is kept, drawn failure by failure: no formula in it."""
    draw = random.Random(seed)
    wall = kept = 0.0
    cycle = interval_s + save_s
    for _ in range(40_000):
        left = draw.expovariate(1 / mtbf_s)
        wall += left
        left -= restart_s  # a failure during a restart starts it again
        if left > 0:
            kept += interval_s * (left // cycle)
    return kept / wall


def test_young_is_the_textbook_number():
    assert young_s(60, 24 * 3600) == pytest.approx(math.sqrt(2 * 60 * 86_400))


@pytest.mark.parametrize(("save_s", "mtbf_s", "restart_s"), [(30, 3600, 120), (5, 600, 20), (300, 7200, 600)])
def test_the_effective_share_agrees_with_a_simulation(save_s: float, mtbf_s: float, restart_s: float):
    best = daly_s(save_s, mtbf_s)
    share = effective_training(best, save_s, mtbf_s, restart_s)
    assert share == pytest.approx(simulated_share(best, save_s, mtbf_s, restart_s, 7), abs=0.01)


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(30, 3600), (5, 600), (300, 7200), (1, 86_400)])
def test_no_other_interval_beats_daly_by_more_than_a_thousandth(save_s: float, mtbf_s: float):
    best = effective_training(daly_s(save_s, mtbf_s), save_s, mtbf_s)
    others = [effective_training(daly_s(save_s, mtbf_s) * f / 100, save_s, mtbf_s) for f in range(20, 400)]
    assert max(others) - best < 1e-3
    assert effective_training(daly_s(save_s, mtbf_s) * 4, save_s, mtbf_s) < best
    assert effective_training(daly_s(save_s, mtbf_s) / 4, save_s, mtbf_s) < best


def test_a_cheap_save_makes_both_formulas_agree_and_a_dear_one_is_made_once_a_failure():
    assert daly_s(0.01, 1e6) == pytest.approx(young_s(0.01, 1e6), rel=1e-3)
    assert daly_s(500, 200) == 200


def test_what_is_written_in_the_background_costs_at_a_failure_and_bounds_the_interval():
    blocking = cadence(save_s=60, mtbf_s=3600, restart_s=60)
    background = cadence(save_s=1, write_s=59, mtbf_s=3600, restart_s=60)
    assert background.interval_s < blocking.interval_s
    assert background.effective > blocking.effective
    assert background.effective < cadence(save_s=1, mtbf_s=3600, restart_s=60).effective
    slow = cadence(save_s=0.1, write_s=500, mtbf_s=3600)
    assert slow.interval_s == 500
    assert any("raised to 8.33 min" in line for line in slow.explain())


def test_the_arithmetic_is_said_with_its_numbers():
    found = cadence(save_s=12, mtbf_s=6 * 3600, restart_s=180)
    text = "\n".join(found.explain())
    assert "sqrt(2 * 12 * 2.16e+04) = 12 min" in text
    assert f"{found.effective:.2%}" in text
    assert found.every_steps(2.0) == round(found.interval_s / 2)
    assert found.every_steps(1e6) == 1


def test_failures_of_parts_add_up():
    assert job_mtbf_s(5e4 * 3600, 16_384) == pytest.approx(3.05 * 3600, rel=0.01)


@pytest.mark.parametrize(
    "bad", [{"save_s": 0.0}, {"mtbf_s": -1.0}, {"mtbf_s": math.inf}, {"restart_s": -1.0}, {"write_s": math.nan}]
)
def test_impossible_times_are_refused(bad: dict[str, float]):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        cadence(**{"save_s": 1.0, "mtbf_s": 100.0, **bad})


def test_durations_read_well():
    said = [cadences.duration(s) for s in (0.0421, 4.2, 600, 10_000, 200_000)]
    assert said == ["42.1 ms", "4.2 s", "10 min", "2.78 h", "2.31 days"]
