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

from runhealth.diagnose.plain_file import inside, read_text
from runhealth.diagnose.plans import CHANGES
from runhealth.storage.durable import write_whole
from runhealth.storage.errors import CorruptDataError, ReplayError, StoreError
from runhealth.storage.jsontext import parse_json

FOLDER, RESULT, LOCK = "replays", "result.json", ".lock"
VERSION = 1
MOST_TRIED = 8  # a file that lists more is none of ours
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
        """Raises CorruptDataError for anything but what `to_json` writes: it is evidence, from anywhere."""
        try:
            if not isinstance(raw, dict) or raw.get("version") != VERSION:
                raise TypeError(f"expected version {VERSION}")
            tried = raw["tried"]
            if not isinstance(tried, list) or not 0 < len(tried) <= MOST_TRIED:
                raise TypeError(f"expected 1 to {MOST_TRIED} replays in tried")
            fields = {**_fields(cls, raw), "tried": tuple(Tried(**_fields(Tried, one)) for one in tried)}
            found = cls(**fields)
            if found.tried[0].change != "as_is" or any(one.change not in CHANGES for one in found.tried):
                raise TypeError("expected known changes, as_is first")
        except KeyError as error:
            raise CorruptDataError(f"{where}: expected the result of a replay, met no {error}") from error
        except (TypeError, ValueError, OverflowError) as error:
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
            result = Replayed.from_json(parse_json(read_text(path)), str(path))
            if result.incident != path.parent.name:
                raise CorruptDataError(f"{path}: expected incident {path.parent.name}, met {result.incident!r}")
            found.append(result)
        except OSError as error:
            notes.append(f"a stored replay is not taken into account: {path}: {error.strerror}")
        except ValueError as error:
            said = str(error) if isinstance(error, CorruptDataError) else f"{path}: {error}"
            notes.append(f"a stored replay is not taken into account: {said}")
    return tuple(found), tuple(notes)


@contextmanager
def claim(run_path: str, incident: str) -> Iterator[None]:
    """One replay of an incident at a time.

    Raises:
        ReplayError: another process is at it. StoreError: the folder cannot be written.
    """
    folder = folder_of(run_path, incident)
    if not inside(folder, Path(run_path)):
        raise StoreError(f"{folder}: expected a folder of the run, met a link to {folder.resolve()}; remove it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        lock = open(descriptor, "r+")  # noqa: SIM115 - held while the replay lasts
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be written, and a replay keeps its telemetry there: {error.strerror or error}"
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


def _fields(owner: type, raw: object) -> dict[str, Any]:
    """The fields that `owner` declares, each of its type; numbers finite, counts and steps not negative and below 2^63.
    Raises KeyError, TypeError."""
    if not isinstance(raw, Mapping):
        raise TypeError(f"expected an object, met {type(raw).__name__}")
    found: dict[str, Any] = {}
    for key, field in owner.__dataclass_fields__.items():  # type: ignore[attr-defined]
        kind, value = field.type.__name__ if isinstance(field.type, type) else str(field.type), raw[key]
        if kind.startswith("tuple["):
            if key == "tried":
                continue
            item = kind.removeprefix("tuple[").split(",")[0]
            if not isinstance(value, list | tuple) or not all(_is(item, one) for one in value):
                raise TypeError(f"{key}: expected a list of {item}, {_met(value)}")
            value = tuple(value)
        elif not any(_is(one, value) for one in kind.split(" | ")):
            raise TypeError(f"{key}: expected {kind}, {_met(value)}")
        found[key] = value
    return found


def _is(kind: str, value: object) -> bool:
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "int":
        return isinstance(value, int) and 0 <= value < 1 << 63
    if kind == "float":
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, str) if kind == "str" else value is None


def _met(value: object) -> str:
    text = repr(value)
    return f"met {text[:60]}{'…' if len(text) > 60 else ''}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
