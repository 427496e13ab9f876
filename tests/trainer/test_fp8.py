import math

import pytest
import torch

from runhealth.instrument.precision import HasPrecisionStats
from runhealth.trainer.precision.fp8 import HISTORY, DelayedScale, Fp8Linear, power_of_two_scale


def test_scale_is_the_largest_power_of_two_that_fits():
    assert power_of_two_scale(448.0, 448.0) == 1.0
    assert power_of_two_scale(448.0, 449.0) == 0.5
    assert power_of_two_scale(448.0, 1.0) == 256.0
    assert power_of_two_scale(57344.0, 3.5) == 16384.0
    assert power_of_two_scale(448.0, 0.0) == power_of_two_scale(448.0, math.inf) == 1.0


def test_counts_against_values_worked_out_by_hand():
    scale = DelayedScale(torch.float8_e4m3fn)
    scale.history[0] = 448.0  # believed amax 448: scale 1
    # e4m3: largest 448, smallest positive 2**-9; half of that and less rounds to zero
    x = torch.tensor([448.0, 449.0, -1000.0, 2.0**-9, 2.0**-10, -(2.0**-11), 0.0, 17.0])
    seen = scale.cast(x, record=True)
    assert scale.overflow_count == 2  # 449 and -1000
    assert scale.underflow_count == 2  # 2**-10 (ties to even: zero) and -2**-11; the zero itself does not count
    assert scale.elements == 8
    assert (scale.amax, scale.amax_believed) == (1000.0, 448.0)
    assert seen.tolist() == [448.0, 448.0, -448.0, 2.0**-9, 0.0, 0.0, 0.0, 16.0]  # 17 lies between 16 and 18


def test_gradients_are_clamped_where_e5m2_would_overflow_to_infinity():
    scale = DelayedScale(torch.float8_e5m2)
    scale.history[0] = 57344.0
    seen = scale.cast(torch.tensor([1e6, -1e6, 1.0]), record=True)
    assert seen.tolist() == [57344.0, -57344.0, 1.0]
    assert scale.overflow_count == 2


def test_scaling_is_delayed_and_the_history_forgets_after_16_steps():
    scale = DelayedScale(torch.float8_e4m3fn)
    scale.cast(torch.tensor([100.0]), record=True)  # empty history: the tensor's own amax
    assert (scale.amax_believed, scale.overflow_count) == (100.0, 0)
    scale.cast(torch.tensor([1000.0]), record=True)  # the scale is still that of 100
    assert (scale.amax_believed, scale.overflow_count) == (100.0, 1)
    for _ in range(HISTORY):
        scale.cast(torch.tensor([1.0]), record=True)
        assert scale.amax_believed in (1000.0,)
    scale.cast(torch.tensor([1.0]), record=True)
    assert scale.amax_believed == 1.0


def test_nothing_is_recorded_in_evaluation_or_without_gradients():
    layer = Fp8Linear(4, 3)
    torch.nn.init.ones_(layer.weight)
    layer.eval()
    layer(torch.ones(2, 4))
    layer.train()
    with torch.no_grad():
        layer(torch.ones(2, 4))
    assert layer.x.elements == layer.w.elements == 0
    assert not layer.x.history.any()


def test_a_non_finite_tensor_does_not_enter_the_history():
    scale = DelayedScale(torch.float8_e4m3fn)
    scale.cast(torch.tensor([2.0]), record=True)
    scale.cast(torch.tensor([math.inf, 1.0]), record=True)
    scale.cast(torch.tensor([math.nan, 1.0]), record=True)
    assert float(scale.history.max()) == 2.0
    assert scale.overflow_count == 1


def test_linear_matches_fp32_within_fp8_and_exactly_in_high_precision():
    torch.manual_seed(0)
    layer = Fp8Linear(64, 32)
    torch.nn.init.normal_(layer.weight, std=0.1)
    x = torch.randn(8, 64, requires_grad=True)
    exact = torch.nn.functional.linear(x, layer.weight)
    low = layer(x)  # with its graph: the backward pass is tested too
    assert 0 < float((low - exact).detach().norm() / exact.detach().norm()) < 0.05
    low.sum().backward()
    assert layer.weight.grad is not None
    expected = x.detach().sum(0).expand(32, 64)
    assert float((layer.weight.grad - expected).norm() / expected.norm()) < 0.05
    layer.high_precision = True
    assert torch.equal(layer(x), exact)


def test_stats_follow_the_protocol_of_the_monitor():
    layer = Fp8Linear(4, 3)
    torch.nn.init.ones_(layer.weight)
    layer(torch.full((2, 4), 3.0)).sum().backward()
    assert isinstance(layer, HasPrecisionStats)
    stats = layer.runhealth_precision_stats()
    assert {role: values["elements"] for role, values in stats.items()} == {"x": 8, "w": 12, "g": 6}
    assert stats["x"]["amax"] == 3.0


def test_histories_are_part_of_the_state_and_counters_are_not():
    layer = Fp8Linear(4, 3)
    assert set(layer.state_dict()) == {"weight", *(f"{r}.{b}" for r in "xwg" for b in ("history", "cursor"))}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_forgetting_empties_and_thaws(dtype: torch.dtype):
    scale = DelayedScale(dtype)
    scale.cast(torch.tensor([2.0]), record=True)
    scale.frozen = True
    scale.forget()
    assert not scale.frozen
    assert not scale.history.any()
