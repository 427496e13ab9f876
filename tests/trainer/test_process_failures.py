"""Ranks that really die, hang or stop: found, named, written down, and trained on to the same weights."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.diagnose.findings import Severity
from runhealth.diagnose.service import diagnose
from runhealth.storage.errors import ConfigError
from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind, Record, RunEvent
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints
from runhealth.trainer.attempt import Progress
from runhealth.trainer.config import CheckpointConfig, ParallelConfig, TrainConfig
from runhealth.trainer.drill import ENVIRONMENT, Drill
from runhealth.trainer.supervisor import INTERRUPTED, Supervisor, create

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc")


def records(store: Store, run: str) -> list[Record]:
    with RunReader.open(run, store.root) as reader:
        return list(reader.records())


def events(found: list[Record], kind: str, rank: int = -1) -> list[RunEvent]:
    return [r for r in found if isinstance(r, RunEvent) and r.kind == kind and r.rank == rank]


def weights(run: RunInfo, step: int, attempt: int) -> dict[str, str]:
    """The hash of every shard of a checkpoint: equal for equal tensors in the same layout."""
    manifest = checkpoints.verify(str(Path(run.path) / checkpoints.relative_path(step, attempt)))
    return {entry.name: entry.xxh3_64 for entry in manifest.files if entry.name != ".metadata"}


@pytest.fixture
def config(tiny: TrainConfig) -> TrainConfig:
    return dataclasses.replace(tiny, steps=40, checkpoint=CheckpointConfig(every=4), eval_every=100, timeout_s=6.0)


ORDERED = {  # mode -> what is said of rank 1, the kind of the event
    "segv": ("rank 1 was killed (signal 11, SIGSEGV)", "dead_rank"),
    "exception": ("rank 1: DrillError: ordered at step 9", "exception"),
    "exit": ("rank 1 ended with exit code 7 and without a word", "exception"),
    "hang": ("rank 1 never joined the others (at collective", "hang"),
    "stop": ("rank 1 is suspended (SIGSTOP); rank 0: RuntimeError", "hang"),
    "mismatch": ("rank 1 was killed (signal 6, SIGABRT): a message of another size arrived there", "dead_rank"),
    "kill": ("rank 1 was killed (signal 9, SIGKILL)", "dead_rank"),
}


def test_every_way_to_fail_is_named_and_the_run_ends_with_the_same_weights(
    config: TrainConfig, store: Store, train: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
):
    undisturbed = train("undisturbed", config)
    run = create(store, "run", config)
    drills = [f"{mode}:step={9 + 4 * n},rank=1,attempt={n}" for n, mode in enumerate(ORDERED)]
    monkeypatch.setenv(ENVIRONMENT, ";".join(drills))
    said: list[str] = []
    assert Supervisor(store, run, max_restarts=2, say=said.append).supervise() == 0

    found = records(store, "run")
    failures = {event.attempt: event for event in events(found, EventKind.EXCEPTION)}
    assert list(failures) == list(range(len(ORDERED)))
    for number, (mode, (words, kind)) in enumerate(ORDERED.items()):
        event = failures[number]
        message = words.replace("at step 9", f"at step {9 + 4 * number}")
        assert event.message.startswith(message), (mode, event.message)
        assert event.data["ranks"] == [1]
        assert event.step == 9 + 4 * number
        told = [
            e.kind for e in found if isinstance(e, RunEvent) and e.attempt == number and e.kind in ("hang", "dead_rank")
        ]
        assert told == ([kind] if kind != "exception" else [])
    assert "rank 1 is in drill.py" in failures[3].message
    assert [(e.attempt, e.data["ranks"]) for e in events(found, "rank_suspended")] == [(4, [1])]
    resumed = [(event.attempt, event.data["step"]) for event in events(found, EventKind.RESUME, rank=0)]
    assert resumed == [(n + 1, 8 + 4 * n) for n in range(len(ORDERED))]
    assert weights(run, 40, 7) == weights(undisturbed, 40, 0)

    with RunReader.open("run", store.root) as reader:
        report = diagnose(reader)
    kinds = {(f.attempt, f.kind, f.ranks) for f in report.findings if f.kind in ("hang", "dead_rank", "crash")}
    assert {(0, "dead_rank", (1,)), (3, "hang", (1,)), (4, "hang", (1,)), (1, "crash", (1,))} <= kinds
    assert all(f.severity is not Severity.ERROR for f in report.findings if f.kind in ("hang", "dead_rank", "crash"))


def test_a_rank_that_dies_while_a_save_is_written_leaves_no_half_of_it(
    config: TrainConfig, store: Store, train: Callable[..., RunInfo], monkeypatch: pytest.MonkeyPatch
):
    undisturbed = train("undisturbed", config)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every=4, background=True))
    run = create(store, "run", config)
    monkeypatch.setenv(ENVIRONMENT, "kill:step=12,rank=1,attempt=0;kill:step=16,rank=0,attempt=1")
    assert Supervisor(store, run, say=lambda _line: None).supervise() == 0
    for folder in (Path(run.path) / "checkpoints").iterdir():
        checkpoints.verify(str(folder))
    assert weights(run, 40, 2) == weights(undisturbed, 40, 0)


def test_a_rank_of_a_sharded_pipeline_is_named_though_others_wait_for_those_who_wait(
    config: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """Four ranks in groups of two: no group has all of them, and each has the time-out."""
    model = dataclasses.replace(config.model, layers=2, precision="fp32")
    parallel = ParallelConfig(pp=2, kind="zero3", microbatches=2)
    config = dataclasses.replace(config, steps=12, world=4, model=model, parallel=parallel)
    run = create(store, "run", config)
    monkeypatch.setenv(ENVIRONMENT, "hang:step=6,rank=2,attempt=0;stop:step=6,rank=1,attempt=1")
    assert Supervisor(store, run, say=lambda _line: None).supervise() == 0
    hung, stopped = events(records(store, "run"), "hang")
    assert hung.message.startswith("rank 2 never joined the others")
    assert "rank 2 is in drill.py" in hung.message
    assert stopped.message.startswith("rank 1 is suspended (SIGSTOP)")
    assert (hung.data["ranks"], stopped.data["ranks"]) == ([2], [1])


def test_ranks_that_all_stand_still_are_found_though_nobody_waits(
    config: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """No collective times out: each rank's own watch has to, and for suspended ranks the supervisor."""
    run = create(store, "run", dataclasses.replace(config, steps=20, timeout_s=4.0))
    drills = [f"{mode}:step=6,rank={rank},attempt={n}" for n, mode in enumerate(("hang", "stop")) for rank in (0, 1)]
    monkeypatch.setenv(ENVIRONMENT, ";".join(drills))
    assert Supervisor(store, run, say=lambda _line: None).supervise() == 0
    hung, stopped = events(records(store, "run"), "hang")
    assert hung.message.startswith("ranks 0, 1 stood still; rank 0 is in drill.py")
    assert stopped.message == "ranks 0, 1 are suspended (SIGSTOP)"
    assert (hung.data["ranks"], stopped.data["ranks"]) == ([0, 1], [0, 1])


