"""Reads what the bench has made: the records of a run, from the first step of its base on, and the truth about it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.faults import telemetry

from runhealth.storage.records import Record


def names(cache: Path) -> list[str]:
    """All finished runs, twins included."""
    return sorted(path.stem for path in (cache / "runs").glob("*.json"))


def label(cache: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cache / "runs" / f"{name}.json").read_text())
    return found


def records(cache: Path, name: str) -> Iterator[Record]:
    """In the order in which they were written: by attempt and step, within a step by rank."""
    yield from base_records(cache, name)
    yield from own_records(cache, name)


def base_records(cache: Path, name: str) -> Iterator[Record]:
    """Those of the base that the run forks from, up to the fork."""
    truth = label(cache, name)
    for fork in range(truth["fork"] + 1):
        yield from telemetry.read(cache / "bases" / f"{truth['base']}-{fork}.jsonl.gz")


def own_records(cache: Path, name: str) -> Iterator[Record]:
    """Those of the run from the fork on."""
    yield from telemetry.read(cache / "runs" / f"{name}.jsonl.gz")
