"""The mixture of experts: what it computes, that layouts agree on it, and a router that collapses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import ConfigError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import LayerSample, StepRecord
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import experts, flops
from runhealth.trainer.config import CheckpointConfig, FaultSpec, ModelConfig, ParallelConfig, TrainConfig
from runhealth.trainer.experts import Experts
from runhealth.trainer.model import build, next_byte_loss

MODEL = ModelConfig(layers=2, width=16, heads=2, ffn_width=24, experts=3, fused=False)


def made(seed: int = 1) -> Experts:
    generator = torch.Generator().manual_seed(seed)
    mixture = Experts(8, 12, 3)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return mixture


def test_a_token_goes_through_the_expert_of_its_highest_gate():
    mixture, x = made(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
    out = mixture(x)
    met = set()
    for place in range(10):
        token = x.reshape(-1, 8)[place]
        gates = F.softmax(mixture.router(token), dim=-1)
        expert = int(gates.argmax())
        met.add(expert)
        gate, up = (mixture.gate_up[expert] @ token).chunk(2)
        expected = gates[expert] * (mixture.down[expert] @ (F.silu(gate) * up))
        assert torch.allclose(out.reshape(-1, 8)[place], expected, atol=1e-6)
    assert len(met) > 1


def test_balance_and_load_are_those_of_the_passes_that_train():
    mixture, x = made(), torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mixture(torch.randn(4, 9, 8))  # an evaluation does not count
    mixture(x)
    gates = F.softmax(mixture.router(x[0]), dim=-1)
    share = torch.bincount(gates.argmax(-1), minlength=3) / 40
    assert float(mixture.take_balance().detach()) == pytest.approx(float(3 * (share * gates.mean(0)).sum().detach()))
    assert torch.allclose(mixture.take_load(), share)
    with torch.no_grad():
        mixture.router.weight.zero_()
        mixture.router.bias.copy_(torch.tensor([0.0, 9.0, 0.0]))
    mixture(x)
    assert mixture.take_load().tolist() == [0.0, 1.0, 0.0]
    loss = mixture(x).sum() + mixture.take_balance()
    loss.backward()
    assert all(parameter.grad is not None for parameter in mixture.parameters())  # DDP waits for all of them
    assert not mixture.down.grad[0].any()


def test_counted_elements_are_those_of_the_model():
    config = TrainConfig(steps=1, world=1, model=MODEL)
    whole = sum(p.numel() for p in build(MODEL, 16, 1).parameters())
    assert sum(flops.stage_parameters(config, 0)) == whole
    less = dataclasses.replace(MODEL, experts=0)
    assert flops.block_matrices(MODEL) == flops.block_matrices(less) + 3 * MODEL.width  # and the router


def test_every_rank_begins_with_the_same_router():
    one, two = (build(MODEL, 16, 4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not one.blocks["0"].mixture.router.bias.any()


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        ({"experts": 1}, {}, "experts 0 .none. or >= 2"),
        ({"precision": "fp8"}, {}, "experts expect precision fp32 or bf16"),
        ({}, {"pp": 2, "microbatches": 2}, "experts do not go with"),
        ({}, {"recompute": "full"}, "experts do not go with"),
    ],
)
def test_what_does_not_go_with_experts_is_refused(model: dict[str, Any], parallel: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(steps=1, world=2, model=dataclasses.replace(MODEL, **model), parallel=ParallelConfig(**parallel))


def config_of(tiny: TrainConfig, **changes: Any) -> TrainConfig:
    return dataclasses.replace(tiny, model=MODEL, **changes)


def test_replicas_and_shards_train_alike(tiny: TrainConfig, run: Callable[..., dict[int, Any]]):
    """(One process trains otherwise: each rank balances the load of its own tokens.)"""
    ddp = run(2, "layout", config_of(tiny), 5)
    zero = run(2, "layout", config_of(tiny, parallel=ParallelConfig(kind="zero3")), 5)
    for rank in (0, 1):
        assert zero[rank]["losses"] == pytest.approx(ddp[rank]["losses"], rel=1e-5)
        assert zero[rank]["norms"] == pytest.approx(ddp[rank]["norms"], rel=1e-5)
    assert ddp[0]["losses"][0] - ddp[0]["losses"][-1] > 0.05


def test_one_rank_trains_what_a_plain_loop_with_the_balance_loss_trains(
    tiny: TrainConfig, run: Callable[..., dict[int, Any]]
):
    config = config_of(tiny, world=1)
    found = run(1, "layout", config, 4)[0]["losses"]
    model = build(config.model, config.data.seq_len, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step, expected in enumerate(found):
        generator = torch.Generator().manual_seed(1_000 + step)
        tokens = torch.randint(0, 40, (config.data.batch_size, config.data.seq_len + 1), generator=generator)
        loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
        balance = sum(mixture.take_balance() for _, mixture in experts.of(model))
        (loss + experts.BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_threshold)
        optimizer.step()
        optimizer.zero_grad()


def test_a_router_that_collapses_is_recorded_and_found(tiny: TrainConfig, store: Store, train: Callable[..., RunInfo]):
    fault = FaultSpec(name="router_collapse", params={"step": 100, "severity": 0.5})
    config = config_of(tiny, steps=130, faults=(fault,), checkpoint=CheckpointConfig(every=50), eval_every=1000)
    train("run", config)
    with RunReader.open("run", store.root) as reader:
        found = list(reader.records())
        report = diagnose(reader)
    loads = {
        (r.rank, r.step): r.values["router_load_max"]
        for r in found
        if isinstance(r, StepRecord) and "router_load_max" in r.values
    }
    assert loads.keys() == {(rank, step) for rank in (0, 1) for step in range(130)}
    before = [load for (_, step), load in loads.items() if step < 100]
    assert 1 / 3 <= min(before) < max(before)
    assert min(load for (_, step), load in loads.items() if step >= 120) > 0.99
    layers = {r.layer for r in found if isinstance(r, LayerSample) and "router_load_max" in r.values}
    assert layers == {"blocks.0.mixture", "blocks.1.mixture"}
    told = [f for f in report.findings if f.kind == "router_collapse"]
    assert len(told) == 1
    assert 100 <= told[0].onset_step <= 115
