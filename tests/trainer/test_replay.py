"""A stretch trained again: exact as it was, changed where it should be, and nothing of the run touched."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runhealth.diagnose.plans import ReplayOrder
from runhealth.storage.errors import CheckpointError, ConfigError, StoreError
from runhealth.storage.reader import RunReader
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer.config import FaultSpec, ParallelConfig, TrainConfig
from runhealth.trainer.data import Part
from runhealth.trainer.fault import registry
from runhealth.trainer.replay import LOGIT_HEADROOM, _cap_on, _merged, _UpdateClip
from runhealth.trainer.replay_command import Stage
from runhealth.trainer.schedule import learning_rate

FIRST, LAST = 6, 11
Train = Callable[..., RunInfo]
Rows = dict[tuple[int, int], tuple[Any, ...]]


def order(change: str = "as_is", **more: Any) -> ReplayOrder:
    fields = {"incident": "i", "name": "n", "attempt": 0, "checkpoint": f"checkpoints/step-{FIRST:08d}"}
    return ReplayOrder(**{**fields, "change": change, "stop_step": LAST + 1, **more})


def rows(run: RunInfo, *signals: str) -> Rows:
    names = ", ".join(signals or ("loss", "grad_norm"))
    with RunReader.open(run.path) as reader:
        found = reader.sql(f"SELECT step, rank, {names} FROM steps WHERE rank >= 0 AND step >= {FIRST}")
    return {(step, rank): tuple(values) for step, rank, *values in found.iter_rows()}


def with_fault(config: TrainConfig, *faults: str) -> TrainConfig:
    return dataclasses.replace(config, faults=tuple(map(FaultSpec.parse, faults)))


@pytest.fixture
def play(train: Train) -> Callable[..., RunInfo]:
    """`play(run, config, change, …)`: the ranks of a replay of the run's first attempt."""
    played = []

    def start(run: RunInfo, config: TrainConfig, change: str = "as_is", **more: Any) -> RunInfo:
        played.append(change)
        made = order(change, **more)
        whole = f"{run.path}/{made.checkpoint}"
        before = f"{run.path}/{made.before}" if made.before else ""
        return train(
            f"{change}-{len(played)}", config, checkpoint=whole, replay=dataclasses.replace(made, before=before)
        )

    return start


def layout(tiny: TrainConfig, name: str) -> TrainConfig:
    model = dataclasses.replace(tiny.model, layers=2, precision="fp32")
    return {
        "ddp": tiny,
        "ddp of 3": dataclasses.replace(tiny, world=3, model=model),
        "zero1": dataclasses.replace(tiny, model=model, parallel=ParallelConfig(kind="zero1")),
        "zero2": dataclasses.replace(tiny, model=model, parallel=ParallelConfig(kind="zero2")),
        "pipeline": dataclasses.replace(tiny, model=model, parallel=ParallelConfig(pp=2, microbatches=2)),
    }[name]


@pytest.mark.parametrize("name", ["ddp", "ddp of 3", "zero1", "zero2", "pipeline"])
def test_as_it_was_is_bit_equal_in_every_layout(
    name: str, tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]
) -> None:
    config = layout(tiny, name)
    run = train("run", config)
    again = play(run, config)
    signals = ("loss", "grad_norm", "grad_norm_rank") if name.startswith("ddp") else ("loss", "grad_norm")
    assert rows(again, *signals) == rows(run, *signals)
    assert not (Path(again.path) / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("zero2", "restore_optimizer"),
        ("zero2", "clip_updates"),
        ("zero2", "swap_lanes"),
        ("zero1", "restore_optimizer"),
        ("zero1", "clip_updates"),
        ("ddp", "half_clip"),
    ],
)
def test_changes_work_in_layouts(
    name: str, change: str, tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]
) -> None:
    config = layout(tiny, name)
    run = train("run", config)
    met = rows(play(run, config, change))
    told = rows(run)
    assert len(met) == len(told) == 12
    if change in ("restore_optimizer", "clip_updates"):  # the moments of this very checkpoint; nothing to clip
        assert met == told
    elif change == "swap_lanes":
        for rank in (0, 1):
            assert met[FIRST, rank][0] == pytest.approx(told[FIRST, 1 - rank][0], rel=1e-5)
    else:
        assert met[FIRST, 0] == told[FIRST, 0]
        assert met[LAST, 0] != told[LAST, 0]


