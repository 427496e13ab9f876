"""The simulated ranks: exact, repeatable, and with telemetry that survives its file."""

import dataclasses
from pathlib import Path

import pytest
import torch
from bench.faults import corpus, telemetry
from bench.faults.clock import WORLD, draw
from bench.faults.corpus import DATA, Corpus
from bench.faults.world import World

from runhealth.storage.records import BatchRecord, StepRecord
from runhealth.trainer.config import FaultSpec
from runhealth.trainer.model import build, next_byte_loss


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus.load(tmp_path_factory.mktemp("cache"))


def test_four_ranks_train_like_one_process_on_all_their_batches(data: Corpus) -> None:
    world = World(3, "fp32", data)
    single = World(3, "fp32", data)
    model = build(world.config.model, DATA.seq_len, 3)
    optim = world.config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
    )
    for step in range(4):
        out = world.train(step)
        rows = torch.cat([torch.from_numpy(single.readers[r].rows(single.plan.batch(step, r))) for r in range(WORLD)])
        optimizer.zero_grad()
        loss = next_byte_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_threshold)
        for group in optimizer.param_groups:
            group["lr"] = out.lr
        optimizer.step()
        assert sum(out.losses) / WORLD == pytest.approx(loss.item(), rel=1e-5)
        assert out.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_a_state_brings_back_the_same_steps(data: Corpus) -> None:
    for precision in ("fp8", "fp16", "moe"):
        world = World(1, precision, data)
        for step in range(2):
            world.train(step)
        state = world.state()
        first = [world.train(step).losses for step in (2, 3)]
        world.load(state)
        assert [world.train(step).losses for step in (2, 3)] == first
        other = World(1, precision, data)
        other.load(state)
        assert [other.train(step).losses for step in (2, 3)] == first


def test_only_the_replica_at_fault_differs(data: Corpus) -> None:
    fault = FaultSpec(name="replica_desync", params={"step": 1, "rank": 2})
    world = World(1, "fp32", data, [fault])
    assert len(set(world.train(0).checksums)) == 1
    sums = world.train(1).checksums
    assert sums[0] == sums[1] == sums[3] != sums[2]


def test_a_flipped_weight_shows_in_one_layer_and_a_missed_update_in_all(data: Corpus) -> None:
    def differing(spec: FaultSpec) -> tuple[int, int]:
        world = World(1, "fp32", data, [spec])
        for step in range(3):
            out = world.train(step)
        layers = out.layer_checksums[0]
        return sum(out.layer_checksums[2][layer] != value for layer, value in layers.items()), len(layers)

    flip = {"step": 1, "rank": 2, "mode": "weights", "severity": 4}
    assert differing(FaultSpec(name="silent_corruption", params=flip))[0] == 1
    count, layers = differing(FaultSpec(name="replica_desync", params={"step": 1, "rank": 2}))
    assert count == layers


def test_who_holds_the_others_up_waits_least() -> None:
    def slow(rank: int, phase: str) -> float:
        return 0.3 if rank == 2 and phase == "backward" else 0.0

    times = draw(1, 5, slow)
    assert int(times.wait.argmin()) == 2
    ends = times.data + times.forward + times.backward + times.wait + times.comm
    assert ends == pytest.approx(ends[0])
    assert draw(1, 5, slow).step_s == times.step_s
    assert draw(1, 6, slow).step_s != times.step_s


def test_records_survive_their_file(data: Corpus, tmp_path: Path) -> None:
    world = World(1, "fp8", data)
    recorder = telemetry.Recorder(world)
    records = recorder.started(0)
    records += recorder.step(0, world.train(0), draw(1, 0, lambda *_: 0.0), eval_loss=5.5, checkpoint_s=0.5)
    records += recorder.saved(1, 0.5)
    broken = dataclasses.replace(records[5], values={"loss": float("nan"), "grad_norm": float("inf")})
    telemetry.write(tmp_path / "x.jsonl.gz", [*records, broken])
    back = list(telemetry.read(tmp_path / "x.jsonl.gz"))
    assert back[:-1] == records
    assert repr(back[-1]) == repr(broken)


