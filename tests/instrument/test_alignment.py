"""A rank's gradient against the result of the reduce: exact with an intact mean, and never recorded wrongly."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runhealth.instrument import alignment
from runhealth.instrument.ddp import DdpProbe
from runhealth.instrument.draft import Draft
from runhealth.instrument.guard import Latch
from runhealth.storage.records import StepRecord
from runhealth.storage.tail import RunTail

RANKS, STEPS = 2, 6


@pytest.fixture(scope="module")
def folder(run_ranks: Callable[..., Path]) -> Path:
    return run_ranks("ddp_alignment.py", RANKS)


def values(folder: Path, case: str, name: str) -> list[list[float | None]]:
    """By step, then by rank."""
    steps = {
        (r.step, r.rank): r.values for r in RunTail(str(folder / "store" / case)).read() if isinstance(r, StepRecord)
    }
    assert len(steps) == STEPS * RANKS
    return [[steps[step, rank].get(name) for rank in range(RANKS)] for step in range(STEPS)]  # type: ignore[misc]


def means(folder: Path, case: str) -> list[float]:
    found = values(folder, case, "grad_projection_rank")
    return [sum(row) / RANKS for row in found]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["buckets", "views", "whole", "flipped", "twice", "no_sync", "averaging"])
def test_projections_average_to_1_where_the_reduce_is_intact(folder: Path, case: str) -> None:
    assert means(folder, case) == pytest.approx([1.0] * STEPS, abs=1e-5)
    assert all(abs(row[0] - row[1]) > 1e-3 for row in values(folder, case, "grad_projection_rank"))  # type: ignore[operator]


def test_a_reduce_that_returns_something_else_shows(folder: Path) -> None:
    assert means(folder, "summed") == pytest.approx([1 / RANKS] * STEPS, abs=1e-5)


def test_both_equal_those_of_the_whole_gradient(folder: Path) -> None:
    for rank in range(RANKS):
        expected = torch.load(folder / f"expected{rank}.pt")
        for at, name in enumerate(("grad_projection_rank", "grad_cosine_rank")):
            assert [row[rank] for row in values(folder, "whole", name)] == pytest.approx(
                [pair[at] for pair in expected], abs=1e-5
            )


class Bucket:
    """As much of a torch.distributed.GradBucket as the probe looks at."""

    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count

    def buffer(self) -> torch.Tensor:
        return torch.full((4,), float(self._index + 1))

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == self._count - 1


def test_buckets_take_turns_and_each_step_copies_one(time) -> None:  # type: ignore[no-untyped-def]
    probe = DdpProbe(time.clock, Latch("test", lambda _probe, _why: None))
    copied = []
    counts = [1, 3, 3, 3, 3, 2, 2]  # DDP sorts its buckets anew after the first backward pass
    for number, count in enumerate(counts):
        draft = Draft(number=number, start_s=0.0)
        probe.begin(draft)
        marks = [probe.launched(Bucket(at, count), first=True, averages=True) for at in [*range(count)] * 2]  # type: ignore[arg-type]
        copied.append([at for at, mark in enumerate(marks) if mark is not None and mark.sent is not None])
        probe.collect(draft)
    assert copied == [[0], [0], [2], [0], [1], [], [0]]


def test_another_bucket_than_the_whole_is_compared(folder: Path) -> None:
    parts, whole = (values(folder, case, "grad_cosine_rank") for case in ("buckets", "averaging"))
    assert parts[0] == pytest.approx(whole[0], abs=1e-6)  # DDP begins with one bucket
    for step in range(2, STEPS):
        assert parts[step] != pytest.approx(whole[step], abs=1e-4)


def test_a_flipped_rank_is_negative_and_its_peer_is_not(folder: Path) -> None:
    for name in ("grad_projection_rank", "grad_cosine_rank"):
        assert all(upright > 0 > flipped for upright, flipped in values(folder, "flipped", name))  # type: ignore[operator]


def test_half_precision_is_accumulated_wide(folder: Path) -> None:
    norms = values(folder, "half", "grad_norm_rank")
    assert min(min(row) for row in norms) ** 2 > torch.finfo(torch.float16).max  # type: ignore[type-var, operator]
    assert means(folder, "half") == pytest.approx([1.0] * STEPS, abs=1e-3)


def test_with_a_compressing_hook_only_the_cosine_is_recorded(folder: Path) -> None:
    assert values(folder, "compressed", "grad_projection_rank") == [[None] * RANKS] * STEPS
    exact, compressed = (values(folder, case, "grad_cosine_rank") for case in ("averaging", "compressed"))
    assert compressed[0] == pytest.approx(exact[0], abs=1e-3)


def test_what_is_not_finite_is_not_recorded(folder: Path) -> None:
    for name in ("grad_projection_rank", "grad_cosine_rank"):
        known = [[value is not None for value in row] for row in values(folder, "nan", name)]
        assert known == [[step != 2] * RANKS for step in range(STEPS)]
    assert means_but(folder, "nan", 2) == pytest.approx([1.0] * (STEPS - 1), abs=1e-5)


def means_but(folder: Path, case: str, left_out: int) -> list[float]:
    rows = values(folder, case, "grad_projection_rank")
    return [sum(row) / RANKS for step, row in enumerate(rows) if step != left_out]  # type: ignore[arg-type]


def test_products_of_any_length_and_kind() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        g, h = (torch.randn(2 * alignment._PIECE_ON_HOST + 77).to(dtype) for _ in range(2))
        a, b = g.double(), h.double()
        found = alignment.products(g, h).tolist()
        assert found[1:] == pytest.approx([float(a @ a), float(b @ b)], rel=1e-12)
        assert found[0] == pytest.approx(float(a @ b), abs=1e-12 * float(a.norm() * b.norm()))
    huge = torch.tensor([3e38, 1.0])  # a flipped bit of an exponent
    assert alignment.cosine(alignment.products(huge, huge).tolist()) == pytest.approx(1.0)
    z = torch.tensor([1 + 2j, -1j])
    assert alignment.products(z, z).tolist() == [6.0, 6.0, 6.0]
    assert alignment.products(torch.empty(0), torch.empty(0)).tolist() == [0.0, 0.0, 0.0]


def test_nothing_is_said_of_zeros_and_overflows() -> None:
    assert alignment.projection((0.0, 1.0, 0.0)) is None
    assert alignment.cosine((0.0, 0.0, 1.0)) is None
    assert alignment.projection((2.0, 1.0, 4.0)) == 0.5
    assert alignment.cosine((-2.0, 4.0, 1.0)) == -1.0
    for broken in (math.nan, math.inf):
        assert alignment.projection((broken, 1.0, 1.0)) is None
        assert alignment.cosine((broken, 1.0, 1.0)) is None
