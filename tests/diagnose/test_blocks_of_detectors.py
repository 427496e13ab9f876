"""The detectors of loss and gradient in blocks: the same alarms and the same state, to the last bit, as row by row."""

import math
from collections import deque

import numpy as np
import pytest

from runhealth.diagnose.detectors.gradient_spike import GradientSpike
from runhealth.diagnose.detectors.loss_divergence import LossDivergence
from runhealth.diagnose.detectors.loss_spike import LossSpike
from runhealth.diagnose.detectors.rank_outlier import RankOutlier
from runhealth.diagnose.detectors.scale_change import ScaleChange
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.storage.blocks import Column, StepBlock

CUTS = (1, 7, 64, 500, 5000)


def plain(value):
    """What a state is made of, floats to the last bit; nothing of numpy may be left in it."""
    assert not type(value).__module__.startswith("numpy"), type(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(item) for item in value]
    if hasattr(value, "__dict__"):
        return type(value).__name__, plain(vars(value))
    if hasattr(value, "__slots__"):
        return type(value).__name__, {name: plain(getattr(value, name)) for name in value.__slots__}
    return value


def agree(cls, block, rng):
    """Feed both ways; return the number of alarms."""
    one, other = cls(), cls()
    expected = [(i, alarm) for i in range(len(block)) for alarm in one.update(block.frame(i))]
    found, start = [], 0
    while start < len(block):
        stop = min(len(block), start + int(rng.choice(CUTS)))
        found += [(start + i, alarm) for i, alarm in other.update_block(block.part(start, stop))]
        start = stop
    assert [(i, repr(alarm)) for i, alarm in found] == [(i, repr(alarm)) for i, alarm in expected]
    assert plain(one) == plain(other)
    return len(found)


def losses(rng, n):
    """Descents with noise of all kinds, spikes, plateaus, climbs, zeros, negatives and what is not finite."""
    t = np.arange(n)
    y = 2 + 6 * (1 + t / rng.uniform(5, 300)) ** -rng.uniform(0.3, 1)
    noise = rng.standard_t(3, n) if rng.random() < 0.5 else rng.normal(size=n)
    y = y + rng.choice([0.001, 0.01, 0.05, 0.3]) * noise
    for _ in range(rng.integers(0, 6)):
        start = rng.integers(0, n)
        y[start : start + rng.choice([1, 2, 5, 40, 700])] *= rng.choice([0.5, 1.1, 1.4, 5, 1e6])
    if rng.random() < 0.5:
        y = np.maximum(y, 1e-3)
    for _ in range(rng.integers(0, 4)):
        start = rng.integers(0, n)
        y[start : start + rng.choice([1, 3])] = rng.choice([np.nan, 0.0, -1.0, np.inf])
    if rng.random() < 0.3:
        start = rng.integers(0, n)
        y[start:] *= np.exp(0.003 * np.arange(n - start))
    return y


def norms(rng, n):
    y = np.exp(rng.normal(size=n) * rng.choice([0.02, 0.1, 0.3, 0.8]))
    for _ in range(4):
        start = rng.integers(0, n)
        y[start : start + rng.choice([1, 3, 50, 300])] *= rng.choice([5, 16, 30])
    if rng.random() < 0.5:
        y[rng.random(n) < 0.02] = rng.choice([0.0, np.inf, np.nan])
    return y


def block(rng, columns, ranks=1):
    n = len(next(iter(columns.values())))
    steps = np.cumsum(rng.integers(1, 4, n))
    made = {}
    for name, values in columns.items():
        values = values.reshape(n, ranks)
        made[name] = Column(values=values, present=rng.random(values.shape) > rng.choice([0, 0, 0.1]))
    stamps = np.zeros((n, ranks), dtype=np.int64)
    return FrameBlock.of(StepBlock(attempt=0, ranks=tuple(range(ranks)), steps=steps, ts_ns=stamps, columns=made))


@pytest.mark.parametrize("cls", [LossSpike, LossDivergence, GradientSpike, ScaleChange])
def test_one_rank(cls):
    alarms = 0
    for seed in range(24):
        rng = np.random.default_rng([seed, 7])
        n = int(rng.integers(50, 2500))
        loss, norm = losses(rng, n), norms(rng, n)
        if rng.random() < 0.3:  # the mean in place of what is not finite
            for row in range(int(rng.integers(10, n)), n, int(rng.choice([1, 50]))):
                norm[row], loss[row] = np.inf, loss[:row][np.isfinite(loss[:row])].mean()
        lr = np.full(n, 1e-4) * (1 + np.arange(n) / n)
        alarms += agree(cls, block(rng, {"loss": loss, "grad_norm": norm, "lr": lr}), rng)
    assert alarms >= 3


def test_several_ranks():
    alarms = 0
    for seed in range(24):
        rng = np.random.default_rng([seed, 8])
        n, ranks = 900, int(rng.choice([1, 2, 2, 3, 4, 8]))
        descent = (2 + 4 * np.exp(-np.arange(n) / 100))[:, None]
        loss = descent * np.exp(0.02 * rng.normal(size=(n, ranks)))
        norm = np.exp(0.2 * rng.normal(size=(n, ranks)))
        norm[500 : int(rng.choice([520, n])), -1] *= rng.choice([1, 8])
        loss[700:, 0] *= rng.choice([1, 0.5])
        alarms += agree(RankOutlier, block(rng, {"loss": loss, "grad_norm_rank": norm}, ranks), rng)
    assert alarms >= 5
