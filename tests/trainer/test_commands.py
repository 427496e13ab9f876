import argparse
import dataclasses
import os
import signal

import pytest

from runhealth.cli import main
from runhealth.storage.errors import ConfigError, MissingExtraError
from runhealth.storage.store import Store
from runhealth.trainer import recipes
from runhealth.trainer.commands import _new_run, add_train_arguments, run_train
from runhealth.trainer.config import CheckpointConfig, FaultSpec, OptimConfig, TrainConfig
from runhealth.trainer.schedule import learning_rate
from runhealth.trainer.supervisor import create


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return run_train(parser.parse_args(arguments))


def test_sigterm_before_the_supervisor_has_taken_over_ends_as_ctrl_c_does(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runhealth.trainer.commands._new_run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train", "--recipe", "demo", "--store", str(tmp_path)]) == 130
    assert signal.getsignal(signal.SIGTERM) is before


def test_too_many_nodes_leave_no_run_behind(tmp_path):
    with pytest.raises(ConfigError, match="--nodes: expected at most one a rank, 2, met 9"):
        call("--recipe", "demo", "--nodes", "9", "--store", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_said_before_a_run_is_created(tmp_path, monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(MissingExtraError, match="pip install --no-deps torchao"):
        call("--recipe", "fp8_torchao", "--store", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --recipe NAME for a new run or --run R"),
        (("--recipe", "nope"), r"expected one of .*\bdemo\b"),
        (("--recipe", "demo", "--fault", "nope"), r"expected one of .*\bbad_shard\b"),
        (("--recipe", "demo", "--fault", "fp8_stale_amax"), "expected precision fp8"),
        (("--recipe", "demo", "--fault", "router_collapse"), r"a model with a router \(recipe experts\)"),
        (("--recipe", "demo", "--run", "old"), "resume it with `runhealth train --run old`"),
        (("--recipe", "demo", "--steps", "0"), "--steps: expected at least 1, met 0"),
        (("--run", "old", "--steps", "0"), "--steps: expected at least 1, met 0"),
        (("--run", "old", "--max-restarts", "-1"), "--max-restarts: expected at least 0, met -1"),
        (("--recipe", "demo", "--run", "a/b"), "--run: a run name has no slash"),
        (("--recipe", "demo", "--fault", "bad_shard:mode=odd"), "expected mode out of noise, zeros, repeat"),
        (
            ("--recipe", "demo", "--steps", "100", "--fault", "bad_shard:step=100"),
            "expected a step from 0 to 99, as the run has 100 steps, met step 100",
        ),
        (("--run", "old", "--seed", "3"), "--seed belongs to a new run"),
        (("--run", "old", "--from", "old"), "--from belongs to a new run"),
        (("--recipe", "demo", "--from", "old"), "run 'old' has no checkpoint that verifies"),
        (("--run", "old", "--nodes", "3"), "--nodes: expected at most one a rank, 2, met 3"),
        (("--run", "old", "--min-world", "0"), "--min-world: expected at least 1, met 0"),
        (("--run", "old", "--spares", "-1"), "--spares: expected at least 0, met -1"),
        (("--run", "old", "--fault", "bad_shard"), "--fault belongs to a new run"),
    ],
)
def test_wrong_calls_say_what_was_expected(
    tmp_path, tiny: TrainConfig, capsys, arguments: tuple[str, ...], message: str
):
    create(Store(str(tmp_path)), "old", tiny)
    with pytest.raises(ConfigError, match=message):
        call("--store", str(tmp_path), *arguments)
    assert [run.name for run in Store(str(tmp_path)).runs() if not run.bundled] == ["old"]
    assert main(["train", "--store", str(tmp_path), *arguments]) == 2
    assert not capsys.readouterr().err.startswith("new run")


def test_a_run_that_is_not_there_is_3(tmp_path):
    assert main(["train", "--store", str(tmp_path), "--run", "none"]) == 3


def test_a_config_survives_json_and_says_where_it_is_wrong():
    for name in recipes.names():
        config = recipes.load(name)
        assert TrainConfig.from_json(config.to_json()) == config
    raw = recipes.load("demo").to_json()
    with pytest.raises(ConfigError, match=r"config\.model\.width: expected int, met '64'"):
        TrainConfig.from_json({**raw, "model": {**raw["model"], "width": "64"}})
    with pytest.raises(ConfigError, match=r"config\.optim: unknown field 'momentum'"):
        TrainConfig.from_json({**raw, "optim": {"momentum": 0.9}})
    with pytest.raises(ConfigError, match=r"config\.model\.precision: expected one of"):
        TrainConfig.from_json({**raw, "model": {"precision": "fp4"}})
    with pytest.raises(ConfigError, match="config: expected an object"):
        TrainConfig.from_json([])
    with pytest.raises(ConfigError, match=">= 2 generations"):
        CheckpointConfig(keep=1)


def test_a_run_is_not_created_twice_with_another_config(tmp_path, tiny: TrainConfig):
    store = Store(str(tmp_path))
    assert create(store, "run", tiny) == create(store, "run", tiny)
    with pytest.raises(ConfigError, match="exists in"):
        create(store, "run", dataclasses.replace(tiny, seed=99))


def test_a_recipe_keeps_its_own_faults_unless_others_are_asked_for(tmp_path):
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    store = Store(str(tmp_path))
    own = _new_run(store, parser.parse_args(["--recipe", "spike-40k"]))
    other = _new_run(store, parser.parse_args(["--recipe", "spike-40k", "--fault", "lr_change:step=9"]))
    assert [fault["name"] for fault in own.config["faults"]] == ["fp8_stale_amax"]
    assert [fault["name"] for fault in other.config["faults"]] == ["lr_change"]
    assert (own.name, other.name) == ("spike-40k", "spike-40k-2")


def test_faults_are_parsed_with_their_types():
    spec = FaultSpec.parse("bad_shard:step=330,severity=0.5,mode=noise")
    assert spec == FaultSpec(name="bad_shard", params={"step": 330, "severity": 0.5, "mode": "noise"})


def test_learning_rate_warms_up_then_decays_to_its_floor():
    optim = OptimConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    assert learning_rate(optim, 0, 110) == pytest.approx(0.1)
    assert learning_rate(optim, 9, 110) == 1.0
    assert learning_rate(optim, 60, 110) == pytest.approx(0.55)
    assert learning_rate(optim, 110, 110) == learning_rate(optim, 500, 110) == pytest.approx(0.1)
    assert learning_rate(dataclasses.replace(optim, horizon=60), 60, 110) == pytest.approx(0.1)
