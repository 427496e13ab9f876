"""The loss detector on curves of the kinds that `bench/detectors.py` makes, at seeds of their own."""

import math

import numpy as np
import pytest

from runhealth.diagnose.detectors.loss_spike import LossSpike
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.rollback import wants_rollback
from runhealth.diagnose.service import diagnose
from runhealth.storage.blocks import Column, StepBlock
from runhealth.storage.records import StepRecord

STEPS = 6000
SEEDS = range(2000, 2006)  # neither tuning (0-99) nor report seeds (1000-1099) of the bench


def block_of(columns, first=0):
    """One rank; a NaN of a column other than the loss was not logged."""
    n = len(columns["loss"])
    made = {}
    for name, values in columns.items():
        values = np.asarray(values, dtype=float).reshape(n, 1)
        made[name] = Column(values=values, present=None if name == "loss" else ~np.isnan(values))
    steps = np.arange(first, first + n)
    return FrameBlock.of(
        StepBlock(attempt=0, ranks=(0,), steps=steps, ts_ns=np.zeros((n, 1), dtype=np.int64), columns=made)
    )


def alarms_of(series):
    return [alarm for _, alarm in LossSpike().update_block(block_of({"loss": series}))]


def steps_of(series):
    return [alarm.step for alarm in alarms_of(series)]


def curve(rng, sigma, heavy, steps=STEPS):
    """Nats; about 10.8 down to about 2.7."""
    noise = rng.standard_t(5, steps) / math.sqrt(5 / 3) if heavy else rng.normal(size=steps)
    return 2.2 + 8.6 * (1 + np.arange(steps) / 60) ** -0.6 + sigma * noise


def spiked(series, height, at):
    """Three rows high, then back within a few."""
    out = series.copy()
    for step in at:
        out[step : step + 12] += height * np.exp(-np.maximum(0, np.arange(12) - 2) / 2)
    return out


AT = (3000, 3700, 4400, 5100)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(("height", "sigma", "least"), [(0.1, 0.02, 0.85), (0.3, 0.05, 0.95), (1.0, 0.1, 0.95)])
def test_recall_within_two_steps(heavy, height, sigma, least):
    hits = total = 0
    for seed in SEEDS:
        found = steps_of(spiked(curve(np.random.default_rng(seed), sigma, heavy), height, AT))
        hits += sum(any(at <= step <= at + 2 for step in found) for at in AT)
        total += len(AT)
    assert hits >= least * total


@pytest.mark.parametrize(("heavy", "most"), [(False, 1e-4), (True, 2e-4)])
def test_noise_is_no_spike_whatever_its_tails(heavy, most):
    """The bar is 1 in 10,000 over all kinds of noise; these are the smallest and the largest of either."""
    steps = 20_000
    series = [curve(np.random.default_rng(seed), sigma, heavy, steps) for seed in SEEDS for sigma in (0.01, 0.1)]
    assert sum(len(steps_of(one)) for one in series) <= most * steps * len(series)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_alarm_a_spike(seed):
    found = steps_of(spiked(curve(np.random.default_rng(seed), 0.02, True), 1.0, AT))
    assert [min(AT, key=lambda at: abs(at - step)) for step in found] == list(AT)


def test_a_taller_spike_soon_after_a_small_one_is_told():
    series = curve(np.random.default_rng(2000), 0.02, False)
    series = spiked(spiked(series, 0.12, (4000,)), 2.0, (4016,))
    assert [alarm.onset_step for alarm in alarms_of(series)] == [4000, 4016]


def test_the_alarm_of_several_rows_names_the_first_and_the_highest():
    series = curve(np.random.default_rng(2001), 0.02, False)
    series[4000:4004] += 0.085
    (alarm,) = alarms_of(series)
    assert 4000 <= alarm.onset_step <= alarm.step <= 4003
    assert alarm.value == pytest.approx(max(series[alarm.onset_step : alarm.step + 1]))
    assert "rows that lie high" in alarm.message


def test_the_scale_comes_from_the_series_itself():
    rng = np.random.default_rng(2002)
    scattering = np.exp(1.2 * rng.normal(size=4000) - 5)  # scatters by 100 x
    assert steps_of(scattering) == []
    tight = 0.02 * np.exp(0.01 * rng.normal(size=4000))
    assert steps_of(tight) == []
    tight[3000:3003] *= 1.2
    assert steps_of(tight) == [3000]


def test_a_large_loss_is_not_read_as_nats():
    rng = np.random.default_rng(2003)
    sums = 4000 + rng.normal(size=3000)  # +0.1 nats would be 1 in 40,000 of it
    sums[2000:2003] += 12
    assert steps_of(sums) == []


def test_rows_over_five_sigma_are_told_once_they_are_a_habit():
    rng = np.random.default_rng(2004)
    series = 2.5 * np.exp(0.02 * rng.normal(size=6000))
    bumps = np.arange(300, 6000, 100)
    series[bumps] *= 1.18
    found = set(steps_of(series))
    assert len(found & set(bumps.tolist())) >= 0.8 * len(bumps)


def findings_of(list_source, series):
    return diagnose(list_source([StepRecord(attempt=0, step=i, rank=0, ts_ns=0, values={"loss": float(v)})
                                 for i, v in enumerate(series)])).findings  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_small_rise_is_told_quietly_and_rolls_nothing_back(list_source, seed):
    series = curve(np.random.default_rng(seed), 0.02, False)
    series[4000:] *= 1.05  # as where the mix of the data changes
    (finding,) = findings_of(list_source, series)
    assert (finding.kind, finding.severity) == ("loss_spike", Severity.INFO)
    assert abs(finding.onset_step - 4000) <= 3
    assert finding.details["small"]
    assert not wants_rollback(finding)


def test_a_large_rise_is_told_aloud(list_source):
    series = curve(np.random.default_rng(2000), 0.02, False)
    series[4000:] *= 1.3
    (finding,) = findings_of(list_source, series)
    assert finding.severity is Severity.ERROR
    assert "small" not in finding.details
    assert wants_rollback(finding)


@pytest.mark.parametrize("rows", [1, 5, 60, 400])
def test_a_mean_printed_for_what_is_not_finite_is_no_spike(list_source, rows):
    rng = np.random.default_rng(2005)
    records, losses = [], []
    for step in range(900):
        loss, norm = 2 + 6 * math.exp(-step / 80) + 0.02 * rng.normal(), math.exp(0.2 * rng.normal())
        if 300 <= step < 300 + rows:
            loss, norm = sum(losses) / len(losses), math.nan
        else:
            losses.append(loss)
        values = {"loss": round(loss, 4), "grad_norm": norm}
        records.append(StepRecord(attempt=0, step=step, rank=0, ts_ns=0, values=values))
    kinds = {finding.kind for finding in diagnose(list_source(records)).findings}
    assert "masked_non_finite" in kinds
    assert not kinds & {"loss_spike", "loss_divergence"}