def test_nothing_in_the_telemetry_tells_the_truth_about_a_fault(data: Corpus) -> None:
    world = World(1, "fp32", data, [FaultSpec(name="lr_change", params={"step": 0})])
    recorder = telemetry.Recorder(world)
    records = [*recorder.started(0), *recorder.step(0, world.train(0), draw(1, 0, lambda *_: 0.0))]
    assert "fault" not in repr(records)
    assert "lr_change" not in repr(records)


def mean_projection(world: World, step: int) -> float:
    found = world.train(step).projections
    assert None not in found
    return sum(found) / WORLD  # type: ignore[arg-type]


def test_projections_average_to_1_unless_the_reduce_is_wrong(data: Corpus) -> None:
    for precision in ("fp32", "fp16"):
        breach = World(1, precision, data, [FaultSpec(name="clip_breach", params={"step": 1, "severity": 15.0})])
        breach.scale = min(breach.scale, 2.0**10)  # under which the noise does not overflow
        assert mean_projection(breach, 0) == pytest.approx(1.0, abs=1e-5)
        out = breach.train(1)
        assert sum(out.projections) / WORLD == pytest.approx(1.0, abs=1e-5)  # type: ignore[arg-type]
        assert out.grad_norm == pytest.approx(15.0, rel=0.1)
        assert out.grad_norms == pytest.approx([30.0] * WORLD, rel=0.1)
    params = {"step": 1, "mode": "reduce", "severity": 1.0, "steps": 1}
    wrong = World(1, "fp32", data, [FaultSpec(name="silent_corruption", params=params)])
    clean = World(1, "fp32", data)
    assert mean_projection(wrong, 0) == mean_projection(clean, 0)
    out, expected = wrong.train(1), clean.train(1)
    assert sum(out.projections) / WORLD == pytest.approx(0.5, rel=0.1)  # type: ignore[arg-type]
    assert out.grad_norms == expected.grad_norms
    assert len(set(out.checksums)) == 1  # alike on all ranks
    assert mean_projection(wrong, 2) == pytest.approx(1.0, abs=1e-5)


def test_a_flipped_rank_is_turned_from_the_mean_of_the_others(data: Corpus) -> None:
    params = {"step": 1, "rank": 2, "mode": "sign", "severity": 1.0}
    world = World(1, "fp32", data, [FaultSpec(name="silent_corruption", params=params)])
    for step in range(3):
        out = world.train(step)
        turned = [p - (p / c) ** 2 / WORLD < 0 for p, c in zip(out.projections, out.cosines, strict=True)]  # type: ignore[operator]
        assert turned == [step > 0 and rank == 2 for rank in range(WORLD)]


def test_records_hold_what_the_optimizer_used_and_what_came_in(data: Corpus) -> None:
    faults = [
        FaultSpec(name="wrong_beta2", params={"step": 1, "severity": 0.25}),
        FaultSpec(name="nan_batch", params={"step": 2, "rank": 3, "severity": 2}),
    ]
    world = World(1, "fp32", data, faults)
    recorder = telemetry.Recorder(world)
    told, shares = [], []
    for step in range(3):
        records = recorder.step(step, world.train(step), draw(1, step, lambda *_: 0.0))
        steps = [record for record in records if isinstance(record, StepRecord)]
        told.append([record.values.get("beta2") for record in steps])
        shares.append([record.values["nonfinite_share"] for record in records if isinstance(record, BatchRecord)])
        assert all(("grad_projection_rank" in record.values) == (step < 2) for record in steps)
    beta2 = world.config.optim.beta2
    assert told == [[beta2, None, None, None], [0.25, None, None, None], [0.25, None, None, None]]
    assert shares == [[0.0] * WORLD, [0.0] * WORLD, [0.0, 0.0, 0.0, 2 / DATA.batch_size]]