def test_the_schedule_holds_whatever_changed_the_rate(
    tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]
) -> None:
    config = with_fault(tiny, "lr_change:step=8,severity=30")
    run, healthy = train("run", config), train("healthy", tiny)
    met = play(run, config, "scheduled_lr")
    assert rows(met) == rows(healthy) != rows(run)
    assert rows(met, "lr")[9, 0] == (pytest.approx(learning_rate(tiny.optim, 9, tiny.steps)),)


def test_what_a_machine_did_once_is_left_out(tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]) -> None:
    config = with_fault(tiny, "silent_corruption:step=8,mode=scale,rank=1")
    run, healthy = train("run", config), train("healthy", tiny)
    assert rows(play(run, config)) == rows(healthy) != rows(run)


def test_masked_rows_come_from_elsewhere(tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]) -> None:
    config = with_fault(tiny, "label_shift:step=8,rank=1")
    run = train("run", config)
    query = "SELECT shard, label_mismatch_share AS wrong FROM batches WHERE rank = 1 AND step >= 8"
    with RunReader.open(run.path) as reader:
        read = reader.sql(query)
    masked = play(run, config, "mask_shards", shards=tuple(sorted(set(read["shard"]))))
    with RunReader.open(masked.path) as reader:
        met = reader.sql(query)
    assert min(read["wrong"]) > 0.5 > max(met["wrong"])
    assert not set(read["shard"]) & set(met["shard"])


def test_a_nan_of_the_data_goes_with_the_data(tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]) -> None:
    config = with_fault(tiny, "nan_batch:step=8,rank=1")
    run = train("run", config)
    with RunReader.open(run.path) as reader:
        (shard,) = reader.sql("SELECT DISTINCT shard FROM batches WHERE rank = 1 AND step = 8")["shard"].to_list()
    lost = {key for key, (loss,) in rows(run, "loss").items() if key[0] == 8 and loss != loss}
    swapped = {k for k, (v,) in rows(play(run, config, "swap_lanes"), "loss").items() if k[0] == 8 and v != v}
    masked = rows(play(run, config, "mask_shards", shards=(shard,)), "loss")
    assert (lost, swapped) == ({(8, 1)}, {(8, 0)})
    assert all(loss == loss for (loss,) in masked.values())


def test_a_load_happens_again_where_the_attempt_began_with_it(
    tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]
) -> None:
    healthy = train("run", tiny)
    config = with_fault(tiny, f"optimizer_state_lost:step={FIRST},mode=both")
    hurt = play(healthy, config, resumes=True)
    assert rows(hurt) != rows(healthy)
    assert rows(play(healthy, config)) == rows(healthy), "nothing was loaded here"
    assert rows(play(healthy, config, "restore_optimizer", resumes=True)) == rows(healthy)


@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_updates_are_clipped(name: str, tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]) -> None:
    config = with_fault(layout(tiny, name), "adam_staleness:step=8,severity=1e9,steps=4,tensor=norm")
    run, healthy = train("run", config), train("healthy", layout(tiny, name))
    told, met, clean = (rows(r, "update_ratio")[9, 0][0] for r in (run, play(run, config, "clip_updates"), healthy))
    assert abs(met - clean) < 0.5 * abs(told - clean)


def test_fp32_takes_off_the_casts(tiny: TrainConfig, train: Train, play: Callable[..., RunInfo]) -> None:
    config = with_fault(tiny, "fp8_stale_amax:step=8,severity=4096")
    run = train("run", config)
    assert max(v for (v,) in rows(run, "overflow_count").values() if v is not None) > 0
    met = rows(play(run, config, "fp32"), "overflow_count").values()
    assert all(not count for (count,) in met)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_transient_faults_are_those_of_machines() -> None:
    transient = {name for name, kind in registry().items() if kind.transient}
    assert {"silent_corruption", "dead_rank", "hang", "compute_straggler", "comm_straggler"} <= transient
    assert not {"bad_shard", "label_shift", "lr_change", "optimizer_state_lost", "fp8_stale_amax"} & transient


def test_rows_are_merged_by_their_place() -> None:
    mine = (Part(shard=1, samples=(10, 11), positions=(0, 2)), Part(shard=2, samples=(20,), positions=(1,)))
    others = (Part(shard=3, samples=(30, 31, 32), positions=(0, 1, 2)),)
    assert _merged(mine, others, {0}) == (
        Part(shard=3, samples=(30,), positions=(0,)),
        Part(shard=2, samples=(20,), positions=(1,)),
        Part(shard=1, samples=(11,), positions=(2,)),
    )


