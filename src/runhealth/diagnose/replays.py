"""What a replay showed, and where it is kept: `<run>/replays/<incident>/result.json`. Data only.

Kept are measurements; what they are worth in nats is worked out when they are read (`experiments`), so that a stored
replay is judged like a new one.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runhealth.diagnose.plans import CHANGES
from runhealth.storage.durable import write_whole
from runhealth.storage.errors import CorruptDataError, ReplayError, StoreError
from runhealth.storage.jsontext import parse_json

FOLDER, RESULT, LOCK = "replays", "result.json", ".lock"
VERSION = 1
VANISHED_BELOW = 0.7  # of the original score (docs/decisions/345)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One experiment. `score` is the mean excess of the channel over its baseline in the scored steps, `ratio` its
    share of the record's; `vanished`: the share is under `VANISHED_BELOW` (of `swap_lanes`: the anomaly went with the
    data). `path` is relative to the run's folder."""

    change: str
    path: str
    steps: int
    score: float
    ratio: float
    vanished: bool
    shards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replays of one incident. `channel` is what was scored, in `unit`; the scored steps lie between `first_step`
    and `last_step`. `equal_steps` counts the steps from the checkpoint on in which the replay as it was is bit-equal to
    the record, on all ranks; `parted_step` is the first one that is not, on `parted_ranks`. `band` is the largest
    difference of the loss before the onset. `deterministic`: the same steps give the same numbers, so what did not come
    back was no property of data, config, weights or code."""

    run: str
    incident: str
    attempt: int
    onset_step: int
    channel: str
    unit: str
    baseline: float
    score: float
    first_step: int
    last_step: int
    checkpoint_step: int
    checkpoint_path: str
    deterministic: bool
    equal_steps: int
    parted_step: int | None
    parted_ranks: tuple[int, ...]
    band: float
    tried: tuple[Tried, ...]
    verdict_before: str
    probability_before: float
    made_ns: int

    @property
    def reproduced(self) -> bool:
        """The anomaly came back when nothing was changed."""
        return not self.tried[0].vanished

    @property
    def steps(self) -> int:
        """Steps trained in all replays."""
        return sum(one.steps for one in self.tried)

    def to_json(self) -> dict[str, Any]:
        raw = {"version": VERSION, **asdict(self), "reproduced": self.reproduced, "steps": self.steps}
        return _finite(raw)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, raw: object, where: str) -> "Replayed":
        """Raises CorruptDataError for anything but what `to_json` writes."""
        try:
            if not isinstance(raw, dict) or raw.get("version") != VERSION:
                raise TypeError(f"expected version {VERSION}")
            fields = {key: raw[key] for key in cls.__dataclass_fields__}
            tried = tuple(
                Tried(**{**{key: one[key] for key in Tried.__dataclass_fields__}, "shards": tuple(one["shards"])})
                for one in fields["tried"]
            )
            found = cls(**{**fields, "tried": tried, "parted_ranks": tuple(fields["parted_ranks"])})
            numbers = [found.score, *(value for one in tried for value in (one.score, one.ratio))]
            if not tried or tried[0].change != "as_is" or any(one.change not in CHANGES for one in tried):
                raise TypeError("expected known changes, as_is first")
            if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
                raise TypeError("expected finite scores")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{where}: expected the result of a replay, met {error}") from error
        return found


def folder_of(run_path: str, incident: str) -> Path:
    return Path(run_path) / FOLDER / incident


def write(run_path: str, result: Replayed) -> str:
    """Whole or not at all; returns the path. Raises StoreError."""
    path = folder_of(run_path, result.incident) / RESULT
    try:
        write_whole(path, (json.dumps(result.to_json(), indent=1) + "\n").encode())
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    return str(path)


def read_all(run_path: str) -> tuple[tuple[Replayed, ...], tuple[str, ...]]:
    """Every stored result of a run on this disk, and a sentence for each file that is none."""
    found, notes = [], []
    try:
        paths = sorted((Path(run_path) / FOLDER).glob(f"*/{RESULT}")) if "://" not in run_path else []
    except OSError:  # a name that no folder of this disk can have
        paths = []
    for path in paths:
        try:
            found.append(Replayed.from_json(parse_json(path.read_text(encoding="utf-8")), str(path)))
        except (OSError, ValueError) as error:
            notes.append(f"a stored replay is not taken into account: {error}")
    return tuple(found), tuple(notes)


@contextmanager
def claim(run_path: str, incident: str) -> Iterator[None]:
    """One replay of an incident at a time.

    Raises:
        ReplayError: another process is at it. StoreError: the folder cannot be written.
    """
    folder = folder_of(run_path, incident)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+")  # noqa: SIM115 - held while the replay lasts
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be written, and a replay keeps its telemetry there: {error.strerror}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            by = f"process {owner}" if owner.isdecimal() else "another process"
            raise ReplayError(f"incident {incident} is being replayed by {by} already; wait for it to end") from error
        lock.seek(0)
        lock.truncate()
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
