import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.errors import CheckpointError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import CheckpointRecord, CheckpointStatus
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints
from runhealth.trainer.config import TrainConfig


def make(run: Path, step: int, attempt: int = 0, finite: bool = True) -> Path:
    """A checkpoint folder of plain bytes; verification never looks inside the shards."""
    folder = run / checkpoints.relative_path(step, attempt)
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"meta" * 10)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    checkpoints.commit(str(folder), step=step, attempt=attempt, world=2, finite=finite)
    return folder


def edit(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = folder / checkpoints.MANIFEST
    raw = json.loads(path.read_text())
    del raw["xxh3_64"]  # its own hash would say first that it was changed
    change(raw)
    path.write_text(json.dumps(raw))


def flip_bit(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    blob = bytearray(path.read_bytes())
    blob[5000] ^= 0x10
    path.write_bytes(blob)


def lose_page(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:4096] + bytes(4096) + path.read_bytes()[8192:])


def truncate(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip_digit_in_manifest(folder: Path) -> None:
    path = folder / checkpoints.MANIFEST
    text = path.read_text()
    at = text.index('"xxh3_64": "') + len('"xxh3_64": "')
    path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (flip_bit, r"__0_0\.distcp: expected xxh3"),
    "lost page": (lose_page, r"__0_0\.distcp: expected xxh3"),
    "truncated": (truncate, r"__0_0\.distcp: expected 10240 bytes, met 10239"),
    "missing shard": (lambda f: (f / "__0_0.distcp").unlink(), r"__0_0\.distcp: expected a file"),
    "missing metadata": (lambda f: (f / ".metadata").unlink(), r"\.metadata: expected a file"),
    "half written": (lambda f: (f / "MANIFEST.json").unlink(), r"MANIFEST\.json: missing"),
    "stale shard": (lambda f: (f / "__2_0.distcp").write_bytes(b"x"), r"__2_0\.distcp: a shard that the manifest"),
    "manifest changed": (flip_digit_in_manifest, r"MANIFEST\.json: expected xxh3 \w+ over its content"),
    "manifest cut": (lambda f: (f / "MANIFEST.json").write_text('{"version": 1,'), r"as JSON"),
    "other version": (lambda f: edit(f, lambda raw: raw.update(version=9)), r"version 1, met 9"),
    "no files": (lambda f: edit(f, lambda raw: raw.update(files=[])), r"list of files"),
    "bad step": (lambda f: edit(f, lambda raw: raw.update(step=-1)), r"step as a non-negative integer, met -1"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_the_file_is_named(tmp_path: Path, kind: str):
    folder = make(tmp_path, 100)
    assert checkpoints.verify(str(folder)).step == 100
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.verify(str(folder))


def test_every_damaged_file_is_named(tmp_path: Path):
    folder = make(tmp_path, 100)
    flip_bit(folder)
    (folder / ".metadata").write_bytes(b"")
    (folder / "__5_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointError) as refused:
        checkpoints.verify(str(folder))
    assert all(f"{name}:" in str(refused.value) for name in (".metadata", "__0_0.distcp", "__5_0.distcp"))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "..", "a/b", "", "a\\b", 7])
def test_hostile_names_in_a_manifest_are_refused(tmp_path: Path, name: object):
    folder = make(tmp_path, 100)
    edit(folder, lambda raw: raw.update(files=[{"name": name, "size_bytes": 1, "xxh3_64": "00"}]))
    with pytest.raises(CheckpointError, match="expected plain file names"):
        checkpoints.verify(str(folder))


def test_a_link_in_place_of_a_shard_is_refused(tmp_path: Path):
    folder = make(tmp_path, 100)
    shard = folder / "__0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="expected a file"):
        checkpoints.verify(str(folder))


def test_the_newest_verified_is_chosen_and_reasons_are_given(tmp_path: Path):
    for step in (100, 200, 300, 400, 500):
        make(tmp_path, step, finite=step != 400)
    flip_bit(tmp_path / "checkpoints" / "step-00000300")
    (tmp_path / "checkpoints" / "step-00000600").mkdir()  # a save that did not finish
    info, failed = checkpoints.newest_verified(str(tmp_path), superseded=["checkpoints/step-00000500"])
    assert info is not None
    assert info.step == 200
    assert [bad.step for bad, _ in failed] == [400, 300]
    assert "NaN or Inf" in failed[0][1]


def test_only_what_an_interrupted_save_left_is_swept_away(tmp_path: Path):
    make(tmp_path, 100)
    damaged = make(tmp_path, 200)
    (damaged / checkpoints.MANIFEST).unlink()  # all shards were written: somebody may want them
    unfinished = tmp_path / checkpoints.relative_path(300, 2)
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "notes").mkdir()
    assert checkpoints.sweep(str(tmp_path)) == [checkpoints.relative_path(300, 2)]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["notes", "step-00000100", "step-00000200"]


def test_a_second_attempt_has_a_folder_of_its_own(tmp_path: Path):
    make(tmp_path, 100)
    make(tmp_path, 100, attempt=1)
    assert [info.path for info in checkpoints.committed(str(tmp_path))] == [
        "checkpoints/step-00000100",
        "checkpoints/step-00000100-a001",
    ]


def test_retiring_keeps_the_newest_finite_ones_and_the_needed(tmp_path: Path):
    for step in (100, 200, 300, 400, 500, 600):
        make(tmp_path, step, finite=step != 500)
    name = "checkpoints/step-00000{}".format
    assert checkpoints.retire(str(tmp_path), 0) == []
    removed = checkpoints.retire(str(tmp_path), 2, needed=[name(100)], superseded=[name(600)])
    assert removed == [name(200)]
    assert [info.step for info in checkpoints.committed(str(tmp_path))] == [100, 300, 400, 500, 600]
    assert checkpoints.retire(str(tmp_path), 2, needed=[name(100)]) == [name(300)]


def test_a_damaged_manifest_of_an_old_generation_stops_no_retiring(tmp_path: Path):
    folders = [make(tmp_path, step) for step in (100, 200, 300, 400)]
    (folders[2] / checkpoints.MANIFEST).write_text("garbage")
    assert checkpoints.retire(str(tmp_path), 3) == []  # it is none of the three that stay
    assert checkpoints.retire(str(tmp_path), 2) == ["checkpoints/step-00000100"]


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint as bytes, read with the safe reader in this process."""
    import warnings

    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    from runhealth.trainer.dcp import SafeReader

    reader = SafeReader(str(folder))
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(state, storage_reader=reader, no_dist=True)
    return {name: value.numpy().tobytes() for name, value in state.items()}


def losses(run: RunInfo, store: Store) -> dict[tuple[int, int], float]:
    with RunReader.open(run.name, store.root) as reader:
        frame = reader.sql("SELECT step, rank, loss FROM steps WHERE loss IS NOT NULL ORDER BY step, rank, attempt")
    return {(step, rank): loss for step, rank, loss in frame.iter_rows()}


def test_two_ranks_resume_bit_identically(tiny: TrainConfig, store: Store, train: Callable[..., RunInfo]):
    straight = train("straight", tiny)
    halves = train("halves", tiny, stop_step=6)
    train("halves", tiny, checkpoint="checkpoints/step-00000006")

    whole = tensors(Path(straight.path) / "checkpoints/step-00000012")
    resumed = tensors(Path(halves.path) / "checkpoints/step-00000012-a001")
    assert whole == resumed
    assert any(name.startswith("local.r00001.blocks.0.down.x.history") for name in whole)
    assert losses(straight, store) == losses(halves, store)

    with RunReader.open("halves", store.root) as reader:
        records = [record for record in reader.records() if isinstance(record, CheckpointRecord)]
    assert [(r.attempt, r.step, r.status) for r in records] == [
        (0, 6, CheckpointStatus.SAVED),
        (0, 6, CheckpointStatus.VERIFIED),
        (1, 6, CheckpointStatus.LOADED),
        (1, 12, CheckpointStatus.SAVED),
        (1, 12, CheckpointStatus.VERIFIED),
    ]


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("exploded"),))


def test_metadata_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from runhealth.trainer.dcp import SafeReader

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(CheckpointError, match="refused"):
        SafeReader(str(tmp_path)).read_metadata()
    assert not (tmp_path / "exploded").exists()
