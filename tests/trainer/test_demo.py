import fcntl
import json
from pathlib import Path

import pytest

from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.store import Store
from runhealth.trainer import demo, recipes


def test_the_fault_begins_late_enough_to_be_seen_and_the_run_stops_while_the_shard_is_bad():
    config = recipes.load("demo")
    label = demo.fault_label(config)
    assert label.onset_step >= 128 + demo.WINDOW_STEPS  # the loss detector looks back 128 steps
    assert label.last_step is not None
    assert label.onset_step + 20 < demo.STOPPED_AT <= label.last_step < config.steps - demo.WINDOW_STEPS
    assert label.onset_step - label.onset_step % config.checkpoint.every <= label.onset_step - 5


def test_the_demo_replaces_its_own_runs_and_nothing_else(tmp_path: Path):
    store = Store(str(tmp_path))
    demo._remove(store, demo.SPIKE)
    other = store.create_run("mine")
    run = store.create_run(demo.SPIKE)
    demo._remove(store, demo.SPIKE)
    assert not Path(run.path).exists()
    assert Path(other.path).exists()
    (tmp_path / demo.HEALTHY).mkdir()
    with pytest.raises(StoreError, match="met another folder"):
        demo._remove(store, demo.HEALTHY)


def test_a_demo_that_still_trains_is_not_replaced(tmp_path: Path):
    store = Store(str(tmp_path))
    run = store.create_run(demo.SPIKE)
    Path(run.path, "supervisor.json").write_text(json.dumps({"pid": 4242}))
    with open(Path(run.path) / "supervisor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="process 4242"):
            demo._remove(store, demo.SPIKE)
    assert Path(run.path).exists()


@pytest.mark.parametrize(
    ("healed", "held_out", "word"), [(1.84, 1.54, " healed"), (1.90, 1.53, "NOT healed"), (1.81, 1.59, "NOT healed")]
)
def test_the_table_says_healed_only_within_the_bar(healed: float, held_out: float, word: str):
    outcome = demo.Outcome(before=2.0, spike=6.4, healed=healed, healthy=1.81, healed_eval=held_out, healthy_eval=1.53)
    assert word in demo.table(outcome)
    assert demo._is_healed(outcome) is (word == " healed")
