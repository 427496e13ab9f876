"""The paths that accelerators take, on tensors that only pretend to be out of the host's reach."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from runhealth.instrument import Monitor, gradients, scalars

Make = Callable[..., Monitor]


def test_one_transfer_keeps_order_and_counters() -> None:
    put = scalars.Scalars()
    promises = [
        put.put(torch.tensor(1.5)),
        put.put(torch.tensor(2**40 + 1)),
        put.put(torch.tensor([2.5, 3.5])),
        put.put(torch.tensor(7, dtype=torch.int32)),
        put.put(torch.tensor(0.1, dtype=torch.float64)),
    ]
    scalars._fetch_from(torch.device("cuda"), list(put._waiting))
    assert [promise.values for promise in promises] == [[1.5], [2**40 + 1], [2.5, 3.5], [7], [0.1]]


def test_layers_and_counts_without_reading_in_the_step(monitor_for: Make, log, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(gradients, "is_at_hand", lambda _: False)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = monitor_for(model=model, optimizer=optimizer, layers_every=1000, updates_every=0)
    for step in range(1, 15):
        scale = {12: 1000.0, 13: math.nan, 14: math.nan}.get(step, 1.0)
        with monitor.step(step):
            model(torch.tensor([[3.0 * scale, 4.0]])).sum().backward()
            monitor.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert log.steps[0].values["grad_norm"] == 5.0
    assert [step for step in range(1, 15) if log.layers(step)] == [12, 13, 14]  # bursts, decided after the fetch
    assert log.layers(12)["weight"]["grad_norm"] == pytest.approx(3000, rel=1e-3)
    # the first bad step is seen in its norm only; from the next on elements are counted
    assert [record.values.get("nonfinite_count") for record in log.steps[-2:]] == [None, 1]


def test_a_tensor_that_cannot_be_fetched_costs_no_other(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(0) as s:
        s.loss(torch.tensor(2.0))
        s.record("mine", torch.empty((), device="meta"))
    assert log.steps[0].values["loss"] == 2.0
    assert "mine" not in log.steps[0].values
    assert monitor._latch.counts["fetch"] == 1
