import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from runhealth.diagnose.plans import SkipRange
from runhealth.storage.errors import ConfigError, CorruptDataError
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.data import BatchPlan, DataConfig, Manifest, ShardReader, data_folder, pack, shard_name
from runhealth.trainer.skips import SkipSet

DATA = DataConfig(shards=16, heldout_shards=1, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=4)


def samples_of(plan: BatchPlan, step: int, rank: int) -> list[tuple[int, int]]:
    """(shard, sample) of every row, in order."""
    rows = {
        row: (part.shard, sample)
        for part in plan.batch(step, rank)
        for row, sample in zip(part.positions, part.samples, strict=True)
    }
    assert sorted(rows) == list(range(plan.data.batch_size))
    return [rows[row] for row in sorted(rows)]


def test_batch_is_a_pure_function_of_seed_step_and_rank():
    one, other = (BatchPlan(data=DATA, seed=5, world=2) for _ in range(2))
    backwards = {(step, rank): samples_of(other, step, rank) for step in reversed(range(80)) for rank in (1, 0)}
    assert all(samples_of(one, step, rank) == batch for (step, rank), batch in backwards.items())
    reseeded = BatchPlan(data=DATA, seed=6, world=2)
    assert any(samples_of(one, step, 0) != samples_of(reseeded, step, 0) for step in range(80))


