"""Saving and loading on a group of one rank, in this process."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from runhealth.storage.errors import CheckpointError
from runhealth.trainer import async_save, checkpoints, dcp
from runhealth.trainer.async_save import SaveOutcome
from runhealth.trainer.config import ModelConfig
from runhealth.trainer.model import Transformer, build

CONFIG = ModelConfig(layers=1, width=16, heads=2, ffn_width=32, precision="fp8")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(seed: int, config: ModelConfig = CONFIG) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build(config, 16, seed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.arange(32).view(2, 16)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save(run: Path, model: Transformer, optimizer: torch.optim.Optimizer) -> SaveOutcome:
    return async_save.save(str(run), dcp.state_of(model, optimizer, 7, 0), step=7, attempt=0)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path):
    model, optimizer = trained(1)
    outcome = save(tmp_path, model, optimizer)
    assert (outcome.verified, outcome.error) == (True, "")
    other, other_optimizer = trained(2)
    assert dcp.load(str(tmp_path / outcome.path), other, other_optimizer, rank=0) == 7
    before, after = (dcp.state_of(m, o, 7, 0) for m, o in ((model, optimizer), (other, other_optimizer)))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_with_nan_is_reported_and_never_chosen(tmp_path: Path):
    model, optimizer = trained(1)
    with torch.no_grad():
        model.head.weight[3, 3] = torch.nan
    outcome = save(tmp_path, model, optimizer)
    assert not outcome.verified
    assert "NaN or Inf" in outcome.error
    assert checkpoints.newest_verified(str(tmp_path))[0] is None


def test_a_folder_is_never_written_twice(tmp_path: Path):
    model, optimizer = trained(1)
    save(tmp_path, model, optimizer)
    again = save(tmp_path, model, optimizer)
    assert not again.verified
    assert "cannot be created" in again.error
    checkpoints.verify(str(tmp_path / again.path))


def test_loading_refuses_damage_and_another_model(tmp_path: Path):
    model, optimizer = trained(1)
    folder = tmp_path / save(tmp_path, model, optimizer).path
    wider, wider_optimizer = trained(1, dataclasses.replace(CONFIG, width=32))
    with pytest.raises(CheckpointError, match="step-00000007"):
        dcp.load(str(folder), wider, wider_optimizer, rank=0)
    shard = next(folder.glob("*.distcp"))
    blob = bytearray(shard.read_bytes())
    blob[len(blob) // 2] ^= 1
    shard.write_bytes(blob)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: expected xxh3"):
        dcp.load(str(folder), model, optimizer, rank=0)
