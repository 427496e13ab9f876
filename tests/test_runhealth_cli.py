"""The `runhealth` command: exit codes, and messages for what is not there."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from runhealth.cli import main


@pytest.mark.parametrize("command", ["train", "demo", "dashboard", "store", "compact"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["train", "--steps", "many"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_an_unknown_run_exits_3_and_names_its_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compact", "40k-spik3", "--store", str(tmp_path)]) == 3
    assert "40k-spike" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "module", "command"),
    [
        (["train", "--recipe", "demo"], "torch", "pip install 'runhealth[train]'"),
        (["demo"], "torch", "pip install 'runhealth[train]'"),
        (["dashboard"], "streamlit", "pip install 'runhealth[dashboard]'"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(
    arguments: list[str],
    module: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == module else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert main([*arguments, "--store", str(tmp_path)]) == 2
    assert command in capsys.readouterr().err
