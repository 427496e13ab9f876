"""`diagnose replay` on real runs: the control repeats the record bit by bit, and the right change makes it vanish."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runhealth.diagnose.cli import main
from runhealth.diagnose.findings import Report
from runhealth.diagnose.service import diagnose
from runhealth.storage.reader import RunReader
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer.config import CheckpointConfig, FaultSpec, ModelConfig, OptimConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.supervisor import Supervisor, create

STEP = 90
LIMIT_S = 240

pytestmark = pytest.mark.timeout(LIMIT_S)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(tmp_path_factory.mktemp("replay") / "runs"))


@pytest.fixture(scope="module")
def trained(store: Store) -> Callable[[str], RunInfo]:
    """`trained(fault)`: a run of 110 steps on two ranks with this fault; each is trained once."""
    known: dict[str, RunInfo] = {}

    def train(fault: str) -> RunInfo:
        if fault not in known:
            config = TrainConfig(
                steps=STEP + 20,
                seed=5,
                data=DataConfig(
                    shards=32, heldout_shards=1, shard_bytes=8_192, piece_bytes=512, seq_len=32, batch_size=8
                ),
                model=ModelConfig(layers=1, width=32, heads=4, ffn_width=80),
                optim=OptimConfig(lr=4e-3, warmup_steps=20),
                checkpoint=CheckpointConfig(every=10),
                eval_every=100,
                eval_samples=16,
                faults=(FaultSpec.parse(fault),),
            )
            run = create(store, fault.partition(":")[0], config)
            assert Supervisor(store, run, say=lambda _: None).supervise() == 0
            known[fault] = run
        return known[fault]

    return train


def replay(run: RunInfo, store: Store, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """The one finding that `diagnose replay --format json` prints."""
    code = main(["replay", "--run", run.name, "--store", store.root, "--format", "json", "--fail-on", "info", *more])
    said = capsys.readouterr()
    assert code == 1, said.err
    (found,) = json.loads(said.out)["findings"]
    assert found["replay"]["tried"][0]["change"] == "as_is"
    return found  # type: ignore[no-any-return]


def record(run: RunInfo) -> Report:
    with RunReader.open(run.path) as reader:
        return diagnose(reader)


def content(run: RunInfo) -> dict[str, str]:
    """Hashes of the files of a run, its replays apart."""
    root = Path(run.path)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "replays"
    }


def test_a_bad_shard_is_proven_by_masking_it(
    trained: Callable[[str], RunInfo], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(f"bad_shard:step={STEP},rank=1")
    before = content(run)
    found = replay(run, store, capsys)
    shown = found["replay"]
    assert content(run) == before, "the run was changed"
    assert shown["deterministic"]
    assert shown["parted_step"] is None, "the control is not the record, bit by bit"
    control, masked = shown["tried"]
    assert control["ratio"] == 1.0
    assert (masked["change"], masked["vanished"]) == ("mask_shards", True)
    assert abs(masked["ratio"]) < 0.2
    assert found["verdict"] == "bad_shard"
    assert any(e["claim"].startswith("replayed with the rows of shard") for e in found["suspects"][0]["for"])
    assert not {"as_is", "mask_shards"} & {known.name for known in store.runs()}, "a replay is listed as a run"
    told = next(f for f in record(run).findings if f.id == found["id"])
    assert told.replay is not None
    assert told.suspects[0].probability == found["suspects"][0]["probability"]
    with RunReader.open(f"{run.path}/{control['path']}") as reader:
        assert diagnose(reader).first_step == shown["checkpoint_step"]


def test_a_learning_rate_is_proven_by_the_schedule(
    trained: Callable[[str], RunInfo], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay(trained(f"lr_change:step={STEP},severity=100"), store, capsys)
    control, scheduled = found["replay"]["tried"]
    assert not control["vanished"]
    assert found["replay"]["parted_step"] is None
    assert (scheduled["change"], scheduled["vanished"]) == ("scheduled_lr", True)
    assert found["verdict"] == "lr_change"


def test_what_a_machine_did_once_does_not_come_back(
    trained: Callable[[str], RunInfo], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(f"silent_corruption:step={STEP},mode=scale,rank=1")
    found = replay(run, store, capsys)
    shown = found["replay"]
    (control,) = shown["tried"]
    assert control["vanished"]
    assert shown["deterministic"]
    assert shown["parted_step"] == STEP
    assert shown["parted_ranks"] == [1]
    assert found["verdict"] == "silent_corruption"
    assert found["ranks"] == [1]
    assert main(["--run", run.name, "--store", store.root]) in (0, 1)
    assert f"they part at step {STEP}" in " ".join(capsys.readouterr().out.split())


def test_a_replay_that_is_killed_leaves_no_result_and_no_process(
    trained: Callable[[str], RunInfo], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(f"lr_change:step={STEP},severity=100")
    incident = next(f.id for f in record(run).findings if f.kind in ("loss_spike", "loss_divergence", "update_jump"))
    folder = Path(run.path) / "replays" / incident
    (folder / "result.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "runhealth.diagnose.cli", "replay", "--run", run.name, "--store", store.root]
    child = subprocess.Popen([*command, "--incident", incident], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        launch = folder / "as_is" / "launch.json"
        launch.unlink(missing_ok=True)
        _wait(lambda: launch.exists() or child.poll() is not None)
        assert child.poll() is None, "it ended before it could be killed"
        assert main([*command[3:], "--incident", incident]) == 3, "a second replay of one incident was let in"
        assert f"is being replayed by process {child.pid} already" in capsys.readouterr().err
        family = _descendants(child.pid)
        assert family
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    _wait(lambda: not any(map(_alive, family)))
    assert not (folder / "result.json").exists()
    assert all(f.replay is None for f in record(run).findings if f.id == incident)
    replay(run, store, capsys, "--incident", incident)
    assert (folder / "result.json").exists()


def test_a_damaged_checkpoint_is_refused(
    trained: Callable[[str], RunInfo], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(f"silent_corruption:step={STEP},mode=scale,rank=1")
    shard = max((Path(run.path) / "checkpoints" / f"step-{STEP - 10:08d}").glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    try:
        assert main(["replay", "--run", run.name, "--store", store.root]) == 3
    finally:
        shard.write_bytes(whole)
    assert "fails verification" in capsys.readouterr().err


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S / 3
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *_descendants(child))]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
