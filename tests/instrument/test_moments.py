"""adam_rms and second_moment_norm against a direct computation, and where they must not be recorded."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from runhealth.instrument import Monitor, moments

Make = Callable[..., Monitor]
NAMES = {"adam_rms", "second_moment_norm"}


def train(monitor: Monitor, optimizer: torch.optim.Optimizer, model: nn.Module, grads: list[float]) -> None:
    """A step for each number: every gradient is random, of this size."""
    for step, size in enumerate(grads):
        generator = torch.Generator().manual_seed(step)
        with monitor.step(step):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = (size * noise).to(parameter.dtype)
            optimizer.step()


def rms(grad: Tensor, moment: Tensor) -> float:
    return float((grad.double() ** 2 / moment.double().clamp(min=1e-16)).mean().sqrt())


@pytest.mark.parametrize("piece", [1 << 22, 100, 7])
@pytest.mark.parametrize("kind", ["fused", "foreach", "amsgrad", "nadam"])
def test_they_equal_a_direct_computation(monitor_for: Make, log, tiny, monkeypatch, piece: int, kind: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(moments, "PIECE", piece)  # 7: tensors are worked on in parts; 100: several at a time
    optimizer = {
        "fused": lambda: torch.optim.AdamW(tiny.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True),
        "foreach": lambda: torch.optim.AdamW(tiny.parameters(), lr=1e-3, betas=(0.9, 0.95)),
        "amsgrad": lambda: torch.optim.Adam(tiny.parameters(), amsgrad=True),
        "nadam": lambda: torch.optim.NAdam(tiny.parameters()),
    }[kind]()
    monitor = monitor_for(model=tiny, optimizer=optimizer, updates_every=1, layers_every=0)
    train(monitor, optimizer, tiny, [1.0, 0.1, 3.0])
    direct = {name: rms(p.grad, optimizer.state[p]["exp_avg_sq"]) for name, p in tiny.named_parameters()}
    every = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in tiny.parameters()])
    values = log.steps[2].values
    assert values["adam_rms"] == pytest.approx(max(direct.values()), rel=1e-5)
    assert values["second_moment_norm"] == pytest.approx(float(every.norm()), rel=1e-5)
    layers = {layer: v["adam_rms"] for layer, v in log.layers(2).items()}
    attn = max(direct["blocks.0.attn.weight"], direct["blocks.0.attn.bias"])
    assert layers["blocks.0.attn"] == pytest.approx(attn, rel=1e-5)
    assert set(layers) == {"embed", "head", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp"}
    assert not monitor._latch.counts


def test_a_second_moment_that_is_behind_shows(monitor_for: Make, log, tiny) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(tiny.parameters(), betas=(0.9, 0.99))
    train(monitor_for(model=tiny, optimizer=optimizer, updates_every=1), optimizer, tiny, [1.0] * 150 + [100.0])
    usual = [record.values["adam_rms"] for record in log.steps[100:150]]
    assert 1.0 < max(usual) < 2.0
    assert 5.0 < log.steps[150].values["adam_rms"] < 10.0  # 1 / sqrt(1 - 0.99) at most
    assert log.steps[0].values["adam_rms"] == pytest.approx(10.0, rel=1e-4)  # no bias correction


def test_one_stale_tensor_is_named_by_its_layer(monitor_for: Make, log, tiny) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(tiny.parameters(), betas=(0.9, 0.95))
    monitor = monitor_for(model=tiny, optimizer=optimizer, updates_every=1)
    train(monitor, optimizer, tiny, [1.0] * 5)
    with monitor.step(5):
        tiny.head.weight.grad.mul_(50.0)
        optimizer.step()
    found = {layer: values["adam_rms"] for layer, values in log.layers(5).items()}
    assert max(found, key=found.__getitem__) == "head"
    assert log.steps[5].values["adam_rms"] == found["head"] > 2 * max(v for n, v in found.items() if n != "head")


def test_the_cadence(monitor_for: Make, log, tiny) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(tiny.parameters())
    train(monitor_for(model=tiny, optimizer=optimizer, updates_every=3), optimizer, tiny, [1.0] * 7)
    assert [record.step for record in log.steps if record.values.keys() >= NAMES] == [0, 3, 6]
    assert not any(record.values.keys() & NAMES for record in log.steps if record.step % 3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_does_not_count(monitor_for: Make, log, fused: bool) -> None:  # type: ignore[no-untyped-def]
    """Fused optimizers unscale the gradients themselves, and leave out a step with an overflow themselves."""
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = monitor_for(model=model, optimizer=optimizer, scaler=scaler, updates_every=1)
    direct = []
    for step, size in enumerate([1.0, 2.0, math.inf, 1.0]):
        with monitor.step(step):
            optimizer.zero_grad()
            loss = (model(torch.tensor([[1.0, 2.0, 3.0, 4.0]])) * size).square().mean()
            (grad,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        direct.append(rms(grad, optimizer.state[model.weight]["exp_avg_sq"]))
    told = {record.step: record.values["adam_rms"] for record in log.steps if "adam_rms" in record.values}
    assert told == pytest.approx({step: direct[step] for step in (0, 1, 3)}, rel=1e-4)
    assert not monitor._latch.counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(monitor_for: Make, log, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(8, 8, bias=False, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    train(monitor_for(model=model, optimizer=optimizer, updates_every=1), optimizer, model, [0.5, 0.25])
    grad, moment = model.weight.grad, optimizer.state[model.weight]["exp_avg_sq"]
    assert log.steps[1].values["adam_rms"] == pytest.approx(rms(grad, moment), rel=1e-5)
    assert log.steps[1].values["second_moment_norm"] == pytest.approx(float(moment.double().norm()), rel=1e-5)


def test_several_optimizers_count_together(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    one, two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(two.parameters())
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with monitor_for(optimizer=[first, second, sgd]).step(0):
        one.weight.grad, two.weight.grad = torch.full((3, 3), 3.0), torch.full((3, 3), 4.0)
        for optimizer in (first, second, sgd):
            optimizer.step()
    assert log.steps[0].values["second_moment_norm"] == pytest.approx(1e-3 * math.hypot(9 * 3, 16 * 3), rel=1e-5)


def test_parameters_without_a_gradient_are_left_out(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    used, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.Adam([used, idle], betas=(0.9, 0.75))
    with monitor_for(optimizer=optimizer).step(0):
        used.grad = torch.full((3,), 2.0)
        optimizer.step()
    assert log.steps[0].values["adam_rms"] == pytest.approx(2.0)  # g / sqrt(g^2 / 4)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, momentum=0.9), torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_optimizers_are_passed_over_in_silence(monitor_for: Make, log, tiny, make) -> None:  # type: ignore[no-untyped-def]
    optimizer = make(tiny.parameters())
    monitor = monitor_for(model=tiny, optimizer=optimizer, updates_every=1)
    train(monitor, optimizer, tiny, [1.0, 1.0])
    assert not any(record.values.keys() & NAMES for record in log.steps)
    assert not monitor._latch.counts


@pytest.mark.parametrize("spoil", ["missing", "shape", "quantized", "class", "sharded"])
def test_a_state_that_is_only_partly_at_hand_is_not_recorded(monitor_for: Make, log, tiny, spoil: str) -> None:  # type: ignore[no-untyped-def]
    class Packed(Tensor):
        pass

    class Sharded(Packed):
        to_local = Tensor.clone

    optimizer = torch.optim.AdamW(tiny.parameters())
    spoilt = {
        "missing": lambda moment: None,  # noqa: ARG005
        "shape": lambda moment: moment[:1],
        "quantized": lambda moment: moment.to(torch.int8),
        "class": lambda moment: moment.as_subclass(Packed),
        "sharded": lambda moment: moment.as_subclass(Sharded),
    }[spoil]
    steps: list[int] = []

    def spoil_second(*_: object) -> None:  # before the monitor's hook: it was registered first
        steps.append(len(steps))
        if len(steps) == 2:
            state = optimizer.state[tiny.head.weight]
            state["exp_avg_sq"] = spoilt(state["exp_avg_sq"])

    optimizer.register_step_post_hook(spoil_second)
    monitor = monitor_for(model=tiny, optimizer=optimizer, updates_every=1)
    train(monitor, optimizer, tiny, [1.0, 1.0])
    assert log.steps[0].values.keys() >= NAMES
    assert not log.steps[1].values.keys() & NAMES
    assert not any("adam_rms" in values for values in log.layers(1).values())
    assert monitor._latch.counts == {"second moments": 1}


def test_only_rank_0_measures(monitor_for: Make, log, tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(tiny.parameters())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(monitor_for(model=tiny, optimizer=optimizer, updates_every=1, replicas_every=0), optimizer, tiny, [1.0])
    assert not log.steps[0].values.keys() & NAMES