def test_a_spare_takes_the_place_of_a_lost_node(config: TrainConfig, store: Store, train: Callable[..., RunInfo]):
    config = dataclasses.replace(config, steps=160, checkpoint=CheckpointConfig(every=20))
    undisturbed = train("undisturbed", config)
    run = create(store, "run", config)
    agents: list[dict[str, int]] = []

    def lose_the_second_node(progress: Progress) -> None:
        status = json.loads((Path(run.path) / "supervisor.json").read_text())
        if progress.attempt == 0 and progress.step >= 20 and not agents:
            agents.append(status["agents"])
            os.kill(status["agents"]["n1"], signal.SIGKILL)
        elif progress.attempt == 1 and len(agents) == 1:
            agents.append(status["agents"])

    supervisor = Supervisor(store, run, nodes=2, spares=1, on_progress=lose_the_second_node, say=lambda _line: None)
    assert supervisor.supervise() == 0
    before, after = agents
    assert set(before) == {"n0", "n1", "n2"}
    assert set(after) == {"n0", "n2"}
    assert (after["n0"], after["n2"]) == (before["n0"], before["n2"])  # nobody was started anew
    found = records(store, "run")
    assert [(e.kind, e.message) for e in events(found, "dead_rank")] == [("dead_rank", "node n1 was lost with rank 1")]
    assert [(e.attempt, e.message) for e in events(found, "node_replaced")] == [
        (1, "node n2 takes the place of a lost one")
    ]
    assert weights(run, 160, 1) == weights(undisturbed, 160, 0)


def test_a_suspended_agent_is_spoken_of_and_counts_as_lost_after_a_while(config: TrainConfig, store: Store):
    """Its ranks train on, but nobody could start or end any there."""
    config = dataclasses.replace(config, steps=100_000, checkpoint=CheckpointConfig(every=50, keep=2), timeout_s=4.0)
    run = create(store, "run", config)
    said: list[str] = []

    def signal_agent(number: signal.Signals) -> None:
        status = json.loads((Path(run.path) / "supervisor.json").read_text())
        os.kill(status["agents"]["n1"], number)

    def on_progress(progress: Progress) -> None:
        if progress.attempt == 0 and progress.step >= 5 and "suspended" not in said:
            said.append("suspended")
            signal_agent(signal.SIGSTOP)
        elif progress.attempt > 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def say(line: str) -> None:
        said.append(line)
        if "waiting for node n1" in line and sum("waiting for node n1" in text for text in said) == 1:
            signal_agent(signal.SIGCONT)
        elif "node n1 answers again" in line:
            signal_agent(signal.SIGSTOP)

    supervisor = Supervisor(store, run, nodes=2, spares=1, on_progress=on_progress, say=say)
    assert supervisor.supervise() == INTERRUPTED
    told = [line for line in said if "node n1" in line]
    words = ["waiting for node n1 (process ", "node n1 answers again", "waiting for node n1 (process "]
    assert all(f"run: {start}" in line for start, line in zip(words, told, strict=False))
    assert "it counts as lost in 3 s" in told[0]
    assert "node n1 was lost with rank 1" in told[3]
    lost = events(records(store, "run"), "dead_rank")
    assert (lost[0].attempt, lost[0].message) == (0, "node n1 was lost with rank 1")


def test_the_same_failure_again_and_again_ends_the_run(
    config: TrainConfig, store: Store, monkeypatch: pytest.MonkeyPatch
):
    run = create(store, "run", config)
    monkeypatch.setenv(ENVIRONMENT, "exception:step=6,rank=0,attempt=-1")
    said: list[str] = []
    assert Supervisor(store, run, max_restarts=50, say=said.append).supervise() == 1
    assert "the same failure came 3 times at step 6" in said[-1]
    assert len(events(records(store, "run"), EventKind.EXCEPTION)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("melt:step=1,rank=0", "a mode of kill"), ("kill:step=1", r"kill:step=N,rank=R"), ("kill:step=x,rank=0", "met")],
)
def test_a_drill_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, text: str, message: str):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ConfigError, match=message):
        Drill.ordered()
