"""Synthetic runs, written the way training writes them: rank logs, then published."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, Record, RunEvent, StepRecord
from runhealth.storage.store import RunInfo, Store

STEP_NS = 100_000_000


@dataclass
class FakeRun:
    """A run under construction. `now_ns` is the time of its newest step."""

    store: Store
    info: RunInfo
    ranks: int
    rng: np.random.Generator
    now_ns: int
    logs: list[RankLog] = field(default_factory=list)
    attempt: int = -1

    def new_attempt(self) -> None:
        self.close()
        claim = self.store.claim_attempt(self.info, f"launch-{self.attempt + 1}")
        self.attempt = claim.attempt
        self.logs = [RankLog.create(claim.path, rank) for rank in range(self.ranks)]

    def steps(
        self, first: int, last: int, losses: Mapping[int, float] | None = None, *, base: float = 3.0,
        on_rank: int | None = None,
    ) -> None:  # fmt: skip
        """Steps `first` to `last` of the current attempt; `losses` replaces the loss of single steps on every rank, or
        on `on_rank` only."""
        special = losses or {}
        numbers = range(first, last + 1)
        start_ns = self.now_ns - STEP_NS * (last - first)
        for rank, log in enumerate(self.logs):
            noise = self.rng.normal(0.0, 0.02, len(numbers))
            times = 0.1 + self.rng.gamma(2.0, 0.002, len(numbers))
            records: list[Record] = []
            for index, step in enumerate(numbers):
                usual = base + 3.0 * math.exp(-step / 300) + float(noise[index])
                values = {
                    "loss": special.get(step, usual) if on_rank in (None, rank) else usual,
                    "t_step_s": float(times[index]),
                    "t_wait_s": 0.01 + float(times[index]) / 10,
                }
                if rank == 0:
                    values |= {"grad_norm": 1.0 + abs(float(noise[index])), "lr": 3e-4}
                records.append(
                    StepRecord(
                        attempt=self.attempt, step=step, rank=rank, ts_ns=start_ns + index * STEP_NS, values=values
                    )
                )
            log.append(records)

    def event(self, kind: str, message: str = "", step: int = 0) -> None:
        self.logs[0].append(
            [RunEvent(attempt=self.attempt, step=step, rank=0, kind=kind, message=message, ts_ns=self.now_ns)]
        )

    def checkpoints(self, steps: Sequence[int], status: CheckpointStatus = CheckpointStatus.VERIFIED) -> None:
        self.logs[0].append(
            [
                CheckpointRecord(
                    attempt=self.attempt, step=step, rank=0, path=f"checkpoints/step-{step:08d}", status=status,
                    ts_ns=self.now_ns,
                )
                for step in steps
            ]
        )  # fmt: skip

    def publish(self) -> None:
        Publisher(self.info.path).publish()

    def close(self) -> None:
        for log in self.logs:
            log.close()
        self.logs = []


@pytest.fixture
def store_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store that is the default one; runs bundled with the package are out of sight."""
    root = tmp_path / "runs"
    root.mkdir()
    monkeypatch.setenv("RUNHEALTH_STORE", str(root))
    monkeypatch.delenv("RUNHEALTH_RUN", raising=False)
    monkeypatch.setattr("runhealth.storage.store._bundled_runs", lambda: [])
    return str(root)


@pytest.fixture
def new_run(store_root: str) -> Iterator[Callable[..., FakeRun]]:
    """Makes a run with one attempt begun; `age_s` is the age of its newest step."""

    def make(name: str, *, ranks: int = 2, age_s: float = 0.0) -> FakeRun:
        store = Store(store_root)
        run = FakeRun(
            store=store, info=store.create_run(name), ranks=ranks, rng=np.random.default_rng(7),
            now_ns=time.time_ns() - int(age_s * 1e9),
        )  # fmt: skip
        made.append(run)
        run.new_attempt()
        return run

    made: list[FakeRun] = []
    yield make
    for run in made:
        run.close()