@pytest.mark.parametrize(("second_moment", "clipped"), [(1e-4, True), (4.0, False)])
def test_an_update_larger_than_the_learning_rate_is_cut_to_it(second_moment: float, clipped: bool) -> None:
    stepped = []
    for clip in (False, True):
        parameter = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0)
        if clip:
            _UpdateClip(optimizer)
        optimizer.state[parameter] = {
            "step": torch.tensor(50.0),
            "exp_avg": torch.tensor([1.0, -2.0, 0.5, 0.0]),
            "exp_avg_sq": torch.full((4,), second_moment),
        }
        parameter.grad = torch.full((4,), 1e-9)
        optimizer.step()
        stepped.append(parameter.detach())
    plain, cut = stepped
    rms = float(plain.square().mean().sqrt())
    assert (rms > 0.1) is clipped
    assert torch.allclose(cut, plain * min(1.0, 0.1 / rms), rtol=1e-4)
    assert torch.equal(cut, plain) is (rms <= 0.1)


def test_matrices_of_logits_are_capped_and_the_others_are_not() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12, bias=False), "head": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
    cap = _cap_on(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    cap()
    q, _, v = model["qkv"].weight.chunk(3)
    q0, _, v0 = before["qkv.weight"].chunk(3)
    assert float(q.detach().norm()) == pytest.approx(LOGIT_HEADROOM * float(q0.norm()))
    assert torch.equal(v, 3.0 * v0)
    assert torch.equal(model["down"].weight, 3.0 * before["down.weight"])


# -- what a stage refuses ---------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tiny: TrainConfig, train: Train) -> Stage:
    return Stage(train("run", tiny))


@pytest.mark.parametrize("path", ["checkpoints/..", "checkpoints/../x", "/etc", "step-00000006", "checkpoints/a/b", ""])
def test_only_checkpoints_of_the_run_are_loaded(stage: Stage, path: str) -> None:
    if path == "":  # the attempt began with nothing, and that is no checkpoint
        with pytest.raises((ConfigError, CheckpointError)):
            stage._spec(order(checkpoint=path))
        return
    with pytest.raises(ConfigError, match="expected a checkpoint of run 'run'"):
        stage._spec(order(checkpoint=path))


def test_a_stage_says_what_is_missing(stage: Stage) -> None:
    with pytest.raises(ConfigError, match="attempt 7 of run 'run' was not started by"):
        stage._spec(order(attempt=7))
    with pytest.raises(CheckpointError, match="nothing is replayed from a checkpoint that fails"):
        stage._spec(order(checkpoint="checkpoints/step-00000099"))
    for name in ("..", "a/b", ""):
        with pytest.raises(StoreError, match="a run name has"):
            stage._spec(order(name=name))


def test_a_replay_packs_no_data(stage: Stage, store: Store) -> None:
    Path(store.root, ".data").unlink()
    with pytest.raises(ConfigError, match="expected the run's training data"):
        stage._spec(order())


def test_an_earlier_replay_of_the_name_gives_way(stage: Stage) -> None:
    first = stage._spec(order())
    (Path(first.run_path) / "old").write_text("")
    second = stage._spec(order("mask_shards", shards=("0001",)))
    assert first.run_path == second.run_path
    assert second.attempt == 0
    assert not (Path(second.run_path) / "old").exists()
    assert second.checkpoint == str(Path(stage.run.path).resolve() / f"checkpoints/step-{FIRST:08d}")
    shutil.rmtree(Path(first.run_path).parents[1])


def test_nothing_outside_the_run_is_removed(stage: Stage, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    home = Path(stage.run.path) / "replays" / "i"
    home.mkdir(parents=True)
    (home / "n").symlink_to(outside)
    with pytest.raises(ConfigError, match="met a link to"):
        stage.play(order())
    (home / "n").unlink()
    home.rmdir()
    (outside / "n").mkdir()
    (outside / "n" / "precious").write_text("mine")
    home.symlink_to(outside)
    with pytest.raises(ConfigError, match="met a link to"):
        stage.play(order())
    assert (outside / "precious").read_text() == (outside / "n" / "precious").read_text() == "mine"


def test_an_earlier_replay_that_cannot_be_removed_is_an_answer(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    (Path(stage.run.path) / "replays" / "i" / "n").mkdir(parents=True)

    def denied(_path: Path) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(shutil, "rmtree", denied)
    with pytest.raises(StoreError, match="cannot be removed: denied"):
        stage.play(order())
