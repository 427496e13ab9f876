import math
import random
import statistics

import pytest

from runhealth.diagnose.robust import MAD_TO_SIGMA, Baseline, SortedWindow, mad_sigma, median


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 128, 511])
@pytest.mark.parametrize("shift", [0.0, -3.0, 0.4, 3.0])
def test_mad_agrees_with_its_definition(count, shift):
    rng = random.Random(count)
    values = sorted(rng.choice([rng.gauss(0, 1), 0.5, rng.expovariate(1)]) for _ in range(count))
    center = median(values) + shift
    expected = MAD_TO_SIGMA * statistics.median([abs(v - center) for v in values])
    assert mad_sigma(values, center) == pytest.approx(expected)


def test_sorted_window_is_the_median_of_the_last_values():
    rng = random.Random(1)
    window, values = SortedWindow(16), []
    for _ in range(200):
        value = rng.choice([rng.gauss(0, 1), 0.25])
        values.append(value)
        left = window.push(value)
        assert left == (values[-17] if len(values) > 16 else None)
        assert window.median() == pytest.approx(statistics.median(values[-16:]))


def test_baseline_knows_when_it_knows_nothing():
    habit = Baseline(32, least=4)
    assert not habit.ready
    assert math.isnan(habit.center)
    habit.extend([1.0, 1.0, 1.0, 1.0])
    assert habit.ready
    assert habit.z(2.0) == math.inf
    floored = Baseline(32, least=4, floor=0.5)
    floored.extend([1.0, 1.0, 1.0, 1.0])
    assert floored.z(2.0) == pytest.approx(2.0)
