"""Rank, attempt and launch key."""

import pytest

from runhealth.instrument import world
from runhealth.storage.errors import ConfigError


def test_rank_comes_from_the_launchers_variables() -> None:
    assert world.detect({"RANK": "2", "WORLD_SIZE": "4"}) == world.World(rank=2, world_size=4)
    assert world.detect({}) == world.World(rank=0, world_size=1)


@pytest.mark.parametrize("env", [{"RANK": "x"}, {"RANK": "1"}, {"RANK": "-1", "WORLD_SIZE": "2"}])
def test_variables_that_do_not_fit_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        world.detect(env)


def test_a_supervisor_may_set_the_attempt() -> None:
    assert world.preset_attempt({"RUNHEALTH_ATTEMPT": "12"}) == 12
    assert world.preset_attempt({}) is None
    with pytest.raises(ConfigError, match="RUNHEALTH_ATTEMPT"):
        world.preset_attempt({"RUNHEALTH_ATTEMPT": "-1"})


def test_ranks_of_one_launch_share_a_key_and_a_restart_has_another() -> None:
    launch = {"TORCHELASTIC_RUN_ID": "j", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}
    first = world.launch_key("launcher-0", "s", {**launch, "RANK": "0"})
    # each process counts its own monitors: another run name stands in for another process
    second = world.launch_key("launcher-1", "s", {**launch, "RANK": "1"})
    restarted = world.launch_key("launcher-2", "s", {**launch, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first == second != restarted


def test_slurm_and_a_lone_process_have_keys_too() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert world.launch_key("slurm", "s", slurm) == "7:0:1:0"
    alone = world.launch_key("alone", "s", {})
    assert alone != world.launch_key("alone", "s", {})  # a second monitor of the run is a launch of its own
    assert alone == world.launch_key("alone-2", "s", {})


def test_ranks_without_a_group_and_launcher_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    world.launch_key("by-hand", "s", {"RANK": "0", "WORLD_SIZE": "2"})
    assert "init_process_group" in capsys.readouterr().err
