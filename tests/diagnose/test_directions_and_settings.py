"""Detectors of the reduce, of directions of gradients, of inputs, settings, shared batches and sequence lengths: each
fault beside its benign twin. Gradients are real vectors, so that projections and cosines hang together. Seeds from 100
on."""

import numpy as np
import pytest

from runhealth.diagnose.batches import BatchHabit
from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.findings import Severity
from runhealth.diagnose.frames import Frame
from runhealth.storage.records import BatchRecord, SourceInfo, StepRecord

CLASSES = {cls.name: cls for cls in detector_classes()}
SEEDS = (100, 101, 102)
ONSET, ROWS = 150, 200
SIZE = 400
SOURCE = SourceInfo(name="made", source="made", format="made")


def run(name, rows):
    """rows: (attempt, step, {rank: values}, batches)."""
    detector, alarms, attempt, habit = CLASSES[name](), [], 0, BatchHabit()
    for number, step, ranks, batches in rows:
        frame = Frame(number, step)
        frame.new_attempt = number != attempt
        attempt = number
        frame.ranks, frame.batches = ranks, list(batches)
        frame.seal()
        frame.outliers = habit.judge(frame.batches)
        alarms += detector.update(frame)
    return alarms + detector.finish()


def directions(seed, ranks=4, sent=lambda step, gradients: gradients, reduced=lambda step, mean, rng: mean):  # noqa: ARG005
    """What ranks record of gradients that share a part and differ by more; `sent` and `reduced` change them."""
    rng = np.random.default_rng(seed)
    for step in range(ROWS):
        common = rng.normal(size=SIZE)
        gradients = sent(step, common + 1.7 * rng.normal(size=(ranks, SIZE)))
        mean = reduced(step, gradients.mean(axis=0), rng)
        products, square = gradients @ mean, float(mean @ mean)
        lengths = np.linalg.norm(gradients, axis=1) * np.sqrt(square)
        losses = 2 + 0.1 * rng.normal(size=ranks)
        values = {
            rank: {
                "grad_projection_rank": float(np.float32(products[rank] / square)),
                "grad_cosine_rank": float(np.float32(products[rank] / lengths[rank])),
                "loss": float(losses[rank]),
            }
            for rank in range(ranks)
        }
        yield 0, step, values, ()


