"""Completion: the candidates, and bash itself where they are shown."""

import os
import shutil
import subprocess
import sys

import pytest

from runhealth.diagnose.cli import main
from runhealth.diagnose.completion import candidates
from runhealth.diagnose.parsers import PARSERS
from runhealth.storage.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch):
    made = Store(str(tmp_path / "runs"))
    for name in ("alpha", "beta one"):
        made.create_run(name, {})
    monkeypatch.setenv("RUNHEALTH_STORE", made.root)
    return made.root


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--fo"], ["--format"]),
        (["--format", "s"], ["sarif"]),
        (["--format", "=", "h"], ["html"]),
        (["--format", "="], ["text", "json", "markdown", "html", "sarif", "junit"]),
        (["w"], ["watch"]),
        (["watch", "--on"], ["--once"]),
        (["rollback", ""], ["plan", "apply"]),
        (["rollback", "apply", "--dry"], ["--dry-run"]),
        (["explain", "RH60"], ["RH601", "RH602"]),
        (["explain", "bad"], ["bad_shard"]),
        (["doctor", "--map", "grad_norm"], ["grad_norm=", "grad_norm_rank="]),
        (["--fail-on", "e"], ["error"]),
        (["train.log", ""], []),
        (["-o", ""], []),
        ([""], []),
        ([], []),
    ],
)
def test_what_may_come_next(words, found):
    assert candidates(words) == found


def test_runs_come_from_the_store(store, tmp_path):
    assert candidates(["--run", "a"]) == ["alpha"]
    assert candidates(["watch", "--run", "b"]) == ["beta one"]
    assert "latest" in candidates(["rollback", "plan", "--run", ""])
    assert candidates(["--store", str(tmp_path / "none"), "--run", "a"]) == []
    assert candidates(["--store", store, "--run", "al"]) == ["alpha"]


def test_every_command_completes_its_options():
    for command in PARSERS:
        found = candidates([*command.split(), "--"])
        assert "--help" in found
        assert all(word.startswith("--") for word in found)


def test_scripts_are_printed_for_each_shell(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["--completion", shell]) == 0
        assert "--completion-candidates" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--completion", "tcsh"])


def in_shell(tmp_path, *command):
    """The shell finds a `diagnose` that is this source tree."""
    script = tmp_path / "bin" / "diagnose"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m runhealth.diagnose.cli "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("typed", "found"), [("--run a", "alpha"), ("--run b", "beta one"), ("--format=j", "json")])
def test_bash_completes(store, tmp_path, typed, found):  # noqa: ARG001 - the store is found through the environment
    words = typed.replace("=", " = ").split()
    quoted = " ".join(f'"{word}"' for word in words)
    ask = (
        'eval "$(diagnose --completion bash)"; '
        f'COMP_WORDS=(diagnose {quoted}); COMP_CWORD={len(words)}; _diagnose; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    assert found in in_shell(tmp_path, "bash", "-c", ask).splitlines()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(store, tmp_path):  # noqa: ARG001
    ask = "diagnose --completion fish | source; complete --do-complete='diagnose --run al'"
    assert "alpha" in in_shell(tmp_path, "fish", "--no-config", "-c", ask).split()
