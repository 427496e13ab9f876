"""What the optimizer is set to, as it makes its step, and what the batches bring in that is not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from runhealth.instrument import Monitor

Make = Callable[..., Monitor]
NAMES = ("beta1", "beta2", "weight_decay", "adam_eps")


def train(
    monitor: Monitor, optimizers: list[torch.optim.Optimizer], steps: range, change: Callable[[int], None]
) -> None:
    for step in steps:
        with monitor.step(step):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
            change(step)
            for optimizer in optimizers:
                optimizer.step()


def test_settings_are_written_at_the_first_step_at_changes_and_on_the_cadence(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    adam = torch.optim.AdamW(nn.Linear(2, 1).parameters(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    monitor = monitor_for(optimizer=adam, updates_every=10)

    def change(step: int) -> None:
        if step == 15:
            adam.param_groups[0]["betas"] = (0.8, 0.5)

    train(monitor, [adam], range(7, 25), change)
    told = {r.step: [r.values[name] for name in NAMES] for r in log.steps if "beta1" in r.values}
    before, after = [0.8, 0.95, 0.1, 1e-6], [0.8, 0.5, 0.1, 1e-6]
    assert told == {7: before, 10: before, 15: after, 20: after}


def test_without_a_cadence_changes_are_still_told(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    adam = torch.optim.Adam(nn.Linear(2, 1).parameters())
    monitor = monitor_for(optimizer=adam, updates_every=0)
    train(monitor, [adam], range(5), lambda step: adam.param_groups[0].update(eps=1e-8 if step < 3 else 1e-3))
    assert {r.step: r.values["adam_eps"] for r in log.steps if "adam_eps" in r.values} == {0: 1e-8, 3: 1e-3}


def test_an_optimizer_without_betas_has_none(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    sgd = torch.optim.RMSprop(nn.Linear(2, 1).parameters(), eps=1e-5, weight_decay=0.2)
    train(monitor_for(optimizer=sgd), [sgd], range(1), lambda _step: None)
    assert {name: log.steps[0].values[name] for name in NAMES if name in log.steps[0].values} == {"weight_decay": 0.2}


def test_of_several_optimizers_the_one_with_betas_counts(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), weight_decay=0.3)
    adam = torch.optim.Adam(nn.Linear(2, 1).parameters(), betas=(0.7, 0.9))
    train(monitor_for(optimizer=[sgd, adam]), [sgd, adam], range(1), lambda _step: None)
    assert [log.steps[0].values[name] for name in NAMES] == [0.7, 0.9, 0.0, 1e-8]


def test_betas_that_are_tensors_are_read_where_that_does_not_wait(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    betas = (torch.tensor(0.75), torch.tensor(0.875))
    adam = torch.optim.Adam(nn.Linear(2, 1).parameters(), betas=betas, foreach=False)  # type: ignore[arg-type]
    train(monitor_for(optimizer=adam, updates_every=0), [adam], range(1), lambda _step: None)
    assert (log.steps[0].values["beta1"], log.steps[0].values["beta2"]) == (0.75, 0.875)


def test_only_rank_0_says_it(monitor_for: Make, log, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    adam = torch.optim.Adam(nn.Linear(2, 1).parameters())
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(monitor_for(optimizer=adam), [adam], range(1), lambda _step: None)
    assert not set(NAMES) & set(log.steps[0].values)


@pytest.mark.parametrize(
    ("x", "share"),
    [
        (torch.tensor([[1.0, math.nan], [math.inf, 4.0]]), 0.5),
        (torch.zeros(3, 4), 0.0),
        (torch.tensor([1.0, 6e4, -math.inf, 0.0], dtype=torch.float16), 0.25),
        (torch.arange(6).reshape(2, 3), None),
        (torch.empty(0), None),
        ({"input_ids": torch.arange(4), "weights": torch.tensor([1.0, math.nan])}, 0.5),
        ([torch.arange(4), torch.tensor([1.0, 2.0, 3.0, math.nan])], 0.25),
        ((torch.zeros(3), torch.tensor([math.nan])), 0.25),
        (None, None),
    ],
)
def test_the_share_of_inputs_that_is_not_finite(monitor_for: Make, log, x: object, share: float | None) -> None:  # type: ignore[no-untyped-def]
    with monitor_for().step(0) as s:
        s.batch(x, torch.zeros(4, dtype=torch.long))
    assert log.batches[0].values.get("nonfinite_share") == share
