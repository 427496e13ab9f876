"""The suspects: each one's own signature, the look-alike next to it, and the twin that must stay quiet.

The frames are made here, seeds 100 and up; no threshold was set on them. The runs of real faults are the bench's.
"""

import dataclasses

import numpy as np
import pytest

from runhealth.diagnose import observe, phases
from runhealth.diagnose.calibration import Calibration, current, parse
from runhealth.diagnose.case import Case
from runhealth.diagnose.event_facts import unexcused
from runhealth.diagnose.findings import Alarm, Incident
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.history import History
from runhealth.diagnose.judge import walk
from runhealth.diagnose.suspect import load_suspects, raw_sum
from runhealth.storage.records import EventKind, LayerSample, RunEvent

SUSPECTS = {suspect.name: suspect for suspect in load_suspects()}
SEEDS = (100, 101, 102)
ONSET, STEPS, RANKS = 200, 210, 4


def made(change=None, *, seed=100, steps=STEPS, ranks=RANKS):
    """Healthy frames of all signals; `change(step, rank, values)` alters the values of a rank."""
    rng = np.random.default_rng(seed)
    frames = []
    for step in range(steps):
        frame = Frame(0, step)
        noise = rng.normal(0, 1, (ranks, 8))
        forward = 0.3 * (1 + 0.01 * noise[:, 1])
        for rank in range(ranks):
            values = {
                "loss": 2.0 * (1 + 0.02 * noise[rank, 0]),
                "grad_norm_rank": 1.0 + 0.1 * noise[rank, 2],
                "param_checksum": step,
                "t_forward_s": forward[rank],
                "t_backward_s": 2 * forward[rank],
                "t_data_s": 0.03,
                "t_comm_s": 0.09 + 0.003 * noise[rank, 3],
                "t_gc_s": 0.0,
                "t_wait_s": 0.1,
                "t_step_s": 1.0 + 0.01 * noise[0, 4],
                "attn_logit_max": 10.0 + 0.3 * noise[rank, 5],
                "router_load_max": 0.3,
                "mem_allocated_bytes": 10**10,
            }
            if rank == 0:
                values |= {
                    "grad_norm": 0.6 + 0.05 * noise[0, 6],
                    "clip_threshold": 1.0,
                    "lr": 1e-3,
                    "update_ratio": 0.005 * (1 + 0.03 * noise[0, 7]),
                    "adam_rms": 1.2 + 0.05 * noise[0, 3],
                    "second_moment_norm": 0.02,
                    "weight_norm": 28.0 + 0.01 * step,
                    "consumed_samples": 32 * (step + 1),
                }
            if change is not None:
                change(step, rank, values)
            frame.ranks[rank] = values
        frame.seal()
        frames.append(frame)
    return frames


def told(kind="loss_spike", signal="loss", onset=ONSET, **fields):
    return Alarm(
        detector="test",
        kind=kind,
        signal=signal,
        attempt=0,
        step=onset + 1,
        onset_step=onset,
        score=9.0,
        value=fields.pop("value", 4.0),
        baseline=fields.pop("baseline", 2.0),
        **fields,
    )


def judged(frames, *alarms):
    alarms = alarms or (told(),)
    incident = Incident(
        id="a0-s200",
        attempt=0,
        onset_step=min(a.onset_step for a in alarms),
        alarms=alarms,
        last_alarm_step=max(a.step for a in alarms),
    )
    return walk(Case(incident, frames), tuple(SUSPECTS.values()))


def verdict(frames, *alarms):
    return judged(frames, *alarms)[1]


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


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_but_the_loss_moved(seed):
    results, name = judged(made(UP, seed=seed))
    assert name == "undetermined"
    assert sum(r.probability for r in results) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_staleness_leads_the_loss_and_a_burst_of_gradient_is_none(seed):
    stale = both(since(ONSET - 4, "adam_rms", lambda v: 3 * v), since(ONSET - 4, "update_ratio", lambda v: 2.5 * v), UP)
    assert verdict(made(stale, seed=seed)) == "adam_staleness"
    burst = both(stale, since(ONSET - 4, "grad_norm", lambda v: 3 * v))
    assert verdict(made(burst, seed=seed)) != "adam_staleness"
    lost = both(stale, since(ONSET - 4, "second_moment_norm", lambda v: 0.01 * v))
    assert verdict(made(lost, seed=seed)) == "optimizer_state"


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_that_climb_before_the_loss(seed):
    def climb(step, _rank, values):
        values["attn_logit_max"] *= 1.02 ** max(0, step - 130)

    assert verdict(made(both(climb, UP), seed=seed)) == "logit_growth"
    late = since(ONSET, "attn_logit_max", lambda v: 4 * v)
    assert verdict(made(both(late, UP), seed=seed)) != "logit_growth"


