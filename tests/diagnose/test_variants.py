"""Causes in ways that the fault bench does not make them, and look-alikes that must not be named.

The frames are made here, seeds 100 and up. What is told here is which mechanism decides, not how large an effect was.
"""

import math

import duckdb
import numpy as np
import pytest

from runhealth.diagnose.batches import BatchHabit
from runhealth.diagnose.calibration import current
from runhealth.diagnose.case import Case
from runhealth.diagnose.echoes import echoed
from runhealth.diagnose.findings import Alarm, Evidence, Incident, Outcome, Status, SuspectResult
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.judge import settled, walk
from runhealth.diagnose.roots import unexplained
from runhealth.diagnose.suspect import load_suspects, raw_sum
from runhealth.diagnose.verdicts import culprit_ranks, fact_of
from runhealth.storage.records import BatchRecord
from runhealth.storage.schema import RECORD_TABLES, create_sql

SEEDS = (100, 101, 102)
SUSPECTS = load_suspects()
ONSET, STEPS, RANKS = 200, 206, 4
VISIT = 25  # steps for which a rank reads one shard


def made(change=None, *, seed=100, batch=None, inputs=True):
    """Healthy frames; `change(step, rank, values)` alters a rank, `batch(step, rank, statistics)` what it read."""
    rng = np.random.default_rng(seed)
    habit, frames = BatchHabit(), []
    for step in range(STEPS):
        frame = Frame(0, step)
        noise = rng.normal(0, 1, (RANKS, 12))
        # gradients as vectors: a part that all ranks share, and noise of their own
        own = rng.normal(0, 1, (RANKS, 64)) + 0.8 * rng.normal(0, 1, 64)
        mean = own.mean(0)
        for rank in range(RANKS):
            dot = own[rank] @ mean
            values = {
                "loss": 2.0 * (1 + 0.02 * noise[rank, 0]),
                "grad_norm_rank": 1.0 + 0.1 * noise[rank, 2],
                "grad_projection_rank": dot / (mean @ mean),
                "grad_cosine_rank": dot / math.sqrt((own[rank] @ own[rank]) * (mean @ mean)),
                "nonfinite_count": 0,
                "overflow_count": 3,
                "amax_ratio": 0.8 + 0.05 * noise[rank, 3],
                "logit_max": 10.0 + 0.3 * noise[rank, 5],
            }
            if rank == 0:
                values |= {
                    "grad_norm": 0.6 + 0.05 * noise[0, 6],
                    "clip_threshold": 1.0,
                    "lr": 1e-3,
                    "update_ratio": 0.005 * (1 + 0.03 * noise[0, 7]),
                    "adam_rms": 1.2 + 0.05 * noise[0, 4],
                    "second_moment_norm": 0.02,
                    "weight_norm": 28.0 + 0.01 * step,
                    "beta1": 0.9,
                    "beta2": 0.95,
                    "weight_decay": 0.1,
                    "adam_eps": 1e-8,
                }
            if change is not None:
                change(step, rank, values)
            frame.ranks[rank] = values
            read = {
                "token_entropy": 4.5 + 0.1 * noise[rank, 8],
                "token_unique_share": 0.3 + 0.02 * noise[rank, 9],
                "token_repeat_share": 0.03 + 0.004 * noise[rank, 10],
                **({"nonfinite_share": 0.0} if inputs else {}),
            }
            extra = {} if batch is None else batch(step, rank, read) or {}
            frame.batches.append(
                BatchRecord(
                    **{
                        "attempt": 0,
                        "step": step,
                        "rank": rank,
                        "shard": f"{step // VISIT * RANKS + rank:04d}",
                        "first_sample": 8 * (step % VISIT),
                        "last_sample": 8 * (step % VISIT) + 7,
                        "samples": 8,
                        "content_hash": 10 * step + rank,
                        "values": read,
                        **extra,
                    }
                )
            )
        frame.seal()
        frame.outliers = habit.judge(frame.batches)
        frames.append(frame)
    return frames


def told(kind="loss_spike", signal="loss", onset=ONSET, step=None, **fields):
    return Alarm(
        detector="test",
        kind=kind,
        signal=signal,
        attempt=0,
        step=onset + 2 if step is None else step,
        onset_step=onset,
        score=9.0,
        value=fields.pop("value", 4.0),
        baseline=fields.pop("baseline", 2.0),
        **fields,
    )


