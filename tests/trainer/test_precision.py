"""Which tensors are in which number format, and how far training in a low precision is from float32."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runhealth.storage.errors import MissingExtraError
from runhealth.trainer.config import ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.layout import loss_ranks, place
from runhealth.trainer.model import build, next_byte_loss
from runhealth.trainer.precision import fp8
from runhealth.trainer.precision.policy import MATMUL

STEPS = 6
BASE = TrainConfig(
    steps=STEPS,
    seed=5,
    world=1,
    data=DataConfig(shards=8, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=8),
    model=ModelConfig(layers=4, width=32, heads=4, ffn_width=64, fused=False),
    optim=OptimConfig(lr=3e-3, clip_threshold=0.5),
)
# relative to float32 in a single process: largest difference of loss and of norm in six steps. A format with an m-bit
# mantissa rounds by 2**-(m+1): bfloat16 and fp16 by 4e-3 and 5e-4, e4m3 and e5m2 by 6e-2 and 1e-1. The loss averages
# thousands of such errors, the norm does not.
BANDS = {"bf16": (1e-3, 5e-2), "fp16": (1e-4, 5e-3), "fp8": (2e-3, 1e-1)}
PARALLEL: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"kind": "zero3"}),
    "tp": (2, {"tp": 2}),
    "1f1b": (2, {"pp": 2, "microbatches": 4}),
    "pp-zero3": (4, {"pp": 2, "kind": "zero3", "microbatches": 2}),
    "3d": (8, {"pp": 2, "tp": 2, "kind": "zero3", "microbatches": 2}),
}


def configured(precision: str, layout: str = "ddp", **parallel: Any) -> TrainConfig:
    world, chosen = PARALLEL[layout]
    return dataclasses.replace(
        BASE,
        world=world,
        parallel=ParallelConfig(**{**chosen, **parallel}),
        model=dataclasses.replace(BASE.model, precision=precision),
    )


class Recorder(TorchDispatchMode):
    """Dtypes of the floating-point operands of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        dtypes = tuple(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
        self.seen.append((str(func).removeprefix("aten.").partition(".")[0], dtypes))
        return func(*args, **(kwargs or {}))

    def of(self, *operations: str) -> list[set[torch.dtype]]:
        return [set(dtypes) for name, dtypes in self.seen if name in operations]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_the_blocks_products_and_attention_are_low(precision: str):
    config = dataclasses.replace(BASE.model, precision=precision)
    model = build(config, 16, seed=1)
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    low, wide = MATMUL[precision], torch.float32
    with Recorder() as forward:
        loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
    products = forward.of("mm", "addmm", "bmm")
    assert products.count({low}) == 7 * config.layers + (low is wide)  # q, k, v, out, gate, up, down
    assert products[-1] == {wide}  # the head
    assert len(products) == 7 * config.layers + 1
    attention = [dtypes for name, dtypes in forward.seen if "scaled_dot_product" in name]
    assert [set(dtypes) for dtypes in attention] == [{low}] * config.layers
    assert forward.of("embedding") == [{wide}]
    norms = forward.of("_fused_rms_norm", "rsqrt")
    assert norms == [{wide}] * (2 * config.layers + 1)
    assert forward.of("_log_softmax") == [{wide}]
    assert loss.dtype is wide
    with Recorder() as backward:
        loss.backward()
    assert backward.of("mm").count({low}) == 14 * config.layers + (2 if low is wide else 0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.dtype is parameter.grad.dtype is wide
        assert {v.dtype for v in optimizer.state[parameter].values()} == {wide}


def test_fp8_covers_the_blocks_matrices_and_nothing_else():
    model = build(dataclasses.replace(BASE.model, precision="fp8"), 16, seed=1)
    low = {name for name, module in model.named_modules() if isinstance(module, fp8.Fp8Linear)}
    assert low == {f"blocks.{i}.{m}" for i in range(4) for m in ("q", "k", "v", "out", "gate", "up", "down")}
    assert {type(module).__name__ for name, module in model.named_modules() if name in ("embed", "norm", "head")} == {
        "Embedding",
        "RMSNorm",
        "Linear",
    }
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    formats = {name.rpartition(".")[2]: scale.dtype for name, scale in fp8.scales(model)}
    assert formats == {"x": torch.float8_e4m3fn, "w": torch.float8_e4m3fn, "g": torch.float8_e5m2}


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("bf16", "ddp"),
        ("bf16", "zero3"),
        ("bf16", "tp"),
        ("bf16", "3d"),
        ("fp16", "ddp"),
        ("fp16", "tp"),
        ("fp16", "pp-zero3"),
        ("fp8", "ddp"),
        ("fp8", "1f1b"),
        ("fp8", "pp-zero3"),
    ],
)
def test_low_precision_stays_in_its_band_of_float32(
    precision: str, layout: str, run: Callable[..., dict[int, Any]], alone: Callable[..., dict[str, list[float]]]
):
    config = configured(precision, layout)
    expected = alone(dataclasses.replace(config, model=BASE.model), STEPS)
    found = run(config.world, "layout", config, STEPS)
    speakers = [rank for rank in loss_ranks(config) if place(config, rank).tp == 0]
    loss_band, norm_band = BANDS[precision]
    differs = False
    for step in range(STEPS):
        loss = sum(found[rank]["losses"][step] for rank in speakers) / len(speakers)
        assert loss == pytest.approx(expected["losses"][step], rel=loss_band)
        for rank in found:
            assert found[rank]["norms"][step] == pytest.approx(expected["norms"][step], rel=norm_band)
        differs |= loss != pytest.approx(expected["losses"][step], rel=1e-7)
    assert differs  # else nothing was in low precision


