"""What the supervisor hands to the ranks of one attempt: a JSON file, kept with the run. Importable without torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runhealth.diagnose.plans import Repair, ReplayOrder
from runhealth.storage.durable import write_whole
from runhealth.storage.errors import ConfigError, StoreError
from runhealth.storage.jsontext import parse_json
from runhealth.trainer.checkpoints import base_of
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.skips import SkipSet

ENVIRONMENT = "RUNHEALTH_LAUNCH"
PROGRESS_PREFIX = "@runhealth "  # rank 0 prints one JSON object behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """`checkpoint` is relative to `checkpoint_base`, empty for a start from scratch. `rollback` says that this attempt
    goes back by a plan: its repairs of state are made once, now; those of configuration at every launch."""

    run: str
    store: str
    run_path: str
    data_path: str
    attempt: int
    config: TrainConfig
    stop_step: int
    checkpoint: str = ""
    rollback: bool = False
    skips: SkipSet = field(default_factory=SkipSet)
    repairs: tuple[Repair, ...] = ()
    needed: tuple[str, ...] = ()  # checkpoints that must not be retired
    superseded: tuple[str, ...] = ()  # those of a past that a rollback left
    failed_ns: int = 0  # when the failure was found that this attempt follows; 0 for none
    replay: ReplayOrder | None = None  # this is no training, but a stretch of one once more

    @property
    def checkpoint_base(self) -> str:
        """What `checkpoint`, `needed` and `superseded` are relative to: a folder or an fsspec URL."""
        return base_of(self.config.checkpoint.target, self.run, self.run_path)

    def write(self, path: Path) -> None:
        raw = {
            "run": self.run,
            "store": self.store,
            "run_path": self.run_path,
            "data_path": self.data_path,
            "attempt": self.attempt,
            "config": self.config.to_json(),
            "stop_step": self.stop_step,
            "checkpoint": self.checkpoint,
            "rollback": self.rollback,
            "skips": self.skips.to_json(),
            "repairs": [asdict(repair) for repair in self.repairs],
            "needed": list(self.needed),
            "superseded": list(self.superseded),
            "failed_ns": self.failed_ns,
            "replay": self.replay.to_json() if self.replay is not None else None,
        }
        write_json(path, raw)

    @classmethod
    def read(cls, path: str) -> "LaunchSpec":
        raw: dict[str, Any] = json.loads(Path(path).read_text())
        return cls(
            **{
                **raw,
                "config": TrainConfig.from_json(raw["config"]),
                "skips": SkipSet.from_json(raw["skips"]),
                "repairs": tuple(Repair(**item) for item in raw["repairs"]),
                "needed": tuple(raw["needed"]),
                "superseded": tuple(raw["superseded"]),
                "replay": ReplayOrder.from_json(raw["replay"], path) if raw.get("replay") else None,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run has learned since it was created; `run.json` never changes, this does (`trainer.json`).

    `superseded` are checkpoints of a past that a rollback left; `applied` are (incident, checkpoint) pairs, so that
    the same rollback is never made twice. `origin` is the checkpoint of another run that this one began with, whole
    path or URL; empty for a run that began with nothing. `world`: the ranks that it has shrunk to; 0 for all.
    `returning` is the checkpoint of a rollback that was accepted while no attempt has begun with it yet.
    """

    skips: SkipSet = field(default_factory=SkipSet)
    repairs: tuple[Repair, ...] = ()
    superseded: tuple[str, ...] = ()
    applied: tuple[tuple[str, str], ...] = ()
    origin: str = ""
    world: int = 0
    returning: str = ""

    @classmethod
    def read(cls, run_path: str) -> "RunState":
        path = Path(run_path) / "trainer.json"
        if not path.exists():
            return cls()
        try:
            raw = parse_json(path.read_text())
            return cls(
                skips=SkipSet.from_json(raw["skips"]),
                repairs=tuple(Repair(**item) for item in raw["repairs"]),
                superseded=tuple(raw["superseded"]),
                applied=tuple((incident, checkpoint) for incident, checkpoint in raw["applied"]),
                origin=str(raw.get("origin", "")),
                world=int(raw.get("world", 0)),
                returning=str(raw.get("returning", "")),
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}: expected the trainer's state, met {type(error).__name__}: {error}") from error

    def write(self, run_path: str) -> None:
        """Raises StoreError where the disk does not take it."""
        path = Path(run_path) / "trainer.json"
        raw = {
            "skips": self.skips.to_json(),
            "repairs": [asdict(repair) for repair in self.repairs],
            "superseded": list(self.superseded),
            "applied": [list(pair) for pair in self.applied],
            "origin": self.origin,
            "world": self.world,
            "returning": self.returning,
        }
        try:
            write_json(path, raw)
        except OSError as error:
            raise StoreError(f"{path}: the trainer's state cannot be written: {error.strerror}") from error


def write_json(path: Path, raw: Mapping[str, object]) -> None:
    """Atomically, so that a reader sees the old or the new file, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(raw, indent=1).encode())
