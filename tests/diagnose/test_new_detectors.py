"""Detectors of the truth of the log, evaluation, resumes, ranks and memory: the fault, and its benign twin."""

import math

import numpy as np
import pytest

from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.service import diagnose
from runhealth.storage.records import RunEvent, StepRecord

CLASSES = {cls.name: cls for cls in detector_classes()}
SEEDS = range(100, 106)


def run(name, rows):
    """rows: (step, {signal: value}) of one rank, or {rank: {...}}; (attempt, step, ...) where attempts matter."""
    detector, alarms, attempt = CLASSES[name](), [], 0
    for row in rows:
        *number, step, values = row
        frame = Frame(number[0] if number else 0, step)
        frame.new_attempt = frame.attempt != attempt
        attempt = frame.attempt
        frame.ranks = values if values and isinstance(next(iter(values)), int) else {0: values}
        frame.seal()
        alarms += detector.update(frame)
    return alarms + detector.finish()


def descent(seed, rows, sigma=0.02):
    rng = np.random.default_rng(seed)
    return 2 + 4 * np.exp(-np.arange(rows) / 150) * (1 + sigma * rng.normal(size=rows)) + sigma * rng.normal(size=rows)


def test_placeholder_on_some_ranks_and_in_one_signal():
    rows = [(s, {0: {"loss": -1.0}, 1: {"loss": -1.0}, 2: {"loss": 2.0 + s}}) for s in range(30)]
    (alarm,) = run("placeholder", rows)
    assert (alarm.ranks, alarm.signal) == ((0, 1), "loss")
    (alarm,) = run("placeholder", [(s, {"loss": 2.0 + s, "grad_norm": 0.0}) for s in range(30)])
    assert alarm.signal == "grad_norm"
    assert run("placeholder", [(s, {"loss": 0.0, "grad_norm": 0.0}) for s in range(30)]) == []
    assert run("placeholder", [(s, {"loss": 2.0 + s, "grad_norm": float(s > 20)}) for s in range(30)]) != []
    assert run("placeholder", [(s, {"loss": 2.0 + s, "grad_norm": float(s > 2)}) for s in range(30)]) == []


def test_a_loss_that_repeats_all_digits():
    (alarm,) = run("not_stepping", [(s, {"loss": 2.0 + s if s < 5 else 2.302585}) for s in range(40)])
    assert alarm.onset_step == 5
    assert run("not_stepping", [(s, {"loss": 0.01}) for s in range(40)]) == []
    assert run("not_stepping", [(s, {"loss": 2.302585 + 1e-6 * s}) for s in range(40)]) == []
    frozen = [(s, {"loss": 2.302585, "lr": 0.0}) for s in range(40)]
    assert run("not_stepping", frozen) == []


def test_weights_that_do_not_move_under_a_gradient():
    rows = [(s, {"loss": 2.0 + 0.1 * math.sin(s), "grad_norm": 1.0, "weight_norm": 301.5522}) for s in range(100)]
    assert [a.signal for a in run("not_stepping", rows)] == ["weight_norm"]
    moving = [(s, {**v, "weight_norm": 301.5522 + 1e-3 * s}) for s, v in rows]
    assert run("not_stepping", moving) == []
    skipped = [(s, {"loss": 2.0 + 0.1 * math.sin(s), "step_skipped": int(s >= 10)}) for s in range(60)]
    assert [a.onset_step for a in run("not_stepping", skipped)] == [10]
    some = [(s, {"loss": 2.0 + 0.1 * math.sin(s), "step_skipped": s % 7 == 0}) for s in range(60)]
    assert run("not_stepping", some) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [4.0, 0.125])
def test_an_exact_factor(seed, factor):
    series = descent(seed, 900)
    assert run("scale_change", [(s, {"loss": float(v)}) for s, v in enumerate(series)]) == []
    series[600:] *= factor
    (alarm,) = run("scale_change", [(s, {"loss": float(v)}) for s, v in enumerate(series)])
    assert alarm.onset_step == 600


