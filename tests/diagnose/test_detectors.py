"""Each detector on series made for it, with the benign twin that must stay quiet."""

import math

import numpy as np
import pytest

from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.service import diagnose
from runhealth.storage.records import StepRecord

CLASSES = {cls.name: cls for cls in detector_classes()}
SEEDS = (100, 101, 102)


def run(name, rows):
    """rows: (step, {signal: value}) of one rank, or {rank: {...}}."""
    detector, alarms = CLASSES[name](), []
    for step, values in rows:
        frame = Frame(0, step)
        frame.ranks = values if values and isinstance(next(iter(values)), int) else {0: values}
        frame.seal()
        alarms += detector.update(frame)
    return alarms + detector.finish()


def curve(seed, steps=600, sigma=0.02, floor=2.0, start=8.0):
    rng = np.random.default_rng(seed)
    t = np.arange(steps)
    return floor + (start - floor) * np.exp(-t / 120) + floor * sigma * rng.standard_t(5, steps)


def losses(values, first=0, every=1):
    return [(first + i * every, {"loss": float(v)}) for i, v in enumerate(values)]


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_spike_one_step(seed):
    series = curve(seed)
    assert run("loss_spike", losses(series)) == []
    series[400] *= 1.4
    (alarm,) = run("loss_spike", losses(series))
    assert alarm.step == 400
    assert alarm.baseline == pytest.approx(2.2, rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_spike_does_not_hide_the_next_one(seed):
    series = curve(seed)
    series[400:430] *= 1.6
    series[480] *= 1.4
    steps = [a.step for a in run("loss_spike", losses(series))]
    assert steps[0] == 400
    assert 480 in steps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_falling_loss_is_no_spike(seed):
    series = curve(seed)
    series[400:] *= 0.5
    assert run("loss_spike", losses(series)) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offset", [-10.0, -2.2])
def test_losses_under_zero_are_judged_too(seed, offset):
    series = 2 + np.exp(-np.arange(600) / 120) + 0.04 * np.random.default_rng(seed).normal(size=600) + offset
    assert run("loss_spike", losses(series)) == []
    series[400] += 3.0
    assert [a.step for a in run("loss_spike", losses(series))] == [400]


def test_an_excerpt_of_a_few_lines_only_tells_what_is_beyond_doubt():
    assert [a.step for a in run("loss_spike", losses([2.77, 2.78, 2.77, 7.3, 8.7], first=10))] == [13]
    assert run("loss_spike", losses([2.77, 2.78, 2.77, 3.2, 2.8])) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_slow_climb(seed):
    series = curve(seed, steps=900)
    assert run("loss_divergence", losses(series)) == []
    series[600:] += 0.004 * np.arange(300) ** 1.1
    alarms = run("loss_divergence", losses(series))
    assert len(alarms) == 1
    assert 590 <= alarms[0].onset_step <= 660


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bump_that_decays_is_no_divergence(seed):
    series = curve(seed, steps=900)
    series[600:] += 2.0 * np.exp(-np.arange(300) / 30)
    assert run("loss_divergence", losses(series)) == []


def test_non_finite_names_the_rank_and_tells_an_episode_once():
    rows = [(s, {0: {"loss": 2.0}, 1: {"loss": math.nan if s >= 20 else 2.0}}) for s in range(100)]
    (alarm,) = run("non_finite", rows)
    assert (alarm.step, alarm.ranks) == (20, (1,))


def test_a_skipped_fp16_step_is_a_missing_point():
    rows = [
        (s, {"loss": 2.0, "grad_norm": math.inf if s == 20 else 1.0, "loss_scale": 2.0 ** (16 - (s >= 20))})
        for s in range(60)
    ]
    assert run("non_finite", rows) == []
    rows = [
        (s, {"loss": 2.0, "grad_norm": math.inf if s == 20 else 1.0, "step_skipped": int(s == 20)}) for s in range(60)
    ]
    assert run("non_finite", rows) == []
    rows = [(s, {"loss": 2.0, "grad_norm": math.inf if s == 20 else 1.0}) for s in range(60)]
    assert len(run("non_finite", rows)) == 1


def test_gradient_spike_and_noise():
    rng = np.random.default_rng(100)
    norms = np.exp(0.3 * rng.standard_normal(500))
    rows = [(s, {"grad_norm": float(v)}) for s, v in enumerate(norms)]
    assert run("gradient_spike", rows) == []
    rows[300] = (300, {"grad_norm": 40.0})
    assert [a.step for a in run("gradient_spike", rows)] == [300]
    assert run("gradient_spike", [(s, {"grad_norm": 0.0}) for s in range(100)]) == []


def test_clip_breach_needs_more_than_the_habit():
    clipped = [(s, {"grad_norm": 4.0 + (s % 7), "clip_threshold": 1.0}) for s in range(200)]
    assert run("clip_breach", clipped) == []
    breached = clipped[:150] + [(s, {"grad_norm": 60.0, "clip_threshold": 1.0}) for s in range(150, 200)]
    (alarm,) = run("clip_breach", breached)
    assert (alarm.onset_step, alarm.step) == (150, 152)


def test_overflow_from_a_quiet_habit():
    quiet = [(s, {"overflow_count": s % 3, "amax_ratio": 0.9}) for s in range(200)]
    assert run("fp_overflow", quiet) == []
    start_up = [(s, {"overflow_count": 5000 if s < 5 else 0}) for s in range(200)]
    assert run("fp_overflow", start_up) == []
    overflowing = quiet[:150] + [(s, {"overflow_count": 4000, "amax_ratio": 5.0}) for s in range(150, 200)]
    (alarm,) = run("fp_overflow", overflowing)
    assert (alarm.onset_step, alarm.step, alarm.value) == (150, 151, 4000)
    blip = [*quiet[:150], (150, {"overflow_count": 200, "amax_ratio": 0.9}), *quiet[151:]]
    assert run("fp_overflow", blip) == []
    stale = quiet[:150] + [(s, {"overflow_count": 0, "amax_ratio": 5.0}) for s in range(150, 200)]
    assert [a.signal for a in run("fp_overflow", stale)] == ["amax_ratio"]


def test_loss_scale_collapse_and_its_twins():
    def scales(values):
        return [(s, {"loss": 2.0, "loss_scale": float(v)}) for s, v in enumerate(values)]

    steady = [2.0**15] * 200
    assert run("loss_scale_collapse", scales(steady)) == []
    start_up = [2.0**32 / 2**i for i in range(14)] + [2.0**18] * 200
    assert run("loss_scale_collapse", scales(start_up)) == []
    breathing = [2.0 ** (15 + (s // 50) % 2) for s in range(400)]
    assert run("loss_scale_collapse", scales(breathing)) == []
    collapse = steady + [2.0 ** (15 - i) for i in range(1, 9)] + [2.0**7] * 20
    (alarm,) = run("loss_scale_collapse", scales(collapse))
    assert alarm.onset_step == 200


def test_lr_jump_and_the_end_of_a_decay():
    cosine = [(s, {"lr": 3e-4 * 0.5 * (1 + math.cos(math.pi * s / 400))}) for s in range(400)]
    assert run("lr_step", cosine) == []
    jumped = [(s, {"lr": v["lr"] * (6 if s >= 200 else 1)}) for s, v in cosine]
    assert [a.step for a in run("lr_step", jumped)] == [200]


def test_update_ratio_over_twice_its_median():
    rows = [(s, {"update_ratio": 1e-3 * (5 if s >= 100 else 1)}) for s in range(140)]
    assert run("update_ratio", rows[:100]) == []
    assert run("update_ratio", rows)[0].step == 100


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("factor", [16, 1 / 8, 65536])
def test_a_gradient_norm_that_changes_by_an_exact_factor(seed, factor):
    norms = np.exp(0.06 * np.random.default_rng(seed).normal(size=600))
    assert run("scale_change", [(s, {"grad_norm": float(v)}) for s, v in enumerate(norms)]) == []
    off = norms.copy()
    off[300:] *= 2.6
    assert run("scale_change", [(s, {"grad_norm": float(v)}) for s, v in enumerate(off)]) == []
    norms[300:] *= factor
    (alarm,) = run("scale_change", [(s, {"grad_norm": float(v)}) for s, v in enumerate(norms)])
    assert (alarm.signal, alarm.onset_step) == ("grad_norm", 300)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_the_one_that_left_its_own_level(seed, culprit):
    rng = np.random.default_rng(seed)
    norms = np.exp(0.1 * rng.normal(size=(300, 2)))
    both = norms.copy()
    both[200:] *= 6  # the data, or the weights: no rank differs
    norms[200:, culprit] *= 6

    def rows(values):
        return [(s, {r: {"grad_norm_rank": float(v)} for r, v in enumerate(row)}) for s, row in enumerate(values)]

    assert run("rank_outlier", rows(both)) == []
    (alarm,) = run("rank_outlier", rows(norms))
    assert (alarm.ranks, alarm.onset_step, alarm.step) == ((culprit,), 200, 213)


@pytest.mark.parametrize("seed", SEEDS)
def test_odd_data_that_one_of_two_ranks_reads_for_some_rows_are_not_its_device(seed):
    rng = np.random.default_rng(seed)
    norms = np.exp(0.1 * rng.normal(size=(2000, 2)))
    for start in range(100, 2000, 60):
        norms[start : start + int(rng.integers(2, 8)), int(rng.integers(2))] *= 6
    rows = [(s, {r: {"grad_norm_rank": float(v)} for r, v in enumerate(row)}) for s, row in enumerate(norms)]
    assert run("rank_outlier", rows) == []


def test_loss_and_gradient_norm_that_go_empty_together():
    def rows(empty):
        return [(s, {"lr": 1.0} if s in empty else {"loss": 2.0, "grad_norm": 1.0, "lr": 1.0}) for s in range(60)]

    assert [(a.kind, a.step) for a in run("masked_non_finite", rows(range(30, 60)))] == [("non_finite", 30)]
    every_other = [s for s in range(60) if s % 2]  # a log that never held them in each row
    assert run("masked_non_finite", rows(every_other)) == []


def test_steps_that_the_log_counts_as_not_finite():
    def rows(count):
        return [(s, {"loss": 2.0, "nan_steps": count if s == 40 else 0, "step_skipped": count}) for s in range(60)]

    (alarm,) = run("non_finite", rows(3))
    assert (alarm.signal, alarm.step, alarm.ranks) == ("loss", 40, ())
    assert "3 of the steps" in alarm.message
    assert run("non_finite", rows(0)) == []


def test_masked_non_finite_three_ways():
    zero = [(s, {"loss": 0.0 if s >= 20 else 2.0, "grad_norm": math.nan if s >= 20 else 1.0}) for s in range(60)]
    assert [(a.kind, a.step) for a in run("masked_non_finite", zero)] == [("masked_non_finite", 20)]
    mean = [(s, {"loss": 4.0 - 0.1 * s, "grad_norm": 1.0}) for s in range(20)]
    mean.append((20, {"loss": sum(v["loss"] for _, v in mean) / 20, "grad_norm": math.nan}))
    assert [a.step for a in run("masked_non_finite", mean)] == [20]
    gone = [(s, {"loss": 2.0, "grad_norm": 1.0, "lr": 1.0}) for s in range(20)] + [
        (s, {"grad_norm": math.nan, "lr": 1.0}) for s in range(20, 30)
    ]
    assert {a.kind for a in run("masked_non_finite", gone)} == {"non_finite", "masked_non_finite"}
    evaluation = [(s, {"loss": 2.0, "lr": 1.0} if s % 10 else {"eval_loss": 2.0}) for s in range(60)]
    assert run("masked_non_finite", evaluation) == []


def test_no_training_signal_needs_both():
    rows = [(s, {"loss": 0.0, "grad_norm": 0.0}) for s in range(20)]
    assert [a.onset_step for a in run("no_signal", rows)] == [0]
    assert run("no_signal", [(s, {"loss": 2.0, "grad_norm": 0.0}) for s in range(20)]) == []


def test_not_learning_only_from_the_beginning():
    flat = [5.5 + 0.05 * math.sin(s) for s in range(300)]
    assert len(run("not_learning", losses(flat))) == 1
    assert run("not_learning", losses(flat, first=30_000)) == []
    assert run("not_learning", losses(curve(100))) == []


def test_short_window_at_epoch_ends_only():
    rng = np.random.default_rng(100)
    rows = []
    for s in range(1, 301):
        part = 0.5 if s % 100 == 0 else 1.0
        rows.append(
            (
                s,
                {
                    "loss": float(2 + 0.02 * rng.normal()) * part,
                    "epoch": s / 100,
                    "grad_norm": float(1 + 0.03 * rng.normal()) * part,
                },
            )
        )
    assert [a.onset_step for a in run("short_window", rows)] == [100]
    whole = [(s, {**v, "loss": 2.0, "grad_norm": 1.0}) for s, v in rows]
    assert run("short_window", whole) == []


def times(values):
    return [(s, {"t_step_s": float(v)}) for s, v in enumerate(values)]


def test_step_times():
    rng = np.random.default_rng(100)
    base = 1 + 0.02 * rng.normal(size=400)
    assert run("step_time", times(base)) == []
    slow = base.copy()
    slow[200] = 8
    (alarm,) = run("step_time", times(slow))
    assert (alarm.kind, alarm.step, alarm.severity) == ("slow_step", 200, Severity.INFO)
    periodic = base.copy()
    periodic[20::10] = 5
    kinds = [a for a in run("step_time", times(periodic)) if a.kind == "periodic_stall"]
    assert [a.onset_step for a in kinds] == [20]
    assert kinds[0].severity is Severity.WARNING
    slower = base.copy()
    slower[200:] *= 4
    (alarm,) = [a for a in run("step_time", times(slower)) if a.kind == "sustained_slowdown"]
    assert (alarm.onset_step, alarm.severity) == (200, Severity.WARNING)


def test_straggler_is_who_computes_longest_and_waits_least():
    rng = np.random.default_rng(100)

    def rows(late_rank, waits=True):
        for step in range(200):
            ranks = {}
            for rank in range(4):
                late = 0.2 if step >= 120 and rank == late_rank else 0.0
                wait = 0.2 if step >= 120 and rank != late_rank else 0.003
                ranks[rank] = {"t_forward_s": 1 + 0.02 * rng.normal() + 10 * late} | (
                    {"t_wait_s": wait} if waits else {}
                )
            yield step, ranks

    (alarm,) = run("straggler", rows(2))
    assert (alarm.ranks, alarm.onset_step, alarm.step) == ((2,), 120, 124)
    assert run("straggler", rows(None)) == []


def record(attempt, step, **values):
    return StepRecord(attempt=attempt, step=step, rank=0, values=values)


def test_what_a_resume_did_not_restore(list_source):
    rng = np.random.default_rng(100)

    def attempts(**changes):
        for attempt, (first, last) in enumerate([(0, 300), (250, 500)]):
            for step in range(first, last):
                values = {
                    "loss": 2 + math.exp(-step / 100) + float(0.02 * rng.normal()),
                    "lr": 1e-4,
                    "loss_scale": 1024.0,
                    "consumed_samples": 32 * step,
                }
                if attempt:
                    values |= {name: change(step) for name, change in changes.items()}
                yield record(attempt, step, **values)

    def kinds(**changes):
        report = diagnose(list_source(list(attempts(**changes))))
        return {(f.kind, f.onset_step) for f in report.findings if f.severity is not Severity.INFO}

    assert kinds() == set()
    assert kinds(lr=lambda _s: 3e-4) == {("lr_discontinuity", 250)}
    assert kinds(loss_scale=lambda _s: 65536.0) == {("loss_scale_reset", 250)}
    assert kinds(consumed_samples=lambda s: 32 * (s - 250)) == {("data_restarted", 250)}
    assert kinds(consumed_samples=lambda s: 32 * (s - 100)) == {("data_repeated", 250)}


def rates(schedule, resumes):
    """(attempt, step, rate): each attempt goes on where the one before ended."""
    first = 0
    for attempt, last in enumerate(resumes):
        yield from ((attempt, step, schedule(attempt, step)) for step in range(first, last))
        first = last


@pytest.mark.parametrize(
    ("schedule", "resumes", "alarming"),
    [
        # cycles of 200 steps; the third begins where the run is resumed
        (lambda _, s: 1e-4 * (1 + math.cos(math.pi * (s % 200) / 200)), (400, 500), False),
        # the schedule had come to its end, and the next one begins
        (lambda a, s: 1e-4 * (1 + math.cos(math.pi * (s - 300 * a) / 300)), (300, 500), False),
        (lambda a, s: 1e-4 * max(0.1, 1 - (s - 300 * a) / 200), (300, 500), False),
        # nothing says that it was meant
        (lambda a, s: 1e-4 * (1 + math.cos(math.pi * (s - 300 * a) / 600)), (300, 500), True),
        (lambda a, s: 1e-4 * (1 + math.cos(math.pi * ((s - 300 * a) % 200) / 200)), (300, 500), True),
    ],
)
def test_a_rate_that_starts_again_at_a_resume(list_source, schedule, resumes, alarming):
    rng = np.random.default_rng(100)
    records = [
        record(a, s, loss=2 + math.exp(-s / 100) + float(0.02 * rng.normal()), lr=lr)
        for a, s, lr in rates(schedule, resumes)
    ]
    found = diagnose(list_source(records)).findings
    loud = [(f.kind, f.onset_step) for f in found if f.severity is not Severity.INFO]
    assert loud == ([("lr_discontinuity", resumes[0])] if alarming else [])


def outcome_of(list_source, series):
    report = diagnose(list_source([record(0, s, loss=float(v)) for s, v in enumerate(series)]))
    return [(f.kind, f.outcome.value, f.severity.value) for f in report.findings]


@pytest.mark.parametrize("seed", SEEDS)
def test_how_a_spike_ends(list_source, seed):
    base = curve(seed)
    spike = base.copy()
    spike[400:403] *= 1.8
    assert outcome_of(list_source, spike) == [("loss_spike", "transient", "info")]
    slow = base.copy()
    slow[400:] *= 1 + 0.8 * np.exp(-np.arange(200) / 25)
    assert outcome_of(list_source, slow) == [("loss_spike", "recovering", "warning")]
    lost = base.copy()
    lost[400:] *= 1.8
    assert outcome_of(list_source, lost) == [("loss_spike", "non_recovering", "error")]
    fresh = base[:406].copy()
    fresh[400:] *= 1.4
    assert outcome_of(list_source, fresh) == [("loss_spike", "ongoing", "warning")]


@pytest.mark.parametrize("seed", SEEDS)
def test_many_like_bumps_are_one_finding_with_a_count(list_source, seed):
    series = curve(seed, steps=3000)
    series[300::90] *= 1.25
    report = diagnose(list_source([record(0, s, loss=float(v)) for s, v in enumerate(series)]))
    assert len(report.findings) <= 2
    assert abs(sum(f.count for f in report.findings) - 30) <= 2  # heavy-tailed noise adds one now and then
    assert all(f.severity is Severity.INFO for f in report.findings)


@pytest.mark.parametrize("seed", range(100, 110))
def test_healthy_noise_stays_quiet(list_source, seed):
    rng = np.random.default_rng(seed)
    series = curve(seed, steps=2000, sigma=0.03)
    norms = np.exp(0.35 * rng.standard_normal(2000))
    rows = [record(0, s, loss=float(v), grad_norm=float(n)) for s, (v, n) in enumerate(zip(series, norms, strict=True))]
    assert [f for f in diagnose(list_source(rows)).findings if f.severity is not Severity.INFO] == []