def case_of(frames, *alarms):
    alarms = alarms or (told(),)
    incident = Incident(
        id="a0-s200",
        attempt=0,
        onset_step=min(a.onset_step for a in alarms),
        alarms=alarms,
        last_alarm_step=max(a.step for a in alarms),
    )
    return Case(incident, frames)


def judged(frames, *alarms):
    results, verdict = walk(case_of(frames, *alarms), SUSPECTS)
    assert not [r.error for r in results if r.error]
    return {r.suspect: r for r in results}, verdict, culprit_ranks(results, verdict)


def since(first, signal, change, rank=None, last=10**9):
    def at(step, at_rank, values):
        if first <= step <= last and signal in values and (rank is None or rank == at_rank):
            values[signal] = change(values[signal])

    return at


def both(*changes):
    def at(step, rank, values):
        for change in changes:
            change(step, rank, values)

    return at


UP = since(ONSET, "loss", lambda v: v * 1.6)


def turned(first, rank):
    """The rank's gradient has the wrong sign: of all norms none changes."""

    def at(step, at_rank, values):
        if step >= first and at_rank == rank:
            values["grad_projection_rank"] = -abs(values["grad_projection_rank"]) * 0.4
            values["grad_cosine_rank"] = -abs(values["grad_cosine_rank"]) * 0.4

    return at


# ------------------------------------------------------------------------------------------------ ranks and the reduce


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_that_points_elsewhere_names_its_rank(seed):
    alarm = told("rank_outlier", "grad_cosine_rank", step=ONSET + 3, ranks=(2,))
    results, verdict, ranks = judged(made(turned(ONSET, 2), seed=seed), alarm)
    assert (verdict, ranks) == ("silent_corruption", (2,))
    assert any("cosine" in e.claim for e in results[verdict].evidence)


@pytest.mark.parametrize("seed", SEEDS)
def test_bad_data_turn_a_gradient_too(seed):
    def noise(step, rank, read):
        if step >= ONSET and rank == 2:
            read["token_entropy"] = 7.9

    change = both(turned(ONSET, 2), since(ONSET, "loss", lambda v: v * 2, rank=2))
    results, verdict, ranks = judged(made(change, seed=seed, batch=noise), told())
    assert (verdict, ranks) == ("bad_shard", (2,))
    assert results["silent_corruption"].probability < 0.1