@pytest.mark.parametrize("layout", ["ddp", "1f1b", "pp-zero3", "tp"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip(layout: str, run: Callable[..., dict[int, Any]]):
    config = configured("fp16", layout)
    found = run(config.world, "scaled_overflow", config, config.world - 1)
    for rank, result in found.items():
        assert result["moved"] == [False, True], rank
        assert result["scales"] == [128.0, 128.0], rank


def test_a_recomputed_forward_pass_is_not_counted_and_uses_the_same_scales(run: Callable[..., dict[int, Any]]):
    plain = configured("fp8", "ddp", microbatches=2)
    plain = dataclasses.replace(plain, world=1)
    kept = run(1, "histories", plain, 3)[0]
    for mode in ("full", "selective"):
        again = run(
            1,
            "histories",
            dataclasses.replace(plain, parallel=dataclasses.replace(plain.parallel, recompute=mode)),
            3,
        )[0]
        assert again == kept, mode


def test_the_scale_stands_for_all_micro_batches_of_a_step(run: Callable[..., dict[int, Any]]):
    """One entry a step in each history: the largest amax of the step."""
    whole = dataclasses.replace(configured("fp8"), world=1)
    parts = dataclasses.replace(whole, parallel=ParallelConfig(microbatches=4))
    one, four = (run(1, "histories", config, 3)[0] for config in (whole, parts))
    for name, history in one["history"].items():
        assert sum(value > 0 for value in history) == sum(value > 0 for value in four["history"][name]) == 3
        if name.endswith(".w"):  # the weights of the first step are the same, however the batch is cut
            assert history[0] == four["history"][name][0]
    factor = {name: four["elements"][name] / elements for name, elements in one["elements"].items()}
    assert {value for name, value in factor.items() if not name.endswith(".w")} == {1.0}


def test_torchao_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match="pip install --no-deps torchao"):
        build(dataclasses.replace(BASE.model, precision="fp8_torchao"), 16, seed=1)


@pytest.mark.filterwarnings("default")
def test_torchao_trains_near_float32():
    pytest.importorskip("torchao", exc_type=ImportError)
    losses = {}
    for precision in ("fp32", "fp8_torchao"):
        model = build(dataclasses.replace(BASE.model, precision=precision), 16, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(STEPS):
            tokens = torch.randint(0, 40, (8, 17), generator=torch.Generator().manual_seed(step))
            loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[precision] = float(loss.detach())
    assert losses["fp8_torchao"] == pytest.approx(losses["fp32"], rel=BANDS["fp8"][0] * 5)
    assert losses["fp8_torchao"] != losses["fp32"]
