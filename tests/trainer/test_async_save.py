"""Saves in the background, to other file systems, and loaded by other layouts than the one that saved."""

import dataclasses
import importlib.util
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from runhealth.storage.errors import ConfigError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, RunEvent, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints
from runhealth.trainer.cadence import cadence
from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.folders import join
from runhealth.trainer.launch import RunState
from runhealth.trainer.origin import begin_with, newest_of
from runhealth.trainer.supervisor import Supervisor, create

Run = Callable[..., dict[int, Any]]

BASE = TrainConfig(
    steps=6,
    seed=5,
    world=1,
    data=DataConfig(shards=8, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=4),
    model=ModelConfig(layers=4, width=16, heads=2, ffn_width=32, fused=False),
    optim=OptimConfig(lr=3e-3, clip_threshold=0.5),
)
NO_S3 = importlib.util.find_spec("moto") is None or importlib.util.find_spec("s3fs") is None


def layout(world: int, **parallel: Any) -> TrainConfig:
    return dataclasses.replace(BASE, world=world, parallel=ParallelConfig(**parallel))


def merged(results: dict[int, Any], key: str) -> dict[str, str]:
    """One hash a tensor of all ranks, which must agree where they hold the same one."""
    whole: dict[str, str] = {}
    for result in results.values():
        for name, value in result[key].items():
            assert whole.setdefault(name, value) == value, name
    return whole


SAVED = layout(4, kind="zero3", tp=2)
OTHERS = {
    "single": layout(1),
    "zero1": layout(2, kind="zero1"),
    "pipeline": layout(2, pp=2, microbatches=2),
    "zero3 on three ranks": layout(3, kind="zero3"),
}


def test_a_background_save_is_a_snapshot_and_every_layout_loads_the_same(run: Run, tmp_path: Path):
    made = run(4, "save_layout", SAVED, str(tmp_path), 2, 2, True)
    outcome = made[0]["outcome"]
    assert (outcome.verified, outcome.error, outcome.step) == (True, "", 2)
    assert outcome.blocking_s > 0
    assert outcome.write_s > 0
    folder = str(tmp_path / outcome.path)
    names = {entry.name for entry in checkpoints.verify(folder).files}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}  # every rank writes its own
    saved, end = merged(made, "saved"), merged(made, "end")
    assert all(saved[name] != end[name] for name in saved if name.startswith("model."))  # training went on

    again = run(4, "load_layout", SAVED, folder, 2)
    assert merged(again, "loaded") == saved
    assert merged(again, "end") == end  # the same layout goes on bit-identically
    for name, config in OTHERS.items():
        other = run(config.world, "load_layout", config, folder, 0)
        assert other[0]["step"] == 2
        assert merged(other, "loaded") == saved, name


def test_stages_and_divided_moments_come_together_in_one_sharded_model(run: Run, tmp_path: Path):
    config = layout(4, pp=2, kind="zero1", microbatches=2)
    made = run(4, "save_layout", config, str(tmp_path), 1, 0, False)
    folder = str(tmp_path / made[0]["outcome"].path)
    loaded = run(2, "load_layout", layout(2, kind="zero3"), folder, 0)
    assert merged(loaded, "loaded") == merged(made, "saved")