@pytest.mark.parametrize("seed", SEEDS)
def test_one_rank_that_computes_something_else_is_named(seed):
    odd = since(ONSET, "grad_norm_rank", lambda v: 9 * v, rank=2, last=ONSET + 2)
    results, name = judged(made(odd, seed=seed), told("rank_outlier", "grad_norm_rank"))
    assert name == "silent_corruption"
    best = next(r for r in results if r.suspect == name)
    assert (2,) in {e.ranks for e in best.evidence}
    down = since(ONSET, "grad_norm_rank", lambda v: v / 9, rank=1, last=ONSET + 2)
    assert verdict(made(down, seed=seed), told("rank_outlier", "grad_norm_rank")) == "silent_corruption"
    everywhere = since(ONSET, "grad_norm_rank", lambda v: 9 * v)
    assert verdict(made(everywhere, seed=seed), told("rank_outlier", "grad_norm_rank")) != "silent_corruption"


def test_a_mean_is_not_longer_than_its_parts():
    grown = since(ONSET, "grad_norm", lambda v: 4 * v, last=ONSET + 2)
    results, name = judged(made(grown), told("rank_outlier", "grad_norm"))
    assert name == "silent_corruption"
    claims = [e for r in results if r.suspect == name for e in r.evidence]
    assert any(e.value is not None and e.value > observe.TRIANGLE for e in claims)
    always = since(0, "grad_norm", lambda v: 4 * v)  # a sum, not a mean: says nothing
    assert verdict(made(both(always, grown)), told("rank_outlier", "grad_norm")) == "undetermined"


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_apart(seed):
    apart = since(ONSET, "param_checksum", lambda v: v + 0.5, rank=3)
    results, name = judged(made(apart, seed=seed), told("replica_desync", "param_checksum"))
    assert name == "replica_desync"
    ahead = {r.suspect: r.probability for r in results}
    # a device that corrupted one replica once looks the same: it stays the second, and is not ruled out
    assert ahead["silent_corruption"] > ahead["undetermined"]
    hit = both(apart, since(ONSET + 1, "loss", lambda v: 3 * v, rank=3))
    assert verdict(made(hit, seed=seed), told("replica_desync", "param_checksum")) != "replica_desync"


