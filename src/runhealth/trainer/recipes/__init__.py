"""Recipes: each file holds a function `config()` that returns a `TrainConfig`. A run is Python, not a format."""

import importlib
import pkgutil

from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import TrainConfig


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> TrainConfig:
    """Raises ConfigError for an unknown recipe; `-` and `_` are the same."""
    wanted = name.replace("-", "_")
    if wanted not in names():
        raise ConfigError(f"recipe {name!r}: expected one of {', '.join(names())}")
    config = importlib.import_module(f"{__name__}.{wanted}").config()
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"recipe {name!r}: expected config() to return a TrainConfig, met {type(config).__name__}")
    return config
