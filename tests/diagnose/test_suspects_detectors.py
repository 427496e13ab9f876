"""Detectors of replicas, ranks, phases of the step, data that come again, optimizer and weights: each fault beside its
benign twin. Made rows, seeds 100 and up."""

import dataclasses

import numpy as np
import pytest

from runhealth.diagnose.batches import BatchHabit
from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.engine import Engine
from runhealth.diagnose.frames import Frame
from runhealth.storage.records import BatchRecord, LayerSample, StepRecord

CLASSES = {cls.name: cls for cls in detector_classes()}
SEEDS = (100, 101, 102)
ONSET, ROWS = 200, 280


def run(name, rows):
    """rows: (attempt, step, {rank: values}, batches, layers); alarms with the step of each."""
    detector, alarms, attempt, habit = CLASSES[name](), [], 0, BatchHabit()
    for number, step, ranks, batches, layers in rows:
        frame = Frame(number, step)
        frame.new_attempt = number != attempt
        attempt = number
        frame.ranks, frame.batches, frame.layers = ranks, list(batches), list(layers)
        frame.seal()
        frame.outliers = habit.judge(frame.batches)
        alarms += detector.update(frame)
    return alarms + detector.finish()


def rows_of(make, *, rows=ROWS, ranks=4, seed=100):
    rng = np.random.default_rng(seed)
    for step in range(rows):
        noise = rng.normal(0, 1, (ranks, 4))
        yield 0, step, {rank: make(step, rank, noise[rank]) for rank in range(ranks)}, (), ()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4, 33])
@pytest.mark.parametrize("lag", [0.12, 0.5])
def test_a_rank_that_lags_is_named_within_five_steps(seed, ranks, lag):
    def made(faulty):
        def make(step, rank, noise):
            slow = 1 + lag * (faulty and rank == 1 and step >= ONSET)
            # an odd pair of slow steps is everyday life
            slow *= 2.5 if rank == 0 and step == 150 else 1.0
            forward = 0.3 * (1 + 0.012 * noise[0]) * slow
            return {"t_forward_s": forward, "t_backward_s": 2 * forward, "t_wait_s": 1.2 - 3 * forward}

        return rows_of(make, ranks=ranks, seed=seed)

    (alarm,) = run("rank_lag", made(True))
    assert alarm.kind == "straggler"
    assert alarm.ranks == (1,)
    assert ONSET <= alarm.onset_step <= alarm.step <= ONSET + 5
    assert run("rank_lag", made(False)) == []