def with_layers(frames, differing, *, odd=3, first=ONSET, every=1, layers=6):
    """Checksums of each layer on each rank; `differing` layers of rank `odd` are other ones from `first` on."""
    for frame in frames:
        if frame.step % every == 0:
            for rank in frame.ranks:
                for i in range(layers):
                    apart = 0.5 * (rank == odd and i < differing and frame.step >= first)
                    values = {"param_checksum": 100 * frame.step + i + apart}
                    frame.layers.append(
                        LayerSample(attempt=0, step=frame.step, rank=rank, layer=f"b{i}", ts_ns=0, values=values)
                    )
            frame.seal()
    return frames


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [1, 5])
def test_one_layer_of_a_replica_or_all_of_them(seed, every):
    apart = since(ONSET, "param_checksum", lambda v: v + 0.5, rank=3)
    alarm = told("replica_desync", "param_checksum")
    results, name = judged(with_layers(made(apart, seed=seed), 1, every=every), alarm)
    assert name == "silent_corruption"
    assert ("b0",) in {e.layers for r in results if r.suspect == name for e in r.evidence}
    assert verdict(with_layers(made(apart, seed=seed), 6, every=every), alarm) == "replica_desync"
    # of two layers, or half of them, neither is said: what the sum alone tells stands
    for differing, layers in ((1, 2), (2, 2), (3, 6)):
        frames = with_layers(made(apart, seed=seed), differing, every=every, layers=layers)
        assert [r.probability for r in judged(frames, alarm)[0]] == pytest.approx(
            [r.probability for r in judged(made(apart, seed=seed), alarm)[0]]
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_replicas_only_their_past_names_one(seed, odd):
    alarm = told("replica_desync", "param_checksum")

    def ranks_of(*changes):
        apart = since(ONSET, "param_checksum", lambda v: v + 0.5, rank=odd)
        results, name = judged(made(both(apart, *changes), seed=seed, ranks=2), alarm)
        best = next(r for r in results if r.suspect == name)
        return name, {e.ranks for e in best.evidence if e.weight_nats > 0}

    assert ranks_of() == ("replica_desync", {()})
    still = since(ONSET, "param_checksum", lambda _v: ONSET - 1, rank=odd)
    assert ranks_of(still) == ("replica_desync", {(), (odd,)})
    name, ranks = ranks_of(since(ONSET + 1, "loss", lambda v: 3 * v, rank=odd))
    assert (name, ranks) == ("silent_corruption", {(), (odd,)})


@pytest.mark.parametrize("seed", SEEDS)
def test_no_update_is_applied(seed):
    still = since(ONSET, "param_checksum", lambda _v: 7)
    alarm = told("optimizer_not_stepping", "param_checksum")
    assert verdict(made(still, seed=seed), alarm) == "not_stepping"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_only_the_log_multiplies(seed):
    lie = since(ONSET, "loss", lambda v: 4 * v)
    assert verdict(made(lie, seed=seed)) == "reporting_artifact"
    real = both(lie, since(ONSET, "grad_norm", lambda v: 2 * v), since(ONSET, "update_ratio", lambda v: 3 * v))
    assert verdict(made(real, seed=seed)) != "reporting_artifact"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("signal", "extra", "cause"),
    [
        ("t_data_s", 1.0, "dataloader_stall"),
        ("t_comm_s", 0.4, "comm_straggler"),
        ("t_gc_s", 2.0, "gc_pause"),
        ("t_checkpoint_s", 5.0, "checkpoint_io"),
    ],
)
def test_the_phase_that_took_the_time(seed, signal, extra, cause):
    def slow(step, _rank, values):
        if step >= ONSET:
            values[signal] = values.get(signal, 0.0) + extra
            values["t_step_s"] += extra

    alarm = told("sustained_slowdown", "t_step_s", value=1.0 + extra, baseline=1.0)
    assert verdict(made(slow, seed=seed), alarm) == cause


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_slow_rank_is_named(seed, ranks):
    def slow(step, rank, values):
        if step >= ONSET:
            values["t_step_s"] += 0.3
            for signal in phases.COMPUTE:
                values[signal] *= 1.33 if rank == 1 else 1.0
            values["t_wait_s"] += 0.0 if rank == 1 else 0.3

    results, name = judged(made(slow, seed=seed, ranks=ranks), told("straggler", "t_forward_s", ranks=(1,)))
    assert name == "compute_straggler"
    best = next(r for r in results if r.suspect == name)
    assert best.evidence[0].ranks == (1,)


def test_a_dead_layer_and_one_that_all_layers_share():
    def layered(dead):
        frames = made()
        for frame in frames[::2]:
            for index in range(6):
                gone = frame.step >= ONSET and index in dead
                frame.layers.append(
                    LayerSample(
                        attempt=0,
                        step=frame.step,
                        rank=0,
                        layer=f"b{index}",
                        values={"grad_rms": 1e-9 if gone else 0.01},
                    )
                )
        return frames

    alarm = told("dead_layer", "layer.grad_rms", layers=("b2",))
    results, name = judged(layered({2}), alarm)
    assert name == "dead_layer"
    assert next(r for r in results if r.suspect == name).evidence[0].layers == ("b2",)
    assert verdict(layered(set(range(6))), alarm) != "dead_layer"


def test_a_router_that_collapses():
    collapse = since(ONSET - 6, "router_load_max", lambda _v: 0.98)
    assert verdict(made(both(collapse, UP)), told("router_collapse", "router_load_max")) == "router_collapse"


def test_who_is_gone_and_who_hangs():
    frames = made()
    frames[-1].ranks = {r: v for r, v in frames[-1].ranks.items() if r != 3}
    details = {"silent_ranks": [3]}
    closed = told("crash", "", onset=STEPS - 1, message="RuntimeError: Connection closed by peer", details=details)
    timed = told("crash", "", onset=STEPS - 1, message="Watchdog caught collective operation timeout", details=details)
    for alarm, cause in ((closed, "dead_rank"), (timed, "hang")):
        results, name = judged(frames, alarm)
        assert name == cause
        assert (3,) in {e.ranks for e in next(r for r in results if r.suspect == name).evidence}
    own = told("crash", "", onset=STEPS - 1, message="ValueError: no such file")
    assert verdict(made(), own) == "undetermined"


