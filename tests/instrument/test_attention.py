"""Logits: of attention from queries and keys, of the output, and lengths of sequences."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runhealth.instrument import Monitor, attention

Make = Callable[..., Monitor]


def direct(q: Tensor, k: Tensor, scale: float, *, causal: bool) -> float:
    """All logits of the first sequence, head by head."""
    group = q.shape[1] // k.shape[1]
    largest = 0.0
    for head in range(q.shape[1]):
        logits = q[0, head].double() @ k[0, head // group].double().T * scale
        if causal:
            logits = logits.tril(k.shape[2] - q.shape[2])
        largest = max(largest, float(logits.abs().max()))
    return largest


@pytest.mark.parametrize("piece", [1 << 22, 40])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "queries", "keys"), [(4, 4, 9, 9), (6, 2, 9, 9), (4, 1, 3, 9)])
def test_attention_logits(  # type: ignore[no-untyped-def]
    monitor_for: Make, log, monkeypatch, heads: int, key_heads: int, queries: int, keys: int, causal: bool, piece: int
) -> None:
    monkeypatch.setattr(attention, "PIECE", piece)
    torch.manual_seed(0)
    q, k = torch.randn(2, heads, queries, 8), torch.randn(2, key_heads, keys, 8)
    k[1] *= 1000.0  # another sequence: not looked at
    k[0, -1, -1] *= 20.0  # the last key: with `causal` only the last query sees it
    monitor = monitor_for(layers_every=2)
    for step in range(2):
        with monitor.step(step):
            monitor.attention_logits("blocks.0", q, k, causal=causal)
            monitor.attention_logits("blocks.1", q, k, causal=causal, scale=-2.0)
            with torch.no_grad():
                monitor.attention_logits("blocks.2", 100 * q, k)  # an evaluation
    one, two = direct(q, k, 8**-0.5, causal=causal), direct(q, k, 2.0, causal=causal)
    assert [record.values["attn_logit_max"] for record in log.steps] == pytest.approx([two, two], rel=1e-5)
    assert log.layers(0)["blocks.0"] == pytest.approx({"logit_max": one}, rel=1e-5)
    assert log.layers(0)["blocks.1"] == pytest.approx({"logit_max": two}, rel=1e-5)
    assert log.layers(1) == {}
    assert not monitor._latch.counts


def test_the_last_queries_of_a_long_sequence_are_looked_at(monitor_for: Make, log, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(attention, "QUERIES", 2)
    q, k = torch.zeros(1, 1, 5, 1), torch.ones(1, 1, 5, 1)
    q[0, 0, :, 0] = torch.tensor([9.0, 8.0, 7.0, 2.0, 1.0])
    k[0, 0, 4, 0] = 3.0  # seen by the last query only
    monitor = monitor_for()
    with monitor.step(0):
        monitor.attention_logits("a", q, k)
    assert log.steps[0].values["attn_logit_max"] == 3.0


def test_nan_comes_through_and_a_wrong_shape_is_said(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(0):
        monitor.attention_logits("a", torch.full((1, 1, 2, 2), math.nan), torch.ones(1, 1, 2, 2))
        monitor.attention_logits("b", torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    with monitor.step(1):
        monitor.attention_logits("a", torch.ones(1, 3, 2, 2), torch.ones(1, 2, 2, 2))
    monitor.attention_logits("a", torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))  # between steps
    assert math.isnan(log.steps[0].values["attn_logit_max"])
    assert "attn_logit_max" not in log.steps[1].values
    assert monitor._latch.counts == {"attention": 1}


class Attention(nn.Module):
    monitor: Monitor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None], self.k(x)[:, None]
        if self.monitor is not None:
            self.monitor.attention_logits("attn", q, k, causal=False)
        return torch.tanh(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1) @ x[:, None])


@pytest.mark.parametrize("kept", [None, "products"])
def test_checkpointing_and_autocast_are_left_alone(monitor_for: Make, log, kept: str | None) -> None:  # type: ignore[no-untyped-def]
    """A checkpoint that keeps matrix products hands them out again in the order in which they came."""

    def policy(_context: object, operation: object, *_args: object, **_options: object) -> CheckpointPolicy:
        products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if kept else {}
    torch.manual_seed(0)
    model = Attention()
    x = torch.randn(2, 5, 8)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(model, x, use_reentrant=False, **options)
        out.float().square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    bare = gradients()
    model.monitor = monitor_for()
    with model.monitor.step(0):
        watched = gradients()
    assert len(bare) == 4
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        q, k = model.q(x).detach(), model.k(x).detach()
    wanted = direct(q[:, None], k[:, None], 8**-0.5, causal=False)
    assert log.steps[0].values["attn_logit_max"] == pytest.approx(wanted, rel=1e-6)  # not rounded to 8 bits


def test_the_largest_output_logit_of_all_micro_batches(monitor_for: Make, log) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    for step, peaks in enumerate([[1.0, -7.0, 3.0], [1.0, math.nan, 3.0]]):
        with monitor.step(step) as s:
            for peak in peaks:
                s.logits(torch.tensor([[0.5, peak]]))
    assert log.steps[0].values["logit_max"] == 7.0
    assert math.isnan(log.steps[1].values["logit_max"])


@pytest.mark.parametrize(
    ("x", "lengths", "squares"),
    [
        (torch.zeros(2, 4, dtype=torch.long), None, None),  # what of it is padding is not known
        (torch.zeros(2, 4, dtype=torch.long), [3, 4], 25),
        (torch.zeros(1, 8, dtype=torch.long), torch.tensor([1, 2, 5]), 30),  # documents in one row
        ({"attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])}, None, 18),
        ({"attention_mask": torch.tensor([[True, False]])}, None, 1),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2]])}, None, None),  # numbers of packed documents
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, None, None),
        ({"attention_mask": torch.tensor([[1, 1]])}, [2, 3], 13),
    ],
)
def test_squared_lengths(monitor_for: Make, log, x: object, lengths: object, squares: int | None) -> None:  # type: ignore[no-untyped-def]
    monitor = monitor_for()
    with monitor.step(0) as s:
        s.batch(x, lengths=lengths)  # type: ignore[arg-type]
        s.batch(x, lengths=lengths)  # type: ignore[arg-type]
    assert log.steps[0].values.get("sum_len_sq") == (None if squares is None else 2 * squares)
    assert not monitor._latch.counts
