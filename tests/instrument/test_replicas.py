"""Checksums of replicas: which bits they see, what they leave out, and what `diagnose` says of a DDP run gone apart."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from runhealth.diagnose.findings import Finding
from runhealth.diagnose.service import diagnose
from runhealth.instrument import Monitor
from runhealth.instrument.replicas import MASK, ReplicaProbe, checksums
from runhealth.storage.reader import RunReader
from runhealth.storage.records import LayerSample, StepRecord

AT = 31


def _sum(tensor: torch.Tensor) -> int:
    return int(checksums([tensor]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
@pytest.mark.parametrize("size", [1, 7, 256, 5000])
def test_any_change_of_bits_shows(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    tensor = (100 * torch.randn(size)).to(dtype)
    known = _sum(tensor)
    assert 0 <= known <= MASK
    assert known == _sum(tensor.clone())
    for count in (1, 2, 4):  # two signs that flip cancel in a plain sum, or in an exclusive or
        for trial in range(30):
            places = torch.randperm(size, generator=torch.Generator().manual_seed(trial))[:count]
            changed = tensor.clone()
            changed[places] = -changed[places]
            assert (_sum(changed) == known) == bool((changed == tensor).all()), (count, trial)


def test_the_numbers_count_and_not_how_they_lie_in_memory() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(64, 34)
    assert _sum(tensor) == _sum(tensor.t().contiguous().t())
    assert _sum(tensor.view(-1)[1:33]) == _sum(tensor.view(-1)[1:33].clone())
    assert _sum(tensor) != _sum(tensor.t().contiguous())
    assert _sum(torch.empty(0)) == _sum(torch.empty(0))


def test_a_lone_rank_and_a_sharded_model_record_none(
    monitor_for: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch, log: object
) -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    def recorded(model: nn.Module, world: str) -> list[bool]:
        start = len(log.steps)  # type: ignore[attr-defined]
        monkeypatch.setenv("WORLD_SIZE", world)
        monitor = monitor_for(model=model, replicas_every=2)
        for step in range(4):
            with monitor.step(step):
                pass
        return ["param_checksum" in record.values for record in log.steps[start:]]  # type: ignore[attr-defined]

    assert recorded(nn.Linear(2, 2), "1") == [False] * 4
    assert recorded(nn.Linear(2, 2), "2") == [True, False, True, False]
    assert recorded(FullyShardedDataParallel(2, 2), "2") == [False] * 4
    assert recorded(nn.Linear(2, 2, device="meta"), "2") == [False] * 4


def test_no_checksum_of_a_step_that_failed(
    monitor_for: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch, log: object
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monitor = monitor_for(model=nn.Linear(2, 2), replicas_every=1)
    with pytest.raises(RuntimeError, match="on purpose"), monitor.step(0):
        raise RuntimeError("on purpose")
    assert ["param_checksum" in record.values for record in log.steps] == [False]  # type: ignore[attr-defined]


def test_many_ranks_sample_their_layers_more_rarely() -> None:
    assert [ReplicaProbe(nn.Linear(2, 2), 10, 10, world_size=ranks)._layers_every for ranks in (2, 8, 64, 512)] == [
        10,
        10,
        80,
        640,
    ]


def _desync(folder: Path) -> tuple[RunReader, Sequence[Finding]]:
    reader = RunReader.open("desync", str(folder / "store"))
    return reader, [f for f in diagnose(reader).findings if f.kind == "replica_desync"]


def test_replicas_of_a_healthy_ddp_run_have_one_checksum(run_ranks: Callable[..., Path]) -> None:
    reader, found = _desync(run_ranks("ddp_desync.py", 2, CHANGE="", AT=AT))
    assert found == []
    sums: dict[int, set[float]] = {}
    layers: dict[tuple[int, str], list[float]] = {}
    for record in reader.records():
        if isinstance(record, StepRecord) and "param_checksum" in record.values:
            sums.setdefault(record.step, set()).add(record.values["param_checksum"])
        elif isinstance(record, LayerSample) and "param_checksum" in record.values:
            layers.setdefault((record.step, record.layer), []).append(record.values["param_checksum"])
    assert list(sums) == list(range(0, 60, 2))
    assert all(len(versions) == 1 for versions in sums.values())
    assert len(set().union(*sums.values())) == len(sums)  # each step moves them
    assert {step for step, _ in layers} == set(range(0, 60, 4))
    assert len({layer for _, layer in layers}) == 5
    assert all(len(versions) == 2 and len(set(versions)) == 1 for versions in layers.values())


@pytest.mark.parametrize(
    ("world", "change", "cause", "ranks"),
    [
        (3, "layer", "silent_corruption", (1,)),
        (2, "layer", "silent_corruption", ()),  # of two, which one is not known ...
        (2, "loud layer", "silent_corruption", (1,)),  # ... unless its own past tells
        (2, "all", "replica_desync", ()),
        (2, "frozen", "replica_desync", (1,)),
    ],
)
def test_a_replica_that_was_changed_by_hand(
    run_ranks: Callable[..., Path], world: int, change: str, cause: str, ranks: tuple[int, ...]
) -> None:
    _, (found,) = _desync(run_ranks("ddp_desync.py", world, CHANGE=change, AT=AT))
    assert (found.verdict, found.ranks or ()) == (cause, ranks)
    assert found.onset_step <= AT <= found.onset_step + 1  # between two samples
    if world == 2:
        assert "ranks 0 and 1 differ from each other" in found.summary
