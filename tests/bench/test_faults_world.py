"""The simulated ranks: exact, repeatable, and with telemetry that survives its file."""

import dataclasses
from pathlib import Path

import pytest
import torch
from bench.faults import corpus, telemetry
from bench.faults.clock import WORLD, draw
from bench.faults.corpus import DATA, Corpus
from bench.faults.world import World

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
