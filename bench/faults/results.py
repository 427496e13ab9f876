"""The stored results: one line of JSON a run, and what they were made with."""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.faults.kinds import HELD_OUT, REPORT_SEEDS, TUNING_SEEDS

from runhealth import diagnose

FOLDER = Path(__file__).parent / "results"
REAL = FOLDER / "real.json"  # of `bench.faults.real`
SPLITS = ("tuning", "report")


def engine_hash() -> str:
    """sha256 over the sources of the diagnosis, and of what examines it here."""
    digest = hashlib.sha256()
    package = Path(str(diagnose.__file__)).parent
    sources = [*package.rglob("*.py"), *package.rglob("*.json"), *(Path(__file__).with_name(n) for n in _EXAMINERS)]
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


_EXAMINERS = ("examine.py", "rules.py")


def write(split: str, results: Iterable[dict[str, Any]], folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(result, separators=(",", ":")) for result in sorted(results, key=lambda r: r["name"])]
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    about = folder / "about.json"
    known: dict[str, Any] = json.loads(about.read_text()) if about.exists() else {}
    known[split] = {
        "commit": commit(),
        "engine": engine_hash(),
        "base_seeds": list(TUNING_SEEDS if split == "tuning" else REPORT_SEEDS),
        "held_out": list(HELD_OUT),
        "runs": len(lines),
    }
    about.write_text(json.dumps(known, indent=1) + "\n")


def write_healed(split: str, healed: Sequence[dict[str, Any]], folder: Path = FOLDER) -> None:
    """What `bench.faults heal` made of the runs of a split."""
    lines = [json.dumps(result, separators=(",", ":")) for result in sorted(healed, key=lambda r: r["name"])]
    (folder / f"healed-{split}.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "about.json"
    known: dict[str, Any] = about(folder)
    known[f"healed-{split}"] = {"commit": commit(), "engine": engine_hash(), "runs": len({r["name"] for r in healed})}
    path.write_text(json.dumps(known, indent=1) + "\n")


def read_healed(split: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    path = folder / f"healed-{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read(split: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    path = folder / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def about(folder: Path = FOLDER) -> dict[str, Any]:
    path = folder / "about.json"
    return json.loads(path.read_text()) if path.exists() else {}


def commit() -> str:
    """The commit that the working tree stands on, with a mark where it has changes."""
    root = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
