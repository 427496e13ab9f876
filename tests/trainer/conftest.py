"""A tiny run, and ranks started without torchrun: forkserver children that have torch loaded already."""

import dataclasses
import multiprocessing
import runpy
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import worker
from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import DataConfig, data_folder, pack
from runhealth.trainer.launch import LaunchSpec
from runhealth.trainer.supervisor import create

TINY = TrainConfig(
    steps=12,
    seed=3,
    world=2,
    data=DataConfig(shards=8, heldout_shards=1, shard_bytes=2_048, piece_bytes=256, seq_len=16, batch_size=4),
    model=ModelConfig(layers=1, width=16, heads=2, ffn_width=32, precision="fp8"),
    optim=OptimConfig(lr=3e-3, warmup_steps=4),
    checkpoint=CheckpointConfig(every=6),
    eval_every=6,
    eval_samples=16,
    timeout_s=30.0,
)

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["runhealth.trainer.worker", "torch.distributed.pipelining"])


_RANKS = str(Path(__file__).with_name("ranks.py"))


@pytest.fixture(scope="session")
def alone() -> Callable[..., dict[str, list[float]]]:
    """`alone(config, steps)`: single-process training by a plain loop."""
    return runpy.run_path(_RANKS)["alone"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[int, Any]]:
    """`run(n, job, *arguments)` -> {rank: result}: a job of ranks.py on n ranks, one process each. An exception of a
    rank fails the test with its traceback."""

    def start(n: int, job: str, *arguments: Any, timeout_s: float = 100.0) -> dict[int, Any]:
        results = _CONTEXT.SimpleQueue()
        rendezvous = f"file://{tmp_path}/{uuid.uuid4().hex}"
        ranks = [
            _CONTEXT.Process(
                target=runpy.run_path,
                args=(_RANKS, {"work": (job, rank, n, rendezvous, arguments, results)}, "__ranks__"),
                daemon=True,
            )
            for rank in range(n)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(n, ranks, results, timeout_s)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
            results.close()

    return start


def _collect(n: int, ranks: list[Any], results: Any, timeout_s: float) -> dict[int, Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < n and time.monotonic() < deadline:
        if results.empty():
            codes = [process.exitcode for process in ranks]
            assert not any(codes), f"exit codes {codes}, results of ranks {sorted(found)}"
            time.sleep(0.005)
            continue
        rank, result, trace = results.get()
        assert not trace, f"rank {rank}:\n{trace}"
        found[rank] = result
    assert len(found) == n, f"no result after {timeout_s} s of ranks {sorted(set(range(n)) - set(found))}"
    for process in ranks:
        process.join(20)
    assert [process.exitcode for process in ranks] == [0] * n
    return dict(sorted(found.items()))


@pytest.fixture(scope="session")
def tiny() -> TrainConfig:
    return TINY


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed data of the tiny config; shared, never changed."""
    root = tmp_path_factory.mktemp("corpus")
    pack(data_folder(str(root), TINY.data), TINY.data)
    return root


@pytest.fixture
def store(tmp_path: Path, corpus: Path) -> Store:
    root = tmp_path / "runs"
    root.mkdir()
    (root / ".data").symlink_to(corpus / ".data")
    return Store(str(root))


@pytest.fixture
def train(store: Store) -> Callable[..., RunInfo]:
    """`train(name, config, **changes of LaunchSpec)`: one attempt of both ranks, to the end."""

    def start(name: str, config: TrainConfig, **changes: object) -> RunInfo:
        run = create(store, name, config)
        claimed = store.claim_attempt(run, uuid.uuid4().hex)
        spec = LaunchSpec(
            run=name,
            store=store.root,
            run_path=run.path,
            data_path=data_folder(store.root, config.data),
            attempt=claimed.attempt,
            config=config,
            stop_step=config.steps,
        )
        spec = dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
        launch = Path(run.path) / "launch" / f"a{claimed.attempt:03d}.json"
        spec.write(launch)
        rendezvous = f"file://{launch}.rendezvous"
        ranks = [
            _CONTEXT.Process(target=worker.run_rank, args=(str(launch), rank, rendezvous), daemon=True)
            for rank in range(config.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0] * config.world
        return run

    return start
