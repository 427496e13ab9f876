"""Beginning a run with a checkpoint of another one. Importable without torch."""

from dataclasses import fields, replace
from pathlib import Path

from runhealth.storage.errors import ConfigError
from runhealth.storage.store import RunInfo
from runhealth.trainer import checkpoints
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.folders import join
from runhealth.trainer.launch import RunState

_LAYOUT_ONLY = frozenset({"precision"})  # what a checkpoint of the same model may differ in


def newest_of(origin: RunInfo, config: TrainConfig) -> str:
    """The newest verified checkpoint of a run, as a whole path or URL, for another run, of `config`, to begin with.

    Raises:
        ConfigError: it has none that verifies, it is of another model, or of the new run's end.
    """
    old = TrainConfig.from_json(origin.config, where=f"{origin.path}/run.json: config")
    base = checkpoints.base_of(old.checkpoint.target, origin.name, str(Path(origin.path).resolve()))
    found, failed = checkpoints.newest_verified(base, RunState.read(origin.path).superseded)
    if found is None:
        reasons = "".join(f"; {why}" for _, why in failed[:3])
        raise ConfigError(f"run {origin.name!r} has no checkpoint that verifies{reasons}")
    other = [
        f"{field.name} {getattr(old.model, field.name)} instead of {getattr(config.model, field.name)}"
        for field in fields(config.model)
        if field.name not in _LAYOUT_ONLY and getattr(old.model, field.name) != getattr(config.model, field.name)
    ]
    if other:
        raise ConfigError(f"--from {origin.name}: expected a run of the same model, met {', '.join(other)}")
    if found.step >= config.steps:
        raise ConfigError(
            f"--from {origin.name}: expected a checkpoint before the new run's end at step {config.steps}, met step"
            f" {found.step}; --steps goes further"
        )
    return join(base, found.path)


def begin_with(run: RunInfo, checkpoint: str) -> None:
    """Have a new run begin with this checkpoint, whatever layout saved it."""
    replace(RunState.read(run.path), origin=checkpoint).write(run.path)