def reduced_to(mean, norm):
    def at(step, rank, values):
        if step >= ONSET:
            values["grad_projection_rank"] *= mean
            if rank == 0:
                values["grad_norm"] *= norm

    return at


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mean", "norm"), [(0.5, 1.4), (0.1, 20.0), (4.0, 0.25)])
def test_what_is_not_the_mean_came_out_of_a_broken_reduce(seed, mean, norm):
    alarms = [told("rank_outlier", "grad_projection_rank")]
    if norm > 10:
        alarms = [told("clip_breach", "grad_norm")]
    results, verdict, _ = judged(made(reduced_to(mean, norm), seed=seed), *alarms)
    assert verdict == "silent_corruption"
    assert not any(r.suspect == "clip_breach" and r.probability > 0.1 for r in results.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_breach_of_all_ranks_leaves_the_reduce_alone(seed):
    grown = both(*(since(ONSET, s, lambda v: 20 * v) for s in ("grad_norm", "grad_norm_rank")))
    results, verdict, _ = judged(made(grown, seed=seed), told("clip_breach", "grad_norm"))
    assert verdict == "clip_breach"
    assert results["silent_corruption"].probability < 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_like_the_others_loss_clears_the_data(seed):
    odd = since(ONSET, "grad_norm_rank", lambda v: 6 * v, rank=1)
    _, verdict, ranks = judged(made(odd, seed=seed), told("rank_outlier", "grad_norm_rank", ranks=(1,)))
    assert (verdict, ranks) == ("silent_corruption", (1,))


# ------------------------------------------------------------------------------------------------------- not finite


def gone(rank, *, loss=True):
    """The gradient of a rank is not finite at the onset, its loss perhaps; from the next step on nothing is."""

    def at(step, at_rank, values):
        if step == ONSET and at_rank == rank:
            values |= {"grad_norm_rank": math.nan, "nonfinite_count": 900}
            if loss:
                values["loss"] = math.nan
        if step >= ONSET and "grad_norm" in values:
            values["grad_norm"] = math.nan
        if step > ONSET:
            values |= {"loss": math.nan, "grad_norm_rank": math.nan, "nonfinite_count": 900}

    return at


def broken_inputs(step, rank, read):
    if step == ONSET and rank == 3:
        read["nonfinite_share"] = 0.125


NOT_FINITE = told("non_finite", "loss", value=math.nan)


@pytest.mark.parametrize("seed", SEEDS)
def test_inputs_that_are_not_finite_are_bad_data(seed):
    _, verdict, ranks = judged(made(gone(3), seed=seed, batch=broken_inputs), NOT_FINITE)
    assert (verdict, ranks) == ("bad_shard", (3,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss", [True, False])
def test_finite_inputs_and_a_gradient_that_is_not_are_a_device(seed, loss):
    _, verdict, ranks = judged(made(gone(3, loss=loss), seed=seed), NOT_FINITE)
    assert (verdict, ranks) == ("silent_corruption", (3,))


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_look_at_the_inputs_nobody_is_named(seed):
    results, verdict, _ = judged(made(gone(3), seed=seed, inputs=False), NOT_FINITE)
    assert verdict == "undetermined"
    assert max(r.probability for r in results.values()) < 0.7
    for suspect in ("bad_shard", "silent_corruption"):
        assert results[suspect].probability > 0.1
        assert "nonfinite_share" in {m.signal for m in results[suspect].missing}


# --------------------------------------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("signal", "value"), [("beta2", 0.1), ("beta1", 0.0), ("weight_decay", 10.0), ("adam_eps", 0.1)]
)
def test_a_setting_that_changed_is_named_with_what_it_was(seed, signal, value):
    change = both(since(ONSET, signal, lambda _: value), since(ONSET, "update_ratio", lambda v: 3 * v))
    frames = made(change, seed=seed)
    results, verdict, _ = judged(frames, told("update_jump", "update_ratio"))
    assert verdict == "optimizer_state"
    named = [e for e in results[verdict].evidence if e.query and signal in e.query]
    assert [(e.value, e.steps) for e in named] == [(value, (ONSET, ONSET))]
    assert named[0].baseline == frames[0].get(signal)


@pytest.mark.parametrize("seed", SEEDS)
def test_updates_that_jump_without_their_gradient_are_the_optimizer(seed):
    jump = since(ONSET - 1, "update_ratio", lambda v: 10 * v)
    assert judged(made(both(jump, UP), seed=seed))[1] == "optimizer_state"
    overflow = both(jump, UP, *(since(ONSET, s, lambda v: 900 * v) for s in ("overflow_count", "amax_ratio")))
    results, verdict, _ = judged(made(overflow, seed=seed))
    assert results["fp_overflow"].probability < results["optimizer_state"].probability
    assert verdict != "fp_overflow"


@pytest.mark.parametrize("seed", SEEDS)
def test_updates_that_fall_are_the_rate_or_the_optimizer(seed):
    low = since(ONSET - 2, "update_ratio", lambda v: v / 20)
    alarm = told("update_jump", "update_ratio", onset=ONSET - 2)
    assert judged(made(low, seed=seed), alarm)[1] == "optimizer_state"
    rate = both(low, since(ONSET - 2, "lr", lambda v: v / 20))
    assert judged(made(rate, seed=seed), alarm, told("channel", "lr", onset=ONSET - 2, value=5e-5, baseline=1e-3))[
        1
    ] in ("lr_change", "undetermined")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rate_that_climbs_without_a_jump(seed):
    def climb(step, _rank, values):
        if "lr" in values and step >= ONSET - 16:
            factor = 1.15 ** (step - ONSET + 16)
            values["lr"] *= factor
            values["update_ratio"] *= factor

    assert judged(made(both(climb, UP), seed=seed))[1] == "lr_change"


# --------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_rises_where_a_shard_begins(seed):
    """A wrong tokenizer: single tokens are as frequent as ever."""
    change = both(*(since(ONSET, s, lambda v: 3 * v, rank=1) for s in ("loss", "grad_norm_rank")))
    results, verdict, ranks = judged(made(change, seed=seed))
    assert (verdict, ranks) == ("bad_shard", (1,))
    assert results["silent_corruption"].probability < 0.2


@pytest.mark.parametrize("seed", SEEDS)
def test_within_a_shard_it_may_be_the_device(seed):
    change = both(*(since(ONSET + 2, s, lambda v: 3 * v, rank=1) for s in ("loss", "grad_norm_rank")))
    results, verdict, _ = judged(made(change, seed=seed), told(onset=ONSET + 2, step=ONSET + 4))
    assert verdict != "bad_shard"
    assert max(results[s].probability for s in results) < 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_statistics_that_are_a_little_off_in_every_batch(seed):
    def mild(step, _rank, read):
        if step >= ONSET:
            read["token_unique_share"] += 0.07

    results, verdict, _ = judged(made(UP, seed=seed, batch=mild))
    assert results["bad_shard"].probability == max(r.probability for r in results.values())
    assert verdict in ("bad_shard", "undetermined")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loader_that_stands_still_on_one_rank(seed):
    def stuck(step, rank, _read):
        if step >= ONSET - 6 and rank == 2:
            return {"content_hash": 10 * (ONSET - 7) + 2}
        return None

    low = since(ONSET - 2, "loss", lambda v: v / 2, rank=2)
    alarm = told("rank_outlier", "loss", onset=ONSET - 2, ranks=(2,))
    _, verdict, ranks = judged(made(low, seed=seed, batch=stuck), alarm)
    assert (verdict, ranks) == ("data_order", (2,))


@pytest.mark.parametrize("seed", SEEDS)
def test_garbage_that_overflows_is_garbage(seed):
    def noise(step, _rank, read):
        if step >= ONSET:
            read |= {"token_entropy": 7.9, "token_unique_share": 0.9}

    loud = both(UP, UP, *(since(ONSET, s, lambda v: 900 * v) for s in ("overflow_count", "amax_ratio")))
    _, verdict, ranks = judged(made(loud, seed=seed, batch=noise))
    assert (verdict, ranks) == ("bad_shard", (0, 1, 2, 3))


# ------------------------------------------------------------------------------------------------------- other numbers


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_that_climb_as_they_always_did_are_no_cause(seed):
    def climb(step, _rank, values):
        values["logit_max"] *= 1.012**step

    assert judged(made(both(climb, UP), seed=seed))[1] != "logit_growth"

    def late(step, _rank, values):
        values["logit_max"] *= 1.02 ** max(0, step - 130)

    assert judged(made(both(late, UP), seed=seed))[1] == "logit_growth"


@pytest.mark.parametrize("seed", SEEDS)
def test_one_rank_that_overflows_in_step_after_step(seed):
    def over(step, rank, values):
        values["loss_scale"] = 65536.0 / 2.0 ** max(0, step - ONSET)
        values["step_skipped"] = int(step >= ONSET)
        if step >= ONSET and rank == 1:
            values |= {"nonfinite_count": 50, "overflow_count": 50, "grad_norm_rank": math.inf}

    results, verdict, ranks = judged(made(over, seed=seed), told("fp_overflow", "overflow_count"))
    assert (verdict, ranks) == ("silent_corruption", (1,))
    assert results["loss_scale"].probability < 0.2

    def everywhere(step, rank, values):
        over(step, 1 if rank != 1 or (step + rank) % 2 else 0, values)

    assert judged(made(everywhere, seed=seed), told("fp_overflow", "overflow_count"))[1] != "silent_corruption"


# ---------------------------------------------------------------------------------------------------------- the judge


def look(verdict, probability, rest="undetermined"):
    results = [
        SuspectResult(suspect=verdict, status=Status.IMPLICATED, probability=probability),
        SuspectResult(suspect=rest, status=Status.INCONCLUSIVE, probability=1 - probability),
    ]
    return tuple(results), verdict


def test_what_comes_later_must_be_surer_to_take_the_place_of_a_cause():
    first = look("optimizer_state", 0.95)
    assert settled(None, first) is first
    assert settled(first, look("eval_drift", 0.95)) is first
    assert settled(first, look("undetermined", 0.99, rest="lr_change")) is first
    surer = look("lr_change", 0.97)
    assert settled(first, surer) is surer
    again = look("optimizer_state", 0.8)
    assert settled(first, again) is again
    assert settled(look("undetermined", 0.9, rest="lr_change"), again) is again
    assert settled(look("benign", 0.99), again) is again  # only more data can tell that nothing was wrong


def test_a_sign_of_another_cause_that_came_first_is_held_against_an_answer():
    case = case_of(made(UP), told(), told("channel", "beta2", onset=ONSET - 6))
    late = (Evidence(claim="late", weight_nats=3.0, steps=(ONSET - 2, ONSET)),)
    (doubt,) = unexplained("bad_shard", late, case)
    assert doubt.weight_nats < 0
    assert not list(unexplained("optimizer_state", late, case))
    early = (Evidence(claim="early", weight_nats=3.0, steps=(ONSET - 8, ONSET)),)
    assert not list(unexplained("bad_shard", early, case))


def test_an_evaluation_that_follows_a_spike_is_its_echo():
    spike = fact_of(told())
    spike = type(spike)(
        **{
            **{name: getattr(spike, name) for name in spike.__slots__},
            "id": "a0-s200",
            "verdict": "lr_change",
            "outcome": Outcome.TRANSIENT,
        }
    )
    after, long_after = (fact_of(told("eval_drift", "eval_loss", onset=ONSET + n)) for n in (10, 100))
    assert echoed(after, [spike, after]) is spike
    assert echoed(long_after, [spike, long_after]) is None


def test_the_calibration_says_no_more_than_the_cases_it_comes_from_support():
    fit = current()
    assert fit.temperature >= 1.0
    assert set(fit.seeds) <= {0, 1, 2}
    alone = fit.probabilities({"a": 3.5, "undetermined": fit.undetermined_nats})["a"]
    assert alone < 0.98  # one observation is clipped to 3.5 nats


# ------------------------------------------------------------------------------------------------------------ queries


def test_queries_of_variants_recompute_their_values():
    def noise(step, rank, read):
        if step >= ONSET:
            read["token_unique_share"] += 0.06
        return {"content_hash": 7} if step >= ONSET - 4 and rank == 2 else None

    change = both(
        UP,
        turned(ONSET, 3),
        reduced_to(0.5, 1.0),
        since(ONSET - 1, "update_ratio", lambda v: 9 * v),
        since(ONSET, "beta2", lambda _: 0.1),
    )
    frames = made(change, batch=noise)
    database = duckdb.connect()
    for table in RECORD_TABLES:
        database.execute(create_sql(table, "main"))
    _fill(database, frames)
    checked = set()
    for alarm in (told(), told("rank_outlier", "grad_cosine_rank", ranks=(3,))):
        for result in walk(case_of(frames, alarm), SUSPECTS)[0]:
            for evidence in result.evidence:
                if evidence.query and evidence.value is not None:
                    found = database.execute(evidence.query).fetchone()
                    assert found is not None
                    assert found[0] == pytest.approx(evidence.value, rel=1e-5), (evidence.claim, evidence.query)
                    checked.add(evidence.query.split(" FROM ")[0])
                    assert math.isfinite(raw_sum([evidence]))
    assert len(checked) >= 8


def _fill(database, frames):
    steps = sorted({name for f in frames for v in f.ranks.values() for name in v})
    stats = sorted({name for f in frames for b in f.batches for name in b.values})
    for table, names in (("steps", steps), ("batches", stats)):
        known = {row[0] for row in database.execute(f"DESCRIBE {table}").fetchall()}
        for name in names:
            if name not in known:
                database.execute(f'ALTER TABLE {table} ADD COLUMN "{name}" DOUBLE')
    for frame in frames:
        for rank, values in frame.ranks.items():
            _insert(database, "steps", {"attempt": 0, "step": frame.step, "rank": rank, **values})
        for batch in frame.batches:
            fixed = ("attempt", "step", "rank", "micro_batch", "shard", "first_sample", "last_sample", "content_hash")
            _insert(database, "batches", {**{n: getattr(batch, n) for n in fixed}, **batch.values})


def _insert(database, table, values):
    columns = ", ".join(f'"{name}"' for name in values)
    database.execute(
        f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", list(map(_plain, values.values()))
    )


def _plain(value):
    return value.item() if isinstance(value, np.generic) else value