def test_what_one_rank_finds_damaged_all_refuse(run: Run, tmp_path: Path):
    made = run(2, "save_layout", layout(2, kind="zero3"), str(tmp_path), 1, 0, False)
    folder = tmp_path / made[0]["outcome"].path
    shard = folder / "__1_0.distcp"
    blob = bytearray(shard.read_bytes())
    blob[len(blob) // 2] ^= 4
    shard.write_bytes(blob)
    refused = run(2, "load_layout", layout(2, kind="zero3"), str(folder), 0)
    assert {result["error"] for result in refused.values()} == {refused[0]["error"]}
    assert "__1_0.distcp: expected xxh3" in refused[0]["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 32, "ffn_width": 32}, r"expected model\.\S+ of \[.*\], met \["),
        ({"layers": 5}, r"expected a tensor model\.blocks\.4\S+, met none"),
    ],
)
def test_another_model_is_refused_with_the_tensor_named(run: Run, tmp_path: Path, change: dict[str, int], message: str):
    import re

    made = run(1, "save_layout", layout(1), str(tmp_path), 1, 0, False)
    model = dataclasses.replace(BASE.model, **change)  # type: ignore[arg-type]
    folder = str(tmp_path / made[0]["outcome"].path)
    refused = run(1, "load_layout", dataclasses.replace(BASE, model=model), folder, 0)
    assert re.search(message, refused[0]["error"]), refused[0]["error"]


def test_a_full_disk_on_one_rank_is_reported_by_all_and_leaves_nothing(run: Run, tmp_path: Path):
    outcomes = run(2, "save_on_a_full_disk", str(tmp_path))
    for first, second in outcomes.values():
        assert "No space left on device" in first.error
        assert (first.verified, second.verified, second.error) == (False, True, "")
    assert [info.step for info in checkpoints.committed(str(tmp_path))] == [2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_write_that_falls_short_is_reported_as_the_disk_said_it(run: Run, tmp_path: Path):
    for outcome in run(2, "save_beyond_the_file_limit", str(tmp_path)).values():
        assert outcome.error.endswith("rank 1: File too large")
    assert checkpoints.committed(str(tmp_path)) == []


# -------------------------------------------------------------------------------------------------------- in a real run


def test_a_run_finds_its_own_cadence_and_saves_by_it(tiny: TrainConfig, store: Store, train: Callable[..., RunInfo]):
    settings = CheckpointConfig(every=0, mtbf_h=2.0 / 3600.0, background=True)
    config = dataclasses.replace(tiny, steps=60, eval_every=100, checkpoint=settings)
    run = train("run", config, stop_step=40)
    with RunReader.open("run", store.root) as reader:
        found = list(reader.records())
    (event,) = [r for r in found if isinstance(r, RunEvent) and r.kind == "cadence"]
    facts = {key: float(value) for key, value in event.data.items() if isinstance(value, int | float)}
    again = cadence(**{key: facts[key] for key in ("save_s", "write_s", "mtbf_s", "restart_s")})
    assert facts["interval_s"] == again.interval_s
    assert facts["every"] == again.every_steps(facts["step_s"])
    assert f"sqrt(2 * {facts['save_s']:.4g} * 2)" in "\n".join(event.data["arithmetic"])
    assert json.loads((Path(run.path) / "cadence.json").read_text())["every"] == facts["every"]

    every = int(facts["every"])
    due = {5, 40, *range(every, 41, every)} - set(range(1, 5))
    verified = {r.step for r in found if isinstance(r, CheckpointRecord) and r.status is CheckpointStatus.VERIFIED}
    assert verified == due
    assert {info.step for info in checkpoints.committed(run.path)} == due

    train("run", config, checkpoint=checkpoints.relative_path(40, 0), failed_ns=time.time_ns())
    with RunReader.open("run", store.root) as reader:
        later = [r for r in reader.records() if isinstance(r, RunEvent) and r.kind == "cadence" and r.attempt == 1]
    assert later[0].data["every"] == every  # known from the start, by what the first attempt measured
    assert later[0].data["at_step"] == 40


# ------------------------------------------------------------------------------------------------- other file systems


@pytest.fixture(scope="module")
def s3(s3_server: str) -> dict[str, str]:
    """What fsspec needs to know of the server."""
    return {"key": "x", "secret": "x", "endpoint_url": s3_server}


@pytest.mark.skipif(NO_S3, reason="needs moto and s3fs")
def test_two_ranks_save_to_s3_and_damage_there_is_refused(
    run: Run, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3.items():
        monkeypatch.setitem(fsspec.config.conf.setdefault("s3", {}), name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.mkdir(bucket)
    base = checkpoints.base_of(f"s3://{bucket}/saved", "run", "/nowhere")
    assert base == f"s3://{bucket}/saved/run"

    made = run(2, "save_layout", layout(2, kind="zero3"), base, 1, 1, True, s3)
    outcome = made[0]["outcome"]
    assert (outcome.verified, outcome.error) == (True, "")
    newest, failed = checkpoints.newest_verified(base)
    assert (newest and newest.path, failed) == (outcome.path, [])

    shard = f"{bucket}/saved/run/{outcome.path}/__1_0.distcp"
    blob = bytearray(files.cat_file(shard))
    blob[1000] ^= 1
    files.pipe_file(shard, bytes(blob))
    newest, failed = checkpoints.newest_verified(base)
    assert newest is None
    assert "__1_0.distcp: expected xxh3" in failed[0][1]
    assert join(base, outcome.path) in failed[0][1]


def test_a_local_folder_behind_a_url_is_as_good(tmp_path: Path):
    base = f"file://{tmp_path}/saved"
    folder = checkpoints.open_folder(join(base, checkpoints.relative_path(7, 0)))
    folder.make()
    with pytest.raises(FileExistsError):
        folder.make()
    for name, body in ((".metadata", b"meta"), ("__0_0.distcp", bytes(100))):
        folder.write_whole(name, body)
    checkpoints.commit(folder.url, step=7, attempt=0, world=1, finite=True)
    assert [info.step for info in checkpoints.committed(base)] == [7]
    assert checkpoints.verify(folder.url).step == 7
    for step in (8, 9):
        later = checkpoints.open_folder(join(base, checkpoints.relative_path(step, 0)))
        later.make()
        later.write_whole(".metadata", b"meta")
        checkpoints.commit(later.url, step=step, attempt=0, world=1, finite=True)
    assert checkpoints.retire(base, 2) == [checkpoints.relative_path(7, 0)]
    assert [info.step for info in checkpoints.committed(base)] == [8, 9]


def test_a_new_run_begins_with_the_checkpoint_of_another_one_in_another_layout(
    tiny: TrainConfig, store: Store, train: Callable[..., RunInfo]
):
    old_config = dataclasses.replace(tiny, parallel=ParallelConfig(kind="zero3"), model=replaced(tiny.model))
    old = train("old", old_config)
    config = dataclasses.replace(old_config, steps=16, parallel=ParallelConfig(pp=2, microbatches=2))
    run = create(store, "new", config)
    newest = Path(old.path) / checkpoints.relative_path(12, 0)
    begun = newest_of(old, config)
    begin_with(run, begun)
    assert Path(begun).samefile(newest)
    assert RunState.read(run.path).origin == begun

    assert Supervisor(store, run, say=lambda _line: None).supervise() == 0
    with RunReader.open("new", store.root) as reader:
        found = list(reader.records())
    loaded = [r for r in found if isinstance(r, CheckpointRecord) and r.status is CheckpointStatus.LOADED]
    assert [(r.step, r.path) for r in loaded] == [(12, begun)]
    assert min(r.step for r in found if isinstance(r, StepRecord)) == 12
    assert [info.step for info in checkpoints.committed(run.path)] == [16]

    for other, message in (
        (dataclasses.replace(config, steps=12), "before the new run's end at step 12, met step 12"),
        (
            dataclasses.replace(config, model=dataclasses.replace(config.model, width=32, heads=4)),
            "--from old: expected a run of the same model, met width 16 instead of 32, heads 2 instead of 4",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            newest_of(old, other)

    (newest / ".metadata").write_bytes(b"")
    (Path(old.path) / checkpoints.relative_path(6, 0) / ".metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no checkpoint that verifies.*step-00000012/\.metadata"):
        newest_of(old, config)


def test_a_run_is_resumed_from_the_folder_behind_its_target(tiny: TrainConfig, store: Store, tmp_path: Path):
    settings = CheckpointConfig(every=6, background=True, target=f"file://{tmp_path}/saved")
    run = create(store, "run", dataclasses.replace(tiny, checkpoint=settings))
    assert Supervisor(store, run, stop_step=6, say=lambda _line: None).supervise() == 0
    assert not (Path(run.path) / "checkpoints").exists()
    shard = tmp_path / "saved/run/checkpoints/step-00000006/__1_0.distcp"
    assert shard.is_file()
    assert Supervisor(store, run, say=lambda _line: None).supervise() == 0
    with RunReader.open("run", store.root) as reader:
        loaded = [r for r in reader.records() if getattr(r, "status", None) is CheckpointStatus.LOADED]
    assert [(r.step, r.path) for r in loaded] == [(6, checkpoints.relative_path(6, 0))]
    assert [info.step for info in checkpoints.committed(f"{settings.target}/run")] == [6, 12]


def replaced(model: ModelConfig) -> ModelConfig:
    """Two layers, so that a pipeline has two stages, in fp32."""
    return dataclasses.replace(model, layers=2, precision="fp32")
