"""Fixtures of the storage tests: a store in a temporary folder, and records of every kind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    LayerSample,
    Record,
    RunEvent,
    StepRecord,
)
from runhealth.storage.store import RunInfo, Store

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.delenv("RUNHEALTH_STORE", raising=False)
    return Store(str(tmp_path / "store"))


@pytest.fixture
def run(store: Store) -> RunInfo:
    return store.create_run("run-one", {"lr": 0.1})


@pytest.fixture
def log_for(store: Store, run: RunInfo) -> Callable[..., RankLog]:
    """Open the log of a rank in the attempt of a launch key."""

    def open_log(rank: int = 0, launch_key: str = "first", **options: object) -> RankLog:
        return RankLog.create(store.claim_attempt(run, launch_key).path, rank, **options)  # type: ignore[arg-type]

    return open_log


@pytest.fixture
def one_step() -> Callable[..., list[Record]]:
    """Records of every kind of one step, in the order in which a reader gives them out. The numbers are the hard ones:
    NaN, infinities, subnormals, the ends of the integer types. All float32 signals hold float32 values."""

    def make(step: int, rank: int = 0, attempt: int = 0) -> list[Record]:
        at = {"attempt": attempt, "step": step, "rank": rank}
        return [
            RunEvent(**at, kind="config", message="größer", ts_ns=step, data={"a": [1, None, "x"], "nan": 1.5}),
            CheckpointRecord(
                **at, path="checkpoints/step-1", status=CheckpointStatus.VERIFIED, seconds=0.1, size_bytes=2**40
            ),
            StepRecord(
                **at, ts_ns=123456789,
                values={
                    "loss": 2.5 + step, "lr": 0.1, "loss_scale": 1e300, "tokens": 2**63 - 1, "negative": -(2**63),
                    "unsigned": 2**64 - 1, "grad_norm": -0.0, "weight_norm": -INF,
                },
            ),
            BatchRecord(
                **at, micro_batch=1, ts_ns=2**62, shard="shard-Ω", first_sample=-(2**63), last_sample=2**63 - 1,
                samples=7, content_hash=2**64 - 1, shard_hash=2**63 + 1, manifest_hash=0,
                values={"token_entropy": INF, "free": 2**53 + 1},
            ),
            BatchRecord(**at, micro_batch=2),
            LayerSample(**at, layer="blocks.0", values={"amax": 0.5, "overflow_count": 2**53 + 1}),
            LayerSample(**at, layer="blocks.1", values={"amax": -INF, "overflow_count": 0}),
            LayerSample(**at, layer="head", values={"weight_norm": 2.0**-149}),
        ]  # fmt: skip

    return make


@pytest.fixture
def one_step_of(one_step: Callable[..., list[Record]]) -> Callable[..., list[Record]]:
    """The same for several ranks: first what happened on any of them, then the measurements of one rank after the
    other."""

    def make(step: int, ranks: int, attempt: int = 0) -> list[Record]:
        by_rank = [one_step(step, rank, attempt) for rank in range(ranks)]
        return [one for records in by_rank for one in records[:2]] + [one for records in by_rank for one in records[2:]]

    return make
