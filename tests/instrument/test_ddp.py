"""Two and three processes: the hook measures, and changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runhealth.storage.records import LayerSample, Record, StepRecord
from runhealth.storage.tail import RunTail

DELAY_S = 0.3  # rank 1 comes this much later to each backward pass


@pytest.fixture(scope="module")
def two_ranks(run_ranks: Callable[..., Path]) -> Path:
    return run_ranks("ddp_training.py", 2, MONITORED=True, DELAY_S=DELAY_S)


def _records(folder: Path) -> list[Record]:
    records = RunTail(str(folder / "store" / "ddp")).read()
    assert {record.attempt for record in records} == {0}  # all ranks joined one attempt
    return records


def _steps(folder: Path) -> dict[tuple[int, int], StepRecord]:
    return {(r.rank, r.step): r for r in _records(folder) if isinstance(r, StepRecord)}


@pytest.mark.parametrize("world_size", [2, 3])  # 3: one third is no power of two, so x / 3 and x * (1 / 3) differ
def test_the_monitor_changes_no_bit_and_sees_each_rank(
    run_ranks: Callable[..., Path], two_ranks: Path, world_size: int
) -> None:
    bare = run_ranks("ddp_training.py", world_size, MONITORED=False, DELAY_S=0.0)
    watched = two_ranks if world_size == 2 else run_ranks("ddp_training.py", 3, MONITORED=True, DELAY_S=0.0)
    steps = _steps(watched)
    assert len(steps) == 5 * world_size
    for rank in range(world_size):
        without, with_monitor = (torch.load(folder / f"rank{rank}.pt") for folder in (bare, watched))
        for name, value in without["params"].items():
            assert torch.equal(value, with_monitor["params"][name]), (rank, name)
        for step in range(5):
            values = steps[rank, step].values
            assert values["grad_norm_rank"] == pytest.approx(without["local_norms"][step], rel=1e-5)
            assert values["nonfinite_count"] == 0
            assert values["t_wait_s"] >= 0
            assert ("grad_norm" in values) == (rank == 0)
    norms = {steps[rank, 0].values["grad_norm_rank"] for rank in range(world_size)}
    assert len(norms) == world_size  # other data, other gradients


def test_layer_norms_are_written_by_rank_0_and_agree_with_the_total(two_ranks: Path) -> None:
    samples = [r for r in _records(two_ranks) if isinstance(r, LayerSample) and "grad_norm" in r.values]
    assert {sample.rank for sample in samples} == {0}
    assert {sample.layer for sample in samples} == {"0", "2", "4"}
    for step in range(5):
        square = sum(sample.values["grad_norm"] ** 2 for sample in samples if sample.step == step)
        assert square**0.5 == pytest.approx(_steps(two_ranks)[0, step].values["grad_norm"], rel=1e-5)


def test_the_slow_rank_waits_least(two_ranks: Path) -> None:
    steps = _steps(two_ranks)
    late = range(2, 5)  # not before: DDP rebuilds its buckets in the second step, and waits in the forward pass
    waited, backward = (
        [sum(float(steps[rank, step].values[name]) for step in late) for rank in (0, 1)]
        for name in ("t_wait_s", "t_backward_s")
    )
    half = DELAY_S * len(late) / 2
    assert waited[0] > half > waited[1]
    assert backward[0] < half  # the waiting is not counted as compute
