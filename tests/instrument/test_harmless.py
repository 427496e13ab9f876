"""The monitor never changes, stops or outlives the training that it watches."""

import copy
import io
import math
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from runhealth.instrument import Monitor

Make = Callable[..., Monitor]


def _train(model, tokens, monitor: Monitor | None, optimizer, steps: int = 12):  # type: ignore[no-untyped-def]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for step in range(steps):
        x, y = tokens(step)
        if monitor is None:
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        else:
            with monitor.step(step) as s:
                s.batch(x, y)
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
                s.loss(loss)
                monitor.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return [*model.state_dict().values(), torch.rand(1)]  # and the random state


@pytest.mark.parametrize("fused", [False, True])
def test_parameters_and_random_state_are_bit_identical(monitor_for: Make, tiny, tokens, fused) -> None:  # type: ignore[no-untyped-def]
    twin = copy.deepcopy(tiny)
    torch.manual_seed(1)
    bare = _train(twin, tokens, None, torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=fused))
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(tiny.parameters(), lr=1e-2, fused=fused)
    monitor = monitor_for(
        model=tiny, optimizer=optimizer, layers_every=1, updates_every=1, watch_activations=["blocks.0.mlp"]
    )
    watched = _train(tiny, tokens, monitor, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    assert not monitor._latch.counts


def test_the_loops_own_exception_goes_through_and_is_recorded(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    error = ZeroDivisionError("mine")
    with pytest.raises(ZeroDivisionError) as caught, monitor.step(3) as s:  # noqa: PT012
        s.loss(2.0)
        raise error
    assert caught.value is error
    assert log.steps[0].values["loss"] == 2.0
    event = log.events[-1]
    assert (event.kind, event.step, event.message) == ("exception", 3, "ZeroDivisionError: mine")
    assert "test_harmless.py" in event.data["traceback"]
    monitor.close()
    assert log.events[-1].message == "after an exception"


@pytest.mark.parametrize("in_step", [False, True])
def test_an_exception_is_recorded_once(monitor_for: Make, log, in_step: bool) -> None:  # type: ignore[no-untyped-def]
    def train() -> None:
        with monitor_for() as monitor:
            if in_step:
                with monitor.step(0):
                    raise ValueError("mine")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        train()
    assert [event.kind for event in log.events] == ["attempt_start", "exception", "attempt_end"]


def test_an_optimizer_without_a_rate(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    class Plain(torch.optim.Optimizer):
        def step(self, closure=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
            return None

    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Plain([weight], {})
    monitor = monitor_for(optimizer=optimizer)
    with monitor.step(0):
        weight.square().sum().backward()
        optimizer.step()
    assert log.steps[0].values["grad_norm"] == 10.0
    assert "lr" not in log.steps[0].values
    assert not monitor._latch.counts


def test_clipping_raises_what_the_loop_asked_it_to(monitor_for: Make) -> None:
    model = nn.Linear(1, 1)
    monitor = monitor_for(model=model)
    model(torch.tensor([[math.nan]])).sum().backward()
    with monitor.step(0), pytest.raises(RuntimeError, match="non-finite"):
        monitor.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("clip", [False, True])
def test_nan_loss_and_gradients_are_recorded(monitor_for: Make, log, clip: bool) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer, updates_every=0, layers_every=100)
    with monitor.step(1) as s:
        loss = model(torch.tensor([[math.nan, 1.0]])).sum()
        loss.backward()
        s.loss(loss)
        if clip:
            monitor.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    values = log.steps[0].values
    assert math.isnan(values["loss"])
    assert math.isnan(values["grad_norm"])
    assert values["nonfinite_count"] == 1  # the weight of the NaN input; the other's and the bias's are finite
    assert math.isnan(values["clip_coef"]) if clip else "clip_coef" not in values
    assert math.isnan(log.layers(1)["weight"]["grad_norm"])
    assert log.layers(1)["bias"]["grad_norm"] == 1.0


class _Hostile(nn.Module):
    """Parameters of every awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.p_empty = nn.Parameter(torch.zeros(0, 4))
        self.p_unused = nn.Parameter(torch.ones(3))
        self.p_frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.p_phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.p_double = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.p_half = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.p_brain = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.p_single = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mixed = (
            (self.p_phase * (1 + 2j)).real
            + self.p_double
            + self.p_half
            + self.p_brain
            + self.p_single
            + self.p_empty.sum()
        )
        return (self.table(ids).sum(0) * mixed).sum()


def test_hostile_parameters(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = _Hostile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = monitor_for(model=model, optimizer=optimizer, watch_activations=["table"])
    with monitor.step(0) as s:
        loss = model(torch.tensor([1, 1, 2]))
        loss.backward()
        s.loss(loss)
        square = 0.0
        for p in model.parameters():
            if p.grad is not None:
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                square += float((grad.abs().to(torch.float64) ** 2).sum())
        optimizer.step()
    assert not monitor._latch.counts
    assert log.steps[0].values["grad_norm"] == pytest.approx(math.sqrt(square), rel=1e-4)
    assert log.steps[0].values["nonfinite_count"] == 0
    assert {"table", "p_phase", "p_double", "p_half", "p_brain", "p_single"} <= set(log.layers(0))


def test_half_precision_norms_do_not_overflow(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    weight = nn.Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    monitor = monitor_for(optimizer=optimizer)
    with monitor.step(0):
        weight.grad = torch.full((64,), 60000.0, dtype=torch.float16)
        optimizer.step()
    assert log.steps[0].values["grad_norm"] == pytest.approx(8 * 60000, rel=1e-3)  # beyond 65504


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(0, 8, dtype=torch.int64), torch.zeros(0, 8, dtype=torch.int64)),
        (torch.tensor(3),),
        (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)),
        (torch.full((2, 4), -100),),
        (torch.tensor([[1 << 40, 5]]),),
        (torch.randn(2, 3, 4), torch.tensor([1, 0])),
        (torch.ones(4, dtype=torch.bfloat16),),
        (torch.ones(4, dtype=torch.complex64),),
        (torch.ones(4, dtype=torch.bool),),
        (torch.eye(3).to_sparse(),),
        ({"pixels": torch.ones(2, 2)},),
        ([torch.tensor([[1, 2]]), torch.tensor([[2, 3]])],),
        ("no tensor",),
        (None,),
        ({},),
    ],
    ids=str,
)
def test_hostile_batches_are_on_record(monitor_for: Make, log, batch) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(vocab_size=10)
    with monitor.step(0) as s:
        s.batch(*batch, shard="x")
        s.loss(torch.zeros(0))
        s.logits(torch.zeros(0))
    assert [record.shard for record in log.batches] == ["x"]
    assert "loss" not in log.steps[0].values
    assert not monitor._latch.counts
    assert all(math.isfinite(value) for value in log.batches[0].values.values())


def test_a_probe_that_fails_costs_its_own_numbers_only(monitor_for: Make, log, capsys) -> None:  # type: ignore[no-untyped-def]
    class Broken(nn.Linear):
        def runhealth_precision_stats(self) -> dict[str, dict[str, float]]:
            raise RuntimeError("broken\ncounter")

    model = Broken(1, 1)
    monitor = monitor_for(model=model)
    for step in range(3):
        with monitor.step(step) as s:
            s.loss(1.0)
            s.record("mine", "no number")  # type: ignore[arg-type]
    assert [record.values["loss"] for record in log.steps] == [1.0] * 3
    lost = [event for event in log.events if event.kind == "telemetry_lost"]
    assert [event.data["probe"] for event in lost] == ["precision", "record mine"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "precision" in line]
    assert len(lines) == 1
    assert "broken counter" in lines[0]
    assert monitor._latch.counts["precision"] >= 3


def test_two_monitors_on_one_model_agree(monitor_for: Make, log, tiny, tokens) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(tiny.parameters())
    first, second = (monitor_for(model=tiny, optimizer=optimizer, watch_activations=["head"]) for _ in range(2))
    x, y = tokens(0)
    with first.step(0), second.step(0):
        nn.functional.cross_entropy(tiny(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    one, two = ({k: v for k, v in r.values.items() if k[:2] != "t_" and k[:4] != "mem_"} for r in log.steps)
    assert one == two
    assert {"grad_norm", "update_ratio", "activation_max"} <= set(one)


def test_close_removes_every_hook_and_may_come_again(monitor_for: Make, log, tiny) -> None:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.SGD(tiny.parameters(), lr=0.1)
    with monitor_for(model=tiny, optimizer=optimizer, watch_activations=["head"]) as monitor:
        assert optimizer._optimizer_step_pre_hooks
        assert tiny.head._forward_hooks
    monitor.close()
    assert log.closed == 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not tiny.head._forward_hooks
    written = len(log.records)
    with monitor.step(9) as s:
        s.loss(1.0)
        s.batch(torch.ones(1))
    monitor.record("eval_loss", 1.0)
    monitor.event("late")
    assert len(log.records) == written


def test_copies_and_pickles_of_a_watched_model_carry_no_monitor(monitor_for: Make, log, tiny, tokens) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for(model=tiny, watch_activations=["head"])
    file = io.BytesIO()
    torch.save(tiny, file)
    file.seek(0)
    copies = [copy.deepcopy(tiny), torch.load(file, weights_only=False)]
    with monitor.step(0):
        for model in copies:
            model(tokens(0)[0])
    assert "activation_max" not in log.steps[0].values


def test_a_forked_process_writes_nothing(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    written = len(log.appends)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # what a DataLoader worker is
        with monitor.step(0) as s:
            s.loss(1.0)
        monitor.event("from a worker")
        monitor.close()
        os.write(writer, bytes([len(log.appends) - written, log.closed]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 2) == bytes([0, 0])
    os.close(reader)
    os.close(writer)
    with monitor.step(0):
        pass
    assert len(log.steps) == 1


def test_a_step_within_a_step_is_latched(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(0), monitor.step(1) as s:
        s.loss(1.0)
    assert [record.step for record in log.steps] == [0, 1]
    assert monitor._latch.counts["step"] == 1
