"""Every kind of damage to a checkpoint: is it refused with the file named, and does the older generation load?

Two ranks train and save three generations, sharded. The newest is damaged in one way after the other, in each of its
files; then the newest that verifies has to be the one before, and has to load with the values that were saved (into one
process: another layout than the one that saved it). For comparison: what torch.distributed.checkpoint alone makes of
the damage. At the end, what a save takes from training, in the foreground and in the background. The last line is one
JSON object:

    python bench/checkpoints.py
"""

import dataclasses
import json
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from runhealth.storage.store import Store
from runhealth.trainer import checkpoints, dcp
from runhealth.trainer.async_save import Saver
from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.model import build
from runhealth.trainer.supervisor import Supervisor, create

PAGE_BYTES = 4096
CONFIG = TrainConfig(
    steps=12,
    seed=3,
    world=2,
    data=DataConfig(shards=4, shard_bytes=4_096, seq_len=32, batch_size=4),
    model=ModelConfig(layers=2, width=64, heads=2, ffn_width=128),
    parallel=ParallelConfig(kind="zero3"),
    optim=OptimConfig(warmup_steps=4),
    checkpoint=CheckpointConfig(every=4),
    eval_every=1_000,
    eval_samples=16,
    timeout_s=60.0,
)
TIMED = ModelConfig(layers=8, width=384, heads=6, ffn_width=1_024)

Damage = Callable[[Path, Path], None]  # the file to damage, and the folder of the generation before


def missing(file: Path, _older: Path) -> None:
    file.unlink()


def empty(file: Path, _older: Path) -> None:
    file.write_bytes(b"")


def truncated(file: Path, _older: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def swapped(file: Path, _older: Path) -> None:
    """With the shard of another rank; `.metadata` with the manifest."""
    other = next(path for path in sorted(file.parent.iterdir()) if path != file and path.suffix == file.suffix)
    body = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(body)


def flipped_bit(file: Path, _older: Path) -> None:
    body = bytearray(file.read_bytes())
    body[len(body) * 2 // 5] ^= 0x08
    file.write_bytes(body)


def lost_page(file: Path, _older: Path) -> None:
    body = bytearray(file.read_bytes())
    start = len(body) * 2 // 5 // PAGE_BYTES * PAGE_BYTES
    body[start : start + PAGE_BYTES] = bytes(len(body[start : start + PAGE_BYTES]))
    file.write_bytes(body)


def half_overwritten(file: Path, older: Path) -> None:
    """Another save into the same folder was killed after this file."""
    shutil.copyfile(older / file.name, file)


def other_generation_s_end(file: Path, older: Path) -> None:
    """The same, in the middle of the file."""
    body, old = file.read_bytes(), (older / file.name).read_bytes()
    file.write_bytes(old[: len(old) // 2] + body[len(old) // 2 :])


KINDS: dict[str, Damage] = {
    "missing": missing,
    "empty": empty,
    "truncated": truncated,
    "swapped": swapped,
    "flipped bit": flipped_bit,
    "lost page": lost_page,
    "half-overwritten": half_overwritten,
    "half-overwritten file": other_generation_s_end,
}


def load_single(folder: str) -> dict[str, torch.Tensor]:
    """Load into one fresh process' model; all tensors of its state."""
    model = build(CONFIG.model, CONFIG.data.seq_len, seed=99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = dcp.load(folder, model, optimizer, rank=0)
    return dcp.state_of(model, optimizer, step, 0)


def torch_alone(folder: str, right: dict[str, torch.Tensor]) -> str:
    """What torch.distributed.checkpoint says without our verification."""
    state = {name: torch.zeros_like(value) for name, value in right.items() if not name.startswith("local.")}
    try:
        load_sharded(state, storage_reader=FileSystemReader(folder))
    except (CheckpointException, Exception) as error:  # noqa: BLE001  whatever it is, it is an answer
        return f"raises {type(error).__name__}"
    same = all(torch.equal(value, right[name]) for name, value in state.items())
    return "loads the right values" if same else "loads other values in silence"


def damage_all(base: str, generations: list[checkpoints.CheckpointInfo]) -> dict[str, dict[str, Any]]:
    older, newest = (Path(base) / info.path for info in generations[-2:])
    right = {info.path: load_single(str(Path(base) / info.path)) for info in generations[-2:]}
    kept = Path(base) / "kept"
    shutil.copytree(newest, kept)
    results: dict[str, dict[str, Any]] = {}
    for kind, damage in KINDS.items():
        cases = refused = named = fell_back = loaded = 0
        alone: set[str] = set()
        for name in sorted(path.name for path in kept.iterdir()):
            if name == checkpoints.MANIFEST and kind in ("swapped", "half-overwritten", "half-overwritten file"):
                continue  # the manifest of another generation is that generation's
            if name == ".metadata" and kind == "swapped":
                continue  # there is one only
            shutil.rmtree(newest)
            shutil.copytree(kept, newest)
            damage(newest / name, older)
            if (newest / name).exists() and (newest / name).read_bytes() == (kept / name).read_bytes():
                continue  # the older generation's file is the same
            cases += 1
            found, failed = checkpoints.newest_verified(base)
            gone = name == checkpoints.MANIFEST and kind == "missing"  # then it is no checkpoint at all
            refused += found is None or found.path != generations[-1].path
            named += gone or any(re.search(rf"/{re.escape(name)}: ", why) is not None for _, why in failed)
            if found is not None and found.path == generations[-2].path:
                fell_back += 1
                state = load_single(str(Path(base) / found.path))
                loaded += all(torch.equal(value, right[found.path][key]) for key, value in state.items())
            if name != checkpoints.MANIFEST:
                alone.add(torch_alone(str(newest), right[generations[-1].path]))
        results[kind] = {
            "cases": cases,
            "refused": refused,
            "named": named,
            "older_chosen": fell_back,
            "older_loaded": loaded,
            "torch_alone": sorted(alone),
        }
        print(f"{kind}: {results[kind]}", file=sys.stderr)
    shutil.rmtree(newest)
    kept.rename(newest)
    return results


def time_saves(base: str) -> dict[str, float]:
    """What one save takes from training. One process, so that nothing waits for a core."""
    model = build(TIMED, 128, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = dcp.state_of(model, optimizer, 0, 0)
    found: dict[str, float] = {}
    for name, background in (("foreground", False), ("background", True)):
        saver = Saver(f"{base}/{name}", attempt=0, background=background, timeout_s=60.0)
        blocking, whole = [], []
        for step in range(1, 5):
            started = time.perf_counter()
            saver.start(state, step)
            blocking.append(time.perf_counter() - started)
            outcome = saver.wait()
            whole.append(time.perf_counter() - started)
            assert outcome is not None
            assert outcome.verified, outcome.error
            found["size_mb"] = round(outcome.size_bytes / 1e6, 1)
        found[f"{name}_blocking_s"] = round(min(blocking), 4)
        found[f"{name}_whole_s"] = round(min(whole), 4)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        run = create(store, "saved", CONFIG)
        assert Supervisor(store, run).supervise() == 0
        results = damage_all(run.path, checkpoints.committed(run.path))
        timed = time_saves(f"{root}/timed")
    dist.destroy_process_group()
    counts = [(r["cases"], r["refused"], r["named"], r["older_chosen"], r["older_loaded"]) for r in results.values()]
    result = {
        "config": dataclasses.asdict(CONFIG.parallel)["kind"],
        "damage": results,
        "all_refused_and_named": all(len(set(row)) == 1 and row[0] > 0 for row in counts),
        "save": timed,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
