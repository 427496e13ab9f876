"""Build the wheel and use it with the source folder out of reach.

    python tests/wheel_check.py

Checks that the wheel holds exactly the files of `src/runhealth`, and that in a fresh environment without torch and
Streamlit `diagnose --run 40k-spike` works from the installed package and finds the incident.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "runhealth"


def build(folder: Path) -> Path:
    """The wheel, built from a copy, so that no stale build folder gets in and none is left behind."""
    copy = folder / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def expected_files() -> set[str]:
    return {
        f"runhealth/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def check_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    missing, extra = sorted(expected_files() - names), sorted(names - expected_files())
    if missing or extra:
        sys.exit(f"wheel differs from src/runhealth: missing {missing[:10]}, extra {extra[:10]}")


def check_installed(wheel: Path, folder: Path) -> None:
    """Install without dependencies and lend it the tools' site-packages, except torch and Streamlit."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "venv" / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for entry in _site_packages().iterdir():
        blocked = entry.name.split("-")[0].split(".")[0] in {"torch", "streamlit", "runhealth", "__editable__"}
        if not blocked and not entry.name.startswith("__editable__") and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    probe = "import importlib.util as u; assert not u.find_spec('torch') and not u.find_spec('streamlit')"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "RUNHEALTH"))}
    subprocess.run([python, "-c", probe], check=True, cwd=folder, env=environment)
    command = "from runhealth.diagnose.cli import main; raise SystemExit(main())"
    done = subprocess.run(
        [python, "-c", command, "--run", "40k-spike", "--format", "json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 1:
        sys.exit(f"installed diagnose: expected exit 1 (findings), met {done.returncode}\n{done.stderr}")
    findings = json.loads(done.stdout)["findings"]
    print(f"wheel: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; installed diagnose says {findings[0]['summary']}")


def _site_packages() -> Path:
    import duckdb

    return Path(duckdb.__file__).resolve().parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        check_contents(wheel)
        check_installed(wheel, folder)


if __name__ == "__main__":
    main()