def test_an_epoch_reads_every_shard_once_and_each_visit_is_contiguous_on_one_rank():
    plan = BatchPlan(data=DATA, seed=5, world=2)
    visits = DATA.shards // 2
    owners: dict[int, set[tuple[int, int]]] = {}
    for step in range(visits * DATA.steps_per_visit):
        shards = [plan.shard_of(step, rank) for rank in (0, 1)]
        for rank, shard in enumerate(shards):
            owners.setdefault(shard, set()).add((rank, step // DATA.steps_per_visit))
    assert sorted(owners) == list(range(DATA.shards))
    assert all(len(where) == 1 for where in owners.values())


def test_a_visit_reads_no_sample_twice():
    plan = BatchPlan(data=DATA, seed=5, world=2)
    seen = [sample for step in plan.visit_of(0) for _, sample in samples_of(plan, step, 1)]
    assert len(seen) == len(set(seen)) == DATA.steps_per_visit * DATA.batch_size


def test_skipped_samples_are_replaced_and_all_others_stay():
    clean = BatchPlan(data=DATA, seed=5, world=2)
    shard = clean.shard_of(40, 1)
    skips = SkipSet().add([SkipRange(shard=shard_name(shard), first_sample=10, last_sample=60)])
    skipping = BatchPlan(data=DATA, seed=5, world=2, skips=skips)
    changed = 0
    for step in range(200):
        for rank in (0, 1):
            for before, after in zip(samples_of(clean, step, rank), samples_of(skipping, step, rank), strict=True):
                if before[0] == shard and 10 <= before[1] <= 60:
                    assert not (after[0] == shard and 10 <= after[1] <= 60)
                    changed += 1
                else:
                    assert before == after
    assert changed > 0


def test_a_shard_skipped_whole_is_never_read_and_its_substitute_is_one_part():
    clean = BatchPlan(data=DATA, seed=5, world=2)
    shard = clean.shard_of(40, 1)
    skips = SkipSet().add([SkipRange(shard=shard_name(shard), first_sample=0, last_sample=DATA.samples_per_shard - 1)])
    skipping = BatchPlan(data=DATA, seed=5, world=2, skips=skips)
    for step in range(400):
        for rank in (0, 1):
            parts = skipping.batch(step, rank)
            assert len(parts) == 1
            assert parts[0].shard != shard


def test_nothing_left_to_train_on_is_an_error():
    everything = [
        SkipRange(shard=shard_name(i), first_sample=0, last_sample=DATA.samples_per_shard - 1)
        for i in range(DATA.shards)
    ]
    plan = BatchPlan(data=DATA, seed=5, world=2, skips=SkipSet().add(everything))
    with pytest.raises(ConfigError, match="nothing is left"):
        plan.batch(0, 0)


def test_skip_ranges_merge_and_survive_json():
    skips = SkipSet().add([SkipRange(shard="0001", first_sample=5, last_sample=9)])
    skips = skips.add([SkipRange(shard="0001", first_sample=10, last_sample=12)])
    assert skips.ranges == {"0001": ((5, 12),)}
    assert skips.samples() == 8
    assert [s for s in range(20) if skips.covers("0001", s)] == list(range(5, 13))
    assert SkipSet.from_json(json.loads(json.dumps(skips.to_json()))) == skips
    with pytest.raises(ConfigError, match="pairs"):
        SkipSet.from_json({"0001": [5, 9]})


def test_pack_is_deterministic_and_the_manifest_tells_the_truth(tmp_path: Path):
    first, second = (pack(str(tmp_path / name), DATA) for name in ("one", "two"))
    assert first == second == Manifest.load(str(tmp_path / "one"))
    assert len(first.shards) == 17
    for entry in first.shards:
        blob = (tmp_path / "one" / entry.path).read_bytes()
        assert len(blob) == entry.stop - entry.start == sum(s.stop - s.start for s in entry.sources)
        assert xxhash.xxh3_64_intdigest(blob) == entry.xxh3_64


def test_reader_hashes_what_arrives_and_does_not_refuse_it(tmp_path: Path):
    manifest = pack(str(tmp_path), DATA)
    honest = ShardReader(str(tmp_path), manifest, DATA).shard(3)
    assert honest.shard_hash == honest.manifest_hash == manifest.shards[3].xxh3_64
    tampered = ShardReader(str(tmp_path), manifest, DATA, lambda _name, blob: bytes(len(blob))).shard(3)
    assert tampered.manifest_hash == manifest.shards[3].xxh3_64
    assert tampered.shard_hash == xxhash.xxh3_64_intdigest(bytes(DATA.shard_bytes))


def test_rows_are_the_bytes_of_their_samples(tiny: TrainConfig, corpus: Path):
    folder = data_folder(str(corpus), tiny.data)
    reader = ShardReader(folder, Manifest.load(folder), tiny.data)
    plan = BatchPlan(data=tiny.data, seed=1, world=2)
    rows = reader.rows(plan.batch(7, 1))
    for row, (shard, sample) in zip(rows, samples_of(plan, 7, 1), strict=True):
        blob = (Path(folder) / f"shard-{shard_name(shard)}.bin").read_bytes()
        start = sample * tiny.data.seq_len
        assert row.tolist() == list(blob[start : start + tiny.data.seq_len + 1])


def test_heldout_is_fixed_and_apart_from_training(tiny: TrainConfig, corpus: Path):
    folder = data_folder(str(corpus), tiny.data)
    one, two = (ShardReader(folder, Manifest.load(folder), tiny.data).heldout(16) for _ in range(2))
    assert one.shape == (16, 17)
    assert np.array_equal(one, two)


def test_missing_and_short_shards_and_foreign_manifests_are_named(tmp_path: Path):
    manifest = pack(str(tmp_path), DATA)
    (tmp_path / "shard-0002.bin").write_bytes(b"short")
    (tmp_path / "shard-0003.bin").unlink()
    reader = ShardReader(str(tmp_path), manifest, DATA)
    with pytest.raises(CorruptDataError, match=r"shard-0002.bin: expected 2048 bytes, met 5"):
        reader.shard(2)
    with pytest.raises(CorruptDataError, match=r"shard-0003.bin: expected shard 0003"):
        reader.shard(3)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CorruptDataError, match=r"manifest.json: expected a data manifest"):
        Manifest.load(str(tmp_path))


def test_impossible_data_configs_are_refused():
    with pytest.raises(ConfigError, match="fewer than batch_size"):
        DataConfig(shard_bytes=256, piece_bytes=256, seq_len=64, batch_size=16)
    with pytest.raises(ConfigError, match="multiple of piece_bytes"):
        DataConfig(shard_bytes=1000, piece_bytes=256)
    with pytest.raises(ConfigError, match="one shard a rank"):
        BatchPlan(data=DATA, seed=1, world=17)
