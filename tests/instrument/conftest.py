"""Shared by the tests of the instrument room: a log in memory, a settable clock, and worlds of a few processes."""

import multiprocessing
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runhealth.instrument import Clock, Monitor
from runhealth.instrument.sink import OpenedLog
from runhealth.storage.records import BatchRecord, LayerSample, Record, RunEvent, StepRecord

RANKS = Path(__file__).parent / "ranks"


class MemoryLog:
    """A rank log that keeps records, and fails on demand."""

    def __init__(self) -> None:
        self.appends: list[list[Record]] = []
        self.failing: Exception | None = None
        self.closed = 0

    def append(self, records: Sequence[Record]) -> None:
        if self.failing is not None:
            raise self.failing
        self.appends.append(list(records))

    def close(self) -> None:
        self.closed += 1

    @property
    def records(self) -> list[Record]:
        return [record for append in self.appends for record in append]

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def batches(self) -> list[BatchRecord]:
        return [record for record in self.records if isinstance(record, BatchRecord)]

    @property
    def events(self) -> list[RunEvent]:
        return [record for record in self.records if isinstance(record, RunEvent)]

    def layers(self, step: int) -> dict[str, dict[str, float]]:
        samples = [r for r in self.records if isinstance(r, LayerSample) and r.step == step]
        return {sample.layer: dict(sample.values) for sample in samples}


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.s = 100.0
        self.clock = Clock(now_ns=lambda: int(self.s * 1e9), perf_s=lambda: self.s)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def monitor_for(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Monitor]]:
    """Makes monitors that write to `log` as attempt 3, and closes them."""
    for name in ("RANK", "WORLD_SIZE", "RUNHEALTH_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    made: list[Monitor] = []

    def make(**arguments: Any) -> Monitor:
        arguments.setdefault("opener", lambda: OpenedLog(attempt=3, log=log))
        monitor = Monitor("test-run", **arguments)
        made.append(monitor)
        return monitor

    yield make
    for monitor in made:
        monitor.close()


class TinyModel(nn.Module):
    """Embedding, two blocks, head: names as in a transformer."""

    def __init__(self, vocab: int = 32, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": nn.Linear(width, width), "mlp": nn.Linear(width, width)}) for _ in range(2)
        )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block["mlp"](torch.tanh(block["attn"](hidden))))
        return self.head(hidden)


@pytest.fixture
def tiny() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel()


@pytest.fixture
def tokens() -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and next tokens of a step, both (4, 8)."""

    def make(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(step))
        return ids[:, :-1], ids[:, 1:]

    return make


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """`run_ranks(script, world_size, **variables)` runs `ranks/<script>` in a gloo world. Each process finds RANK,
    WORLD_SIZE, FOLDER (the same for all, returned) and the variables as globals; all have to end with 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "runhealth.instrument"])

    def run(script: str, world_size: int, **variables: Any) -> Path:
        folder = tmp_path_factory.mktemp("world")
        processes = [
            context.Process(
                target=runpy.run_path,
                args=(str(RANKS / script),),
                kwargs={
                    "init_globals": {"RANK": rank, "WORLD_SIZE": world_size, "FOLDER": str(folder), **variables},
                    "run_name": "__main__",
                },
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(60)
            assert [process.exitcode for process in processes] == [0] * world_size
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return folder

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        environment.setenv("OMP_NUM_THREADS", "1")
        yield run
