"""The house: five doors at the root, no stray imports at start-up, module sizes, documentation of commands."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "runhealth"
ROOMS = ("instrument", "storage", "diagnose", "trainer", "dashboard")


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_has_a_relative_door_at_the_root(room: str) -> None:
    door = ROOT / room
    assert door.is_symlink()
    assert door.readlink() == Path("src/runhealth") / room
    assert (door / "__init__.py").is_file()


def imported_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import runhealth", {"torch", "duckdb", "polars", "streamlit", "numpy"}),
        ("import runhealth.cli", {"torch", "duckdb", "polars", "streamlit"}),
        ("import runhealth.diagnose.cli", {"torch", "duckdb", "polars", "streamlit"}),
        ("import runhealth.diagnose.service, runhealth.diagnose.engine", {"torch", "streamlit", "sklearn"}),
        ("import runhealth.instrument", {"duckdb", "polars", "streamlit"}),
        ("import runhealth.dashboard.launch", {"streamlit", "torch"}),
        ("import runhealth.trainer.commands, runhealth.trainer.supervisor", {"torch", "streamlit"}),
        ("import runhealth.trainer.planner.walk, runhealth.trainer.planner.render", {"torch", "duckdb", "polars"}),
    ],
)
def test_start_up_does_not_pay_for_other_rooms(statement: str, forbidden: set[str]) -> None:
    assert not imported_by(statement) & forbidden


def test_modules_stay_small() -> None:
    too_long = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := path.read_text().count("\n")) > 450
    }
    assert not too_long


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if not path.read_text().lstrip().startswith('"""')
    ]
    assert not silent


PAGES = ("attach", "dashboard", "diagnose", "importing", "plan", "storage", "trainer", "design")


@pytest.mark.parametrize("page", PAGES)
def test_there_is_a_page_for_each_task(page: str) -> None:
    assert (ROOT / "docs" / f"{page}.md").stat().st_size > 500
    assert f"docs/{page}.md" in (ROOT / "README.md").read_text()