@pytest.mark.parametrize("seed", SEEDS)
def test_factors_that_are_not_exact_and_bumps_that_decay(seed):
    series = descent(seed, 900)
    series[600:] *= 2.5
    assert run("scale_change", [(s, {"loss": float(v)}) for s, v in enumerate(series)]) == []
    series = descent(seed, 900)
    series[600:] *= 1 + 2 * np.exp(-np.arange(300) / 6)
    assert run("scale_change", [(s, {"loss": float(v)}) for s, v in enumerate(series)]) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_staircase_of_epochs(seed):
    rng = np.random.default_rng(seed)
    stairs = [1.5 * 0.8 ** (s // 100) * (1 + 0.04 * rng.normal()) for s in range(500)]
    rows = [(s, {"loss": float(v), "epoch": (s + 1) / 100}) for s, v in enumerate(stairs)]
    assert [a.onset_step for a in run("epoch_staircase", rows)] == [100]
    smooth = [(s, {"loss": float(v), "epoch": (s + 1) / 100}) for s, v in enumerate(descent(seed, 500))]
    assert run("epoch_staircase", smooth) == []


def evaluations(train, evaluation, every=50):
    for step, loss in enumerate(train):
        values = {"loss": float(loss)}
        if (step + 1) % every == 0:
            values["eval_loss"] = float(evaluation[step // every])
        yield step, values


@pytest.mark.parametrize("seed", SEEDS)
def test_overfitting(seed):
    rng = np.random.default_rng(seed)
    train = descent(seed, 1000, 0.01)
    course = np.concatenate([2.6 * np.exp(-np.arange(8) / 8) + 1.6, np.linspace(2.75, 3.5, 12)])
    noise = 1 + 0.004 * rng.normal(size=20)
    alarms = run("overfitting", evaluations(train, course * noise))
    assert all(300 <= alarm.onset_step <= 450 for alarm in alarms)
    assert alarms[-1].severity is Severity.WARNING
    assert len(alarms) <= 2
    assert run("overfitting", evaluations(train, (2.6 * np.exp(-np.arange(20) / 8) + 1.6) * noise)) == []
    flat = np.full(20, 2.5) * (1 + 0.01 * rng.normal(size=20))
    assert run("overfitting", evaluations(train, flat)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_evaluation_drift(seed):
    rng = np.random.default_rng(seed)
    train = np.full(1000, 2.0) * (1 + 0.01 * rng.normal(size=1000))
    course = 2.2 * (1 + 0.004 * rng.normal(size=20))
    assert run("eval_drift", evaluations(train, course)) == []
    drifted = course.copy()
    drifted[12:] *= 1.3
    (alarm,) = run("eval_drift", evaluations(train, drifted))
    assert alarm.onset_step == 649
    both = train.copy()
    both[600:] *= 1.3
    assert run("eval_drift", evaluations(both, drifted)) == []


def resumed(seed, change, first=260, positions=None):
    series = descent(seed, 600)
    rng = np.random.default_rng(seed + 1)
    for attempt, (low, high) in enumerate([(0, 300), (first, 600)]):
        for step in range(low, high):
            values = {"loss": float(series[step] * (1 + 0.01 * rng.normal()) * (change if attempt else 1))}
            if positions:
                values["consumed_samples"] = positions(attempt, step)
            yield attempt, step, values


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [260, 300])
def test_a_jump_at_a_resume(seed, first):
    assert run("resume_jump", resumed(seed, 1.0, first)) == []
    (alarm,) = run("resume_jump", resumed(seed, 1.15, first))
    assert alarm.onset_step == first
    (alarm,) = run("resume_jump", resumed(seed, 0.8, first))
    assert alarm.onset_step == first


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_run_is_no_resume_and_repeated_data_explain_a_low_loss(seed):
    series = descent(seed, 300)
    twice = [(attempt, s, {"loss": float(v)}) for attempt in (0, 1) for s, v in enumerate(series)]
    assert run("resume_jump", twice) == []
    again = resumed(seed, 0.8, positions=lambda attempt, step: 8 * (step - 150 * attempt))
    assert run("resume_jump", again) == []


def test_a_rank_that_stops_writing():
    ranks = {rank: {"loss": 2.0} for rank in range(4)}
    rows = [(s, ranks if s < 50 else {r: ranks[r] for r in (0, 1, 3)}) for s in range(100)]
    (alarm,) = run("dead_rank", rows)
    assert (alarm.ranks, alarm.onset_step) == ((2,), 50)
    assert run("dead_rank", rows[:60]) == []
    sparse = [(s, ranks if s % 5 == 0 else {0: ranks[0], 1: ranks[1]}) for s in range(200)]
    assert run("dead_rank", sparse) == []


def test_a_gap_of_an_hour():
    def alarms(gap_s):
        detector, found, now = CLASSES["hang"](), [], 10**18
        for step in range(60):
            frame = Frame(0, step)
            now += int((gap_s if step == 40 else 2.0 + 0.1 * (step % 3)) * 1e9)
            frame.ts_ns = now
            frame.ranks = {0: {"loss": 2.0}}
            frame.seal()
            found += detector.update(frame)
        return [a.step for a in found]

    assert alarms(3600) == [40]
    assert alarms(600) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_grows_and_memory_that_warms_up(seed):
    rng = np.random.default_rng(seed)
    rows = np.arange(1200)

    def grown(values):
        return run(
            "memory_growth", [(int(s), {"mem_allocated_bytes": int(v)}) for s, v in zip(rows, values, strict=True)]
        )

    saw = 1e8 * (rows % 50) + 2e8 * rng.random(1200)
    (alarm,) = grown(20e9 + 1e7 * rows + saw)
    assert alarm.step < 1000  # a block must span the sawtooth before the floor shows
    assert grown(20e9 + saw) == []
    assert grown(20e9 - 8e9 * np.exp(-rows / 100) + saw) == []


def test_checkpoints_that_cost_too_much():
    def rows(save_s):
        return [(s, {"t_step_s": 1.0, "t_checkpoint_s": save_s if s % 50 == 49 else 0.0}) for s in range(400)]

    assert [a.onset_step for a in run("checkpoint_slow", rows(20.0))] == [49]
    assert run("checkpoint_slow", rows(2.0)) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_one_rank_unlike_its_peers(seed, factor):
    def rows(sick):
        rng = np.random.default_rng(seed)
        for step in range(300):
            norm = math.exp(0.4 * rng.normal())
            yield (
                step,
                {
                    rank: {
                        "grad_norm_rank": norm
                        * math.exp(0.1 * rng.normal())
                        * (factor if sick and rank == 2 and step >= 200 else 1)
                    }
                    for rank in range(4)
                },
            )

    (alarm,) = run("rank_outlier", rows(True))
    assert (alarm.ranks, alarm.step) == ((2,), 201)
    assert run("rank_outlier", rows(False)) == []


def test_logits_that_run_away_and_logits_that_grow_with_learning():
    away = [(s, {"logit_max": 8.0 * 1.012**s}) for s in range(300)]
    (alarm,) = run("logit_growth", away)
    assert alarm.value > 50
    assert run("logit_growth", [(s, {"logit_max": 8.0 + 0.02 * s}) for s in range(1500)]) == []


def test_failures_that_events_tell(list_source):
    steps = [StepRecord(attempt=0, step=s, rank=0, values={"loss": 3 - 0.01 * s}) for s in range(60)]
    events = [
        RunEvent(attempt=0, step=59, rank=3, kind="exception", message="torch.OutOfMemoryError: CUDA out of memory."),
        RunEvent(attempt=0, step=59, rank=0, kind="hang", message="Watchdog caught", data={"ranks": [5]}),
    ]
    found = {f.kind: f for f in diagnose(list_source([*steps, *events])).findings}
    assert set(found) == {"out_of_memory", "hang"}
    assert found["hang"].ranks == (5,)
    assert all(f.severity is Severity.ERROR for f in found.values())


def test_a_loss_of_exactly_zero_and_a_loss_that_is_repeated():
    zero = [(s, {"loss": 2.0 - 0.01 * s if s < 40 else 0.0}) for s in range(60)]
    assert [(a.kind, a.onset_step) for a in run("masked_non_finite", zero)] == [("masked_non_finite", 40)]
    learnt = [(s, {"loss": 2.0 * 0.5**s if s < 30 else 0.0}) for s in range(60)]
    assert run("masked_non_finite", learnt) == []
    repeated = [(s, {"loss": 2.0 - 0.01 * min(s, 30), "grad_norm": 1.0 if s <= 30 else math.nan}) for s in range(60)]
    assert [a.kind for a in run("masked_non_finite", repeated)] == ["masked_non_finite"]
    assert run("not_stepping", repeated) == []


@pytest.mark.parametrize(("ramp_rows", "severity"), [(30, Severity.INFO), (0, Severity.WARNING)])
def test_a_rate_that_resumes_low_may_warm_up_again(list_source, ramp_rows, severity):
    rows = [
        StepRecord(
            attempt=attempt,
            step=s,
            rank=0,
            values={
                "lr": 3e-4 * (1 if not attempt else (s - 199) / ramp_rows if s < 199 + ramp_rows else 0.5),
                "loss": 2.0 + 0.01 * math.sin(s),
            },
        )
        for attempt, (first, last) in enumerate([(0, 220), (200, 400)])
        for s in range(first, last)
    ]
    found = [f for f in diagnose(list_source(rows)).findings if f.kind == "lr_discontinuity"]
    assert [(f.onset_step, f.severity) for f in found] == [(200, severity)]


def test_a_scaler_that_calibrates_again_after_a_resume():
    def scales(lowest):
        before = [(0, s, {"loss_scale": 1024.0}) for s in range(200)]
        return before + [(1, 200 + i, {"loss_scale": max(lowest, 2.0 ** (32 - i))}) for i in range(60)]

    assert run("loss_scale_collapse", scales(1024.0)) == []
    assert [a.kind for a in run("loss_scale_collapse", scales(1.0))] == ["loss_scale_collapse"]


@pytest.mark.parametrize("seed", SEEDS)
def test_periods_that_matter_and_periods_of_chance(seed):
    rng = np.random.default_rng(seed)

    def kinds(seconds, every=1):
        rows = [(every * i, {"t_step_s": float(v)}) for i, v in enumerate(seconds)]
        return {a.kind for a in run("step_time", rows)}

    toy = 0.005 * np.exp(0.2 * np.abs(rng.standard_t(2, 1500)))
    toy[::10] *= 4
    assert "periodic_stall" not in kinds(toy)
    noisy = np.where(rng.random(2000) < 0.2, 4.0, 1.0)
    assert "periodic_stall" not in kinds(noisy)
    slower = np.concatenate([np.full(40, 0.5), np.full(60, 6.0)])
    assert kinds(slower, every=10) <= {"sustained_slowdown", "slow_step"}
    comb = 1 + 0.02 * rng.normal(size=400)
    comb[7::25] += 3
    assert "periodic_stall" in kinds(comb)


def test_a_slowdown_that_is_over_and_cost_little_becomes_info(list_source):
    seconds = np.full(4000, 1.0)
    seconds[1000:1020] = 5.0

    def severities(last):
        rows = [
            StepRecord(attempt=0, step=s, rank=0, values={"t_step_s": float(v)}) for s, v in enumerate(seconds[:last])
        ]
        return [f.severity for f in diagnose(list_source(rows)).findings if f.kind == "sustained_slowdown"]

    assert severities(1019) == [Severity.WARNING]
    assert severities(4000) == [Severity.INFO]


def test_gradient_bursts_of_the_early_descent_are_info_and_those_of_a_settled_run_a_warning(list_source):
    rng = np.random.default_rng(100)
    noise = np.exp(0.1 * rng.normal(size=1200))

    def severity(loss):
        rows = []
        for s in range(1200):
            burst = 8.0 if s in (100, 160, 220) else 1.0
            rows.append(
                StepRecord(attempt=0, step=s, rank=0, values={"loss": loss(s), "grad_norm": float(noise[s] * burst)})
            )
        found = [f for f in diagnose(list_source(rows)).findings if f.kind == "gradient_spike"]
        assert sum(f.count for f in found) == 3
        return {f.severity for f in found}

    assert severity(lambda s: 2 + 8 * math.exp(-s / 120)) == {Severity.INFO}
    assert severity(lambda s: 2 + 0.02 * math.sin(s)) == {Severity.WARNING}


def test_a_gradient_that_stays_up_is_told_as_a_warning():
    rows = [(s, {"grad_norm": (1.0 + 0.1 * math.sin(s)) * (6 if s >= 200 else 1)}) for s in range(400)]
    assert [a.severity for a in run("gradient_spike", rows)][:2] == [None, Severity.WARNING]