def test_every_suspect_has_a_remedy_of_its_own():
    remedies = [s.remedy for s in SUSPECTS.values()]
    assert len(set(remedies)) == len(remedies)
    wanted = {
        "bad_shard", "fp_overflow", "clip_breach", "lr_change", "optimizer_state", "adam_staleness", "logit_growth",
        "silent_corruption", "loss_scale", "data_order", "resume_artifact", "reporting_artifact", "compute_straggler",
        "comm_straggler", "dataloader_stall", "gc_pause", "checkpoint_io", "memory", "dead_rank", "benign",
    }  # fmt: skip
    assert wanted <= SUSPECTS.keys()


# -- ranks, calibration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8, 1001])
def test_leave_one_out_is_against_the_others(ranks):
    rng = np.random.default_rng(ranks)
    values = dict(enumerate(np.exp(rng.normal(0, 0.01, ranks)).tolist()))
    values[ranks - 1] = 5.0
    odd = observe.odd_rank(values)
    others = np.median([np.log(v) for r, v in values.items() if r != ranks - 1])
    if ranks > 2:
        assert odd.rank == ranks - 1
        assert np.log(odd.others) == pytest.approx(others)
    assert abs(odd.log_ratio) == pytest.approx(np.log(5.0) - others, abs=0.05)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 33])
def test_the_median_of_the_others_without_sorting_anew(count):
    from runhealth.diagnose.detectors.rank_lag import _excess

    rng = np.random.default_rng(count)
    times = dict(enumerate(rng.uniform(1, 2, count).tolist()))
    for rank, excess in _excess(times, {}).items():
        others = np.median([t for r, t in times.items() if r != rank])
        assert excess == pytest.approx(times[rank] / others - 1)


def test_calibrated_probabilities_add_up_and_keep_their_order():
    plain = Calibration(temperature=1.0, undetermined_nats=2.0)
    lifted = dataclasses.replace(plain, knots=((0.3, 0.1), (0.6, 0.4), (0.95, 0.97)))
    rng = np.random.default_rng(1)
    for _ in range(200):
        raws = dict(zip("abcd", rng.normal(0, 3, 4).tolist(), strict=True))
        before, after = plain.probabilities(raws), lifted.probabilities(raws)
        assert sum(after.values()) == pytest.approx(1.0)
        assert after[max(before, key=before.get)] >= max(after.values()) - 1e-12
        assert all(0 <= p <= 1 for p in after.values())
    assert plain.probabilities({"a": float("-inf"), "b": 0.0}) == {"a": 0.0, "b": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"version": 9, "temperature": 1, "undetermined_nats": 2, "knots": [], "seeds": [], "runs": 1, "commit": ""}',
        '{"version": 1, "temperature": 0, "undetermined_nats": 2, "knots": [], "seeds": [], "runs": 1, "commit": ""}',
        '{"version": 1, "temperature": 1, "undetermined_nats": 2, "knots": [[0.5, 2]], "seeds": [], "runs": 1}',
    ],
)
def test_a_calibration_that_cannot_be_is_an_error(text):
    with pytest.raises(ValueError, match="here"):
        parse(text, "here")


def test_the_package_names_where_its_calibration_comes_from():
    found = current()
    assert found.runs > 50
    assert found.seeds
    assert max(found.seeds) < 100  # tuning seeds alone
    assert found.commit


def test_single_observations_are_clipped():
    suspect = SUSPECTS["replica_desync"]
    case = Case(
        Incident(
            id="x",
            attempt=0,
            onset_step=ONSET,
            alarms=(told("replica_desync", "param_checksum"),),
            last_alarm_step=ONSET,
        ),
        made(since(ONSET, "param_checksum", lambda v: v + 0.5, rank=3)),
    )
    evidence = tuple(suspect.investigate(case))
    assert raw_sum(evidence) == pytest.approx(sum(max(-3.5, min(3.5, e.weight_nats)) for e in evidence))


@pytest.mark.parametrize("kind", [None, EventKind.ROLLBACK, EventKind.SKIP])
def test_samples_that_a_rollback_skips_are_meant_to_be_skipped(kind):
    history = History()
    if kind is not None:
        history.add_event(RunEvent(attempt=1, step=200, rank=0, kind=kind))
    skipped = dataclasses.replace(told("data_skipped", "shard"), attempt=1)
    repeated = dataclasses.replace(told("data_repeated", "shard"), attempt=1)
    assert unexcused(history, [skipped, repeated]) == ([skipped, repeated] if kind is None else [repeated])