def active(step, steps=5):
    return ONSET <= step < ONSET + steps


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4, 9])
def test_a_reduce_that_adds_noise_or_is_no_mean(seed, ranks):
    def noisy(step, mean, rng):
        return mean + active(step) * 0.3 * np.linalg.norm(mean) / np.sqrt(SIZE) * rng.normal(size=SIZE)

    def summed(step, mean, rng):  # noqa: ARG001
        return mean * ranks if step >= ONSET else mean

    for change in (noisy, summed):
        (alarm,) = run("reduce_projection", directions(seed, ranks, reduced=change))
        assert (alarm.kind, alarm.step, alarm.ranks) == ("rank_outlier", ONSET, ())
    assert run("reduce_projection", directions(seed, ranks)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_ranks_send_the_reduce_is_in_order(seed):
    def burst(step, gradients):
        return gradients + active(step) * 100 * np.random.default_rng([seed, step]).normal(size=gradients.shape)

    assert run("reduce_projection", directions(seed, sent=burst)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_half_precision_sets_its_own_scale(seed):
    def rounded(step, mean, rng):  # noqa: ARG001
        return mean * (1 + 0.004 * rng.normal())

    assert run("reduce_projection", directions(seed, reduced=rounded)) == []

    def off(step, mean, rng):
        return rounded(step, mean, rng) * (0.8 if active(step) else 1.0)

    (alarm,) = run("reduce_projection", directions(seed, reduced=off))
    assert ONSET <= alarm.step <= ONSET + 1


def test_without_all_ranks_nothing_is_said_of_the_reduce():
    def broken(step, mean, rng):  # noqa: ARG001
        return mean * (0.5 if active(step) else 1.0)

    def without_rank_two(rows):
        for attempt, step, ranks, batches in rows:
            if step > 20:
                ranks[2].pop("grad_projection_rank")
            yield attempt, step, ranks, batches

    assert run("reduce_projection", without_rank_two(directions(100, reduced=broken))) == []
    others = ((a, s, {r: v for r, v in ranks.items() if r != 1}, b) for a, s, ranks, b in directions(100))
    assert run("reduce_projection", others) == []


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [3, 4, 16])
def test_a_rank_whose_gradient_is_turned_round(seed, ranks):
    def turned(step, gradients):
        gradients[1] *= -1 if active(step) else 1
        return gradients

    (alarm,) = run("gradient_cosine", directions(seed, ranks, sent=turned))
    assert (alarm.kind, alarm.ranks) == ("rank_outlier", (1,))
    assert ONSET <= alarm.onset_step <= alarm.step < ONSET + 5
    assert run("gradient_cosine", directions(seed, ranks)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_was_always_so_or_whose_data_are_odd_is_let_be(seed):
    def always(step, gradients):  # noqa: ARG001
        gradients[1] *= -1
        return gradients

    assert run("gradient_cosine", directions(seed, sent=always)) == []

    def foreign(step, gradients):
        if active(step):
            gradients[1] = 2 * np.random.default_rng([seed, step]).normal(size=SIZE)
        return gradients

    def harder(rows):
        for attempt, step, values, batches in rows:
            values[1]["loss"] += 0.6 * active(step)
            yield attempt, step, values, batches

    def shared(rows):
        for attempt, step, values, _ in rows:
            same = [batch(step, rank, hashed=step * 10 + (rank == 1 or not active(step)) * rank) for rank in range(4)]
            yield attempt, step, values, same

    assert run("gradient_cosine", harder(directions(seed, sent=foreign))) == []
    assert run("gradient_cosine", shared(directions(seed, sent=foreign))) == []
    assert [a.ranks for a in run("gradient_cosine", directions(seed, sent=foreign))] in ([], [(1,)])


def batch(step, rank, *, micro=0, shard="a", first=0, hashed=None, **values):
    return BatchRecord(
        attempt=0, step=step, rank=rank, micro_batch=micro, shard=shard, first_sample=first, last_sample=first + 7,
        samples=8, content_hash=hashed, values=values,
    )  # fmt: skip


def inputs(bad, *, recorded=True, loss=lambda step, rank: 2.0):  # noqa: ARG005
    for step in range(ROWS):
        batches = []
        for rank in range(4):
            share = bad(step, rank)
            values = {"nonfinite_share": share} if recorded or share else {}
            batches.append(batch(step, rank, shard=f"s{rank}", first=8 * step, **values))
        yield 0, step, {rank: {"loss": loss(step, rank)} for rank in range(4)}, batches


@pytest.mark.parametrize("recorded", [True, False])
def test_inputs_that_are_not_finite(recorded):
    def bad(step, rank):
        return 0.25 if rank == 2 and active(step, 3) else 0.0

    def breaks(step, rank):
        return float("nan") if bad(step, rank) else 2.0

    (alarm,) = run("nonfinite_inputs", inputs(bad, recorded=recorded))
    assert (alarm.kind, alarm.step, alarm.ranks, alarm.details["shard"]) == ("data_corrupt", ONSET, (2,), "s2")
    assert alarm.severity is Severity.WARNING
    assert f"{8 * ONSET:,}-{8 * ONSET + 7:,}" in alarm.message
    (alarm,) = run("nonfinite_inputs", inputs(bad, recorded=recorded, loss=breaks))
    assert alarm.severity is Severity.ERROR


def test_inputs_that_mark_what_is_absent_are_no_fault():
    rng = np.random.default_rng(100)
    assert run("nonfinite_inputs", inputs(lambda *_: 0.1 if rng.random() < 0.3 else 0.0)) == []
    assert run("nonfinite_inputs", inputs(lambda *_: 0.0)) == []


def settings(**values):
    return ((0, step, {0: {name: of(step) for name, of in values.items()}}, ()) for step in range(ROWS))


def test_a_setting_that_jumps():
    def jumped(before, after):
        return lambda step: after if step >= ONSET else before

    for name, before, after in (("beta2", 0.95, 0.5), ("weight_decay", 0.1, 0.0), ("adam_eps", 1e-8, 1e-4)):
        (alarm,) = run("hyperparameters", settings(**{name: jumped(before, after)}))
        assert (alarm.kind, alarm.signal, alarm.step) == ("hyperparameter_changed", name, ONSET)
        assert (alarm.value, alarm.baseline, alarm.severity) == (after, before, Severity.WARNING)
    (alarm,) = run("hyperparameters", settings(beta1=jumped(0.9, 0.87)))
    assert alarm.severity is Severity.INFO


def test_a_setting_that_follows_a_schedule_does_not_jump():
    schedules = {
        "weight_decay": lambda step: max(0.0, 0.1 * (1 - step / 150)),
        "beta1": lambda step: 0.85 + 0.1 * step / ROWS,
        "beta2": lambda step: 1 - 0.1 * 0.97**step,
        "adam_eps": lambda _: 1e-8,
    }
    assert run("hyperparameters", settings(**schedules)) == []


def test_a_setting_that_another_attempt_brings():
    rows = [(int(step >= ONSET), step, {0: {"beta2": 0.99 if step >= ONSET else 0.95}}, ()) for step in range(ROWS)]
    (alarm,) = run("hyperparameters", rows)
    assert "at the resume" in alarm.message


def streams(copies, *, windowed, ranks=4, since=ONSET):
    """Each rank reads shards of its own, 40 steps each; `copies` maps ranks to those whose batches they read. Sample
    numbers follow each other, or are shuffled in a window."""
    for step in range(ROWS):
        batches = []
        for rank in range(ranks):
            source = copies.get(rank, rank) if step >= since else rank
            visit, at = divmod(step + 10 * source, 40)
            first = (at * 37) % 40 * 8 if windowed else at * 8
            key = (visit * ranks + source) * 1000 + at
            batches.append(batch(step, rank, shard=f"{source}-{visit}", first=first, hashed=key))
        yield 0, step, {rank: {} for rank in range(ranks)}, batches


@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("copies", [{2: 1}, {2: 1, 3: 1}])
def test_the_rank_that_left_its_own_data_is_named(windowed, copies):
    (alarm,) = run("data_ledger", streams(copies, windowed=windowed, since=ONSET + 3))
    assert (alarm.kind, alarm.ranks) == ("data_repeated", tuple(copies))
    assert (alarm.onset_step, alarm.step) == (ONSET + 3, ONSET + 4)
    assert run("data_ledger", streams({}, windowed=windowed)) == []


def test_both_ranks_are_named_where_nothing_tells():
    def nameless(rows):
        for attempt, step, ranks, batches in rows:
            plain = [batch(step, b.rank, shard="", first=-1, hashed=b.content_hash) for b in batches]
            yield attempt, step, ranks, plain

    (alarm,) = run("data_ledger", nameless(streams({2: 1}, windowed=True)))
    assert alarm.ranks == (1, 2)


def test_ranks_that_share_their_data_by_design():
    assert run("data_ledger", streams({1: 0, 3: 2}, windowed=True, since=0)) == []


def lengths(seed, slow):
    """Forward and backward seconds and squared lengths; `slow(step)` names the rank with three times the work."""
    rng = np.random.default_rng(seed)
    for step in range(ROWS):
        work = 1e6 * np.exp(0.15 * rng.normal(size=4))
        seconds = 0.3 * (1 + 0.012 * rng.normal(size=4)) * (0.9 + 0.1 * work / 1e6)
        rank = slow(step)
        if rank is not None:
            work[rank] *= 3
            seconds[rank] *= 1.4
        values = {
            r: {"t_forward_s": seconds[r], "t_backward_s": 2 * seconds[r], "t_wait_s": 3 * (seconds.max() - seconds[r]),
                "sum_len_sq": int(work[r])}
            for r in range(4)
        }  # fmt: skip
        yield 0, step, values, ()


@pytest.mark.parametrize("seed", SEEDS)
def test_long_sequences_that_move_from_rank_to_rank(seed):
    def moving(step):
        return step * 7 % 5 if step >= ONSET and step * 7 % 5 < 4 else None

    (alarm,) = run("length_lag", lengths(seed, moving))
    assert (alarm.kind, alarm.ranks) == ("straggler", ())
    assert ONSET <= alarm.onset_step <= alarm.step <= ONSET + 5
    assert run("length_lag", lengths(seed, lambda _: None)) == []
    assert run("rank_lag", lengths(seed, moving)) == []


def test_long_sequences_on_one_rank_name_it_once():
    rows = list(lengths(100, lambda step: 2 if step >= ONSET else None))
    assert [a.ranks for name in ("length_lag", "rank_lag") for a in run(name, rows)] == [(2,)]


def test_a_slow_device_is_not_taken_for_long_sequences():
    rows = list(lengths(100, lambda _: None))
    for _, step, values, _ in rows:
        if step >= ONSET:
            for name in ("t_forward_s", "t_backward_s"):
                values[1][name] *= 1.3
            for rank in (0, 2, 3):
                values[rank]["t_wait_s"] += 0.27
    assert run("length_lag", rows) == []
    assert [a.ranks for a in run("rank_lag", rows)] == [(1,)]


def test_a_corrupt_reduce_is_one_finding_of_two_signals():
    def noisy(step, mean, rng):
        return mean + active(step) * 4 * np.linalg.norm(mean) / np.sqrt(SIZE) * rng.normal(size=SIZE)

    engine = Engine()
    for _, step, ranks, _ in directions(100, reduced=noisy):
        burst = 4.1 if active(step) else 1.0
        for rank, values in ranks.items():
            norm = {"grad_norm": burst} if rank == 0 else {}
            record = {**values, **norm, "grad_norm_rank": 1.2 + 0.01 * (step % 3)}
            engine.feed_quietly(StepRecord(attempt=0, step=step, rank=rank, values=record))
    engine.finish()
    (finding,) = [f for f in engine.report(SOURCE).findings if f.kind == "rank_outlier"]
    assert set(finding.signals) == {"grad_norm", "grad_projection_rank"}
    assert (finding.count, finding.onset_step) == (1, ONSET)


def test_a_gradient_that_is_infinite_on_one_rank_is_no_lying_log():
    """Its loss was finite, and by chance the mean of those before."""
    losses = [4.0, 2.0] * 20 + [3.0, 2.5, 2.6]
    rows = []
    for step, loss in enumerate(losses):
        norms = {rank: float("inf") if step == 40 and rank == 2 else 1.0 for rank in range(4)}
        values = {rank: {"loss": loss, "grad_norm_rank": norms[rank]} for rank in range(4)}
        values[0]["grad_norm"] = float("inf") if step == 40 else 1.0
        rows.append((0, step, values, ()))
    assert run("masked_non_finite", rows) == []
    alarms = {alarm.signal: alarm.ranks for alarm in run("non_finite", rows)}
    assert alarms == {"grad_norm": (), "grad_norm_rank": (2,)}
    for _, step, values, _ in rows:
        if step == 40:
            for rank in range(4):
                values[rank]["grad_norm_rank"] = float("nan")
    assert [a.kind for a in run("masked_non_finite", rows)] == ["masked_non_finite"]