def test_a_stage_that_lags_is_named_as_a_whole():
    def make(step, rank, noise):
        slow = 1.3 if rank >= 2 and step >= ONSET else 1.0
        forward = 0.3 * (1 + 0.01 * noise[0]) * slow
        return {"t_forward_s": forward, "t_backward_s": 2 * forward, "stage": rank // 2}

    (alarm,) = run("rank_lag", rows_of(make))
    assert alarm.ranks == (2, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("signal", "share", "extra", "kind"),
    [
        ("t_data_s", 1.0, 0.5, "sustained_slowdown"),
        ("t_comm_s", 1.0, 0.1, "sustained_slowdown"),
        ("t_gc_s", 0.2, 0.6, "periodic_stall"),
        ("t_data_s", 0.0, 0.5, None),
        ("t_data_s", 1.0, 0.02, None),  # too little to matter
    ],
)
def test_a_phase_that_grows(seed, signal, share, extra, kind):
    rng = np.random.default_rng(seed + 1000)
    hit = rng.random(ROWS) < share

    def make(step, _rank, noise):
        usual = {"t_data_s": 0.03, "t_comm_s": 0.09, "t_gc_s": 0.0}
        times = {name: s * (1 + 0.1 * abs(noise[1])) for name, s in usual.items()}
        times[signal] += extra * bool(hit[step] and step >= ONSET)
        return {**times, "t_step_s": 1.0 + times[signal]}

    assert [a.kind for a in run("phase_stall", rows_of(make, seed=seed))] == ([kind] if kind else [])


def test_replicas_that_part_and_shards_that_never_agreed():
    def replicated(step, rank, _noise):
        return {"param_checksum": step + 0.5 * (rank == 2 and step >= ONSET), "grad_norm": 1.0, "lr": 1e-3}

    (alarm,) = run("replicas", rows_of(replicated))
    assert (alarm.kind, alarm.ranks, alarm.step) == ("replica_desync", (2,), ONSET)
    sharded = rows_of(lambda step, rank, _n: {"param_checksum": 10 * step + rank, "grad_norm": 1.0, "lr": 1e-3})
    assert run("replicas", sharded) == []

    def pair(step, rank, _noise):  # two groups of two
        return {"param_checksum": 10 * step + rank // 2 + 0.5 * (rank == 3 and step >= ONSET), "grad_norm": 1.0}

    (alarm,) = run("replicas", rows_of(pair))
    assert (alarm.kind, alarm.step) == ("replica_desync", ONSET)


def desyncs_of_resumed(checksum, *, at=40, back=30, stop=60, every=1):
    """A run of four ranks that is resumed from step `back` after `at` steps, through the engine; its desync facts."""
    engine = Engine(suspects=[])
    for attempt, steps in ((0, range(at)), (1, range(back, stop))):
        for step in steps:
            for rank in range(4):
                values = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3}
                if step % every == 0:
                    values["param_checksum"] = float(checksum(attempt, step, rank))
                engine.feed_quietly(StepRecord(attempt=attempt, step=step, rank=rank, ts_ns=step, values=values))
    return [finding for finding in engine.finish() if finding.kind == "replica_desync"]


@pytest.mark.parametrize("parts", [30, 31, 33])  # with the first, the second and the fourth step after the resume
@pytest.mark.parametrize("every", [1, 3])
def test_replicas_that_part_right_after_a_resume(parts, every):
    (found,) = desyncs_of_resumed(lambda a, s, r: 10 * s + 0.5 * (a == 1 and r == 2 and s >= parts), every=every)
    assert (found.attempt, found.ranks) == (1, (2,))
    assert found.onset_step <= parts < found.onset_step + every
    assert desyncs_of_resumed(lambda a, s, _r: 10 * s + a, every=every) == []


@pytest.mark.parametrize("layouts", [(1, 4), (4, 1), (2, 4), (1, 2), (4, 2)])
def test_a_resume_in_another_layout_is_no_desync(layouts):
    assert desyncs_of_resumed(lambda a, s, r: 10 * s + r * layouts[a] // 4) == []
    (found,) = desyncs_of_resumed(lambda a, s, r: 10 * s + r * layouts[a] // 4 + 0.5 * (s == 50 and r == 0)) or (None,)
    assert (found is None) == (layouts[1] == 4)  # there is nothing to compare where each rank has its own part


@pytest.mark.parametrize(("field", "value"), [("grad_norm", 0.0), ("lr", 0.0), ("step_skipped", 1)])
def test_weights_that_stand_still(field, value):
    def still(step, _rank, _noise):
        return {"param_checksum": min(step, ONSET), "grad_norm": 1.0, "lr": 1e-3, "step_skipped": 0}

    (alarm,) = run("replicas", rows_of(still))
    assert alarm.kind == "optimizer_not_stepping"
    assert ONSET <= alarm.onset_step <= alarm.step <= ONSET + 5
    rested = rows_of(lambda s, r, n: {**still(s, r, n), **({field: value} if s >= ONSET else {})})
    assert run("replicas", rested) == []


def layered(change, every=5):
    for step in range(ROWS):
        layers = [LayerSample(attempt=0, step=step, rank=0, layer=f"b{i}", values=change(step, i)) for i in range(6)]
        yield 0, step, {0: {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-3}}, (), layers if step % every == 0 else []


def test_a_layer_without_gradient_and_one_without_update():
    dead = layered(lambda s, i: {"grad_rms": 1e-12 if i == 3 and s >= ONSET else 1e-3})
    (alarm,) = run("dead_layer", dead)
    assert alarm.layers == ("b3",)
    assert run("dead_layer", layered(lambda s, _i: {"grad_rms": 1e-12 if s >= ONSET else 1e-3})) == []
    held = layered(lambda s, i: {"grad_norm": 1.0, "update_norm": 0.0 if i == 2 and s >= ONSET else 0.1})
    (alarm,) = run("replicas", held)
    assert (alarm.kind, alarm.layers) == ("optimizer_not_stepping", ("b2",))
    frozen = layered(lambda _s, i: {"grad_norm": 1.0, "update_norm": 0.0 if i == 2 else 0.1})  # from the start: meant
    assert run("replicas", frozen) == []


def test_a_router_that_collapses_and_one_that_is_lopsided():
    assert [
        a.onset_step
        for a in run("router_collapse", rows_of(lambda s, *_: {"router_load_max": 0.9 if s >= ONSET else 0.3}))
    ]
    assert run("router_collapse", rows_of(lambda *_: {"router_load_max": 0.8})) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_that_jumps_and_one_that_warms_up(seed):
    def made(rate):
        return rows_of(
            lambda s, _r, n: {"lr": rate(s), "update_ratio": 5 * rate(s) * (1 + 0.05 * n[0])}, ranks=1, seed=seed
        )

    (alarm,) = run("update_jump", made(lambda s: 4e-3 if s >= ONSET else 1e-3))
    assert alarm.onset_step == ONSET
    assert alarm.step <= ONSET + 2
    assert run("update_jump", made(lambda s: 1e-3 * min(1.0, 0.1 + s / 150))) == []
    assert run("update_jump", made(lambda s: 1e-3 * 0.99**s)) == []
    blip = rows_of(
        lambda s, _r, n: {"lr": 1e-3, "update_ratio": 5e-3 * (3 if s == ONSET else 1) * (1 + 0.05 * n[0])}, ranks=1
    )
    assert run("update_jump", blip) == []


def resumed(make, *, at=ONSET, redo=5, rows=ROWS, ranks=1):
    for attempt, steps in enumerate((range(at + redo), range(at, rows))):
        for step in steps:
            values, batches = make(attempt, step)
            yield attempt, step, {rank: dict(values) for rank in range(ranks)}, batches, ()


def batch(attempt, step, content):
    return BatchRecord(attempt=attempt, step=step, rank=0, shard="0001", samples=8, content_hash=content)


@pytest.mark.parametrize(("offset", "kind"), [(-60, "data_repeated"), (90, "data_skipped"), (0, None)])
@pytest.mark.parametrize("redo", [3, 12])
def test_what_a_resume_reads(offset, kind, redo):
    def make(attempt, step):
        return {"loss": 2.0}, [batch(attempt, step, 1000 + step + (offset if attempt else 0))]

    alarms = run("data_ledger", resumed(make, redo=redo))
    assert [a.kind for a in alarms] == ([kind] if kind else [])


def test_epochs_repeat_on_purpose_and_twins_do_not():
    told = ((0, s, {0: {"loss": 2.0, "epoch": s / 100}}, [batch(0, s, s % 100)], ()) for s in range(350))
    assert run("data_ledger", told) == []
    untold = ((0, s, {0: {"loss": 2.0}}, [batch(0, s, s % 100)], ()) for s in range(350))
    assert run("data_ledger", untold) == []

    def doubled():
        for step in range(ROWS):
            other = batch(0, step, 2 * step if step >= ONSET else 2 * step + 1)
            yield (
                0,
                step,
                {0: {"loss": 2.0}, 1: {"loss": 2.0}},
                [batch(0, step, 2 * step), dataclasses.replace(other, rank=1)],
                (),
            )

    (alarm,) = run("data_ledger", doubled())
    assert alarm.onset_step == ONSET


def test_a_resume_that_lost_optimizer_or_weights():
    def state(moment, norm):
        def make(attempt, step):
            return {
                "second_moment_norm": 0.02 * (moment if attempt else 1),
                "weight_norm": (28 + 0.01 * step) * (norm if attempt else 1),
                "update_ratio": 5e-3,
                "lr": 1e-3,
            }, ()

        return make

    assert [a.kind for a in run("optimizer_lost", resumed(state(0.1, 1)))] == ["optimizer_state_lost"]
    assert [a.kind for a in run("loaded_weights", resumed(state(1, 0.97)))] == ["checkpoint_corrupt"]
    for name in ("optimizer_lost", "loaded_weights"):
        assert run(name, resumed(state(1, 1))) == []
        assert run(name, resumed(state(1, 1), redo=0)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_that_rises_from_a_level_and_a_sawtooth(seed):
    def made(a_step, saw=0.0):
        return rows_of(
            lambda s, _r, n: {
                "mem_allocated_bytes": 2e10 + 3e7 * abs(n[0]) + a_step * max(0, s - ONSET) + saw * (s % 24)
            },
            seed=seed,
        )

    (alarm,) = run("memory_leak", made(4e7))
    assert abs(alarm.onset_step - ONSET) <= 16
    assert run("memory_leak", made(0.0)) == []
    assert run("memory_leak", made(0.0, saw=5e7)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_that_climb_anew_and_those_of_a_young_run(seed):
    def made(growth):
        return rows_of(lambda s, _r, n: {"attn_logit_max": (10 + s / 100) * growth(s) * (1 + 0.02 * n[0])}, seed=seed)

    (alarm,) = run("logit_climb", made(lambda s: 1.02 ** max(0, s - ONSET)))
    assert alarm.kind == "logit_growth"
    assert abs(alarm.onset_step - ONSET) <= 16
    assert run("logit_climb", made(lambda s: 1 - 0.95 * np.exp(-s / 60))) == []


def test_a_mean_gradient_longer_than_its_parts():
    def made(norm):
        return rows_of(
            lambda s, r, n: {"grad_norm_rank": 1 + 0.05 * n[0], **({"grad_norm": norm(s)} if r == 0 else {})}
        )

    (alarm,) = run("reduce_norm", made(lambda s: 2.0 if s >= ONSET else 0.6))
    assert alarm.step == ONSET
    assert run("reduce_norm", made(lambda _s: 4.0)) == []  # a sum
    assert run("reduce_norm", made(lambda s: 0.9 if s >= ONSET else 0.6)) == []


def test_an_evaluation_that_steps_up():
    rng = np.random.default_rng(100)

    def made(step_up, train_up):
        for step in range(400):
            late = step >= 300
            values = {"loss": float(2.0 * (1 + 0.02 * rng.normal()) * (train_up if late else 1))}
            if step % 10 == 9:
                values["eval_loss"] = float(2.2 * (1 + 0.004 * rng.normal()) * (step_up if late else 1))
            yield 0, step, {0: values}, (), ()

    (alarm,) = run("eval_step", made(1.07, 1.0))
    assert alarm.onset_step == 309
    assert run("eval_step", made(1.0, 1.0)) == []
    assert run("eval_step", made(1.07, 1.07)) == []


def test_labels_that_are_not_the_next_token():
    def made(share):
        for step in range(ROWS):
            wrong = share if step >= ONSET else 0.0
            batches = [
                BatchRecord(
                    attempt=0, step=step, rank=r, shard=f"{r}", samples=8,
                    values={"label_mismatch_share": wrong if r == 1 else 0.0, "token_entropy": 4.8},
                )
                for r in range(2)
            ]  # fmt: skip
            yield 0, step, {0: {"loss": 2.0}, 1: {"loss": 2.0}}, batches, ()

    (alarm,) = run("label_check", made(0.2))
    assert (alarm.kind, alarm.ranks, alarm.onset_step) == ("data_corrupt", (1,), ONSET)
    assert run("label_check", made(0.0)) == []
