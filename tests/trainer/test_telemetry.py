"""What the trainer records of a step, which suspects of the optimizer, of logits and of pauses need."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from runhealth.storage.reader import RunReader
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer.config import ModelConfig, ParallelConfig, TrainConfig

MODEL = ModelConfig(layers=2, width=16, heads=2, ffn_width=32)
EVERY_RANK = ("logit_max", "attn_logit_max", "t_gc_s", "sum_len_sq", "epoch")


def test_two_replicas(train: Callable[..., RunInfo], store: Store, tiny: TrainConfig) -> None:
    config = dataclasses.replace(tiny, model=MODEL, steps=4, updates_every=2, layers_every=2)
    info = train("replicas", config)
    with RunReader.open(info.name, store.root) as reader:
        steps = reader.sql("SELECT * FROM steps ORDER BY step, rank").to_dicts()
        layers = reader.sql("SELECT step, rank, layer, logit_max, adam_rms, grad_rms FROM layers").to_dicts()
    for row in steps:
        told = {name for name in EVERY_RANK if row[name] is not None}
        assert told == set(EVERY_RANK) - ({"epoch"} if row["rank"] else set())
        assert (row["adam_rms"] is not None) == (row["second_moment_norm"] is not None) == _measured(row)
    size, seq = config.data.batch_size, config.data.seq_len
    assert {row["sum_len_sq"] for row in steps} == {size * seq**2}
    first = steps[0]["adam_rms"]
    assert first == pytest.approx((1 - config.optim.beta2) ** -0.5, rel=1e-3)  # v is (1 - beta2) g^2 after one step
    assert {row["layer"] for row in layers if row["logit_max"] is not None} == {"blocks.0", "blocks.1"}
    assert {row["step"] for row in layers if row["logit_max"] is not None} == {0, 2}
    assert "blocks.0.qkv" in {row["layer"] for row in layers if row["adam_rms"] is not None}
    assert "blocks.0.qkv" in {row["layer"] for row in layers if row["grad_rms"] is not None}


def _measured(row: dict[str, Any]) -> bool:
    return row["rank"] == 0 and row["step"] % 2 == 0


def test_where_moments_are_dealt_out_they_are_not_recorded(
    train: Callable[..., RunInfo], store: Store, tiny: TrainConfig
) -> None:
    info = train(
        "zero1", dataclasses.replace(tiny, model=MODEL, steps=2, parallel=ParallelConfig(kind="zero1"), updates_every=1)
    )
    with RunReader.open(info.name, store.root) as reader:
        steps = reader.sql("SELECT * FROM steps")
    assert steps["update_ratio"].is_not_null().any()
    assert "adam_rms" not in steps.columns or steps["adam_rms"].is_null().all()


def test_watching_attention_changes_no_bit_of_a_recomputed_pass(
    train: Callable[..., RunInfo], store: Store, tiny: TrainConfig
) -> None:
    """What selective recomputation keeps are matrix products, handed out again in their order: ours are not among
    them."""
    losses = []
    for mode in ("none", "full", "selective"):
        parallel = ParallelConfig(recompute=mode)
        info = train(mode, dataclasses.replace(tiny, model=MODEL, world=1, steps=4, parallel=parallel))
        with RunReader.open(info.name, store.root) as reader:
            rows = reader.sql("SELECT step, loss, grad_norm, attn_logit_max FROM steps ORDER BY step").rows()
        assert all(value is not None for row in rows for value in row)
        losses.append(rows)
    assert losses[0] == losses[1] == losses[2]
