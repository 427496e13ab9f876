"""What a training run is: keyword-only dataclasses, checked once, kept as JSON with the run so that it can be resumed
by name. Importable without torch."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runhealth.storage.errors import ConfigError
from runhealth.trainer.data import DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`precision` rules the linear layers of the blocks; embedding, norms and head are always fp32."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    ffn_width: int = 160
    precision: Literal["fp32", "fp8"] = "fp32"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "ffn_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model: expected {name} >= 1, met {getattr(self, name)}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(f"model: expected width to be an even multiple of heads {self.heads}, met {self.width}")
        if self.precision not in ("fp32", "fp8"):
            raise ConfigError(f"model: expected precision fp32 or fp8, met {self.precision!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to `lr * min_lr_ratio` at step `horizon` (0: the end of the run)."""

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    warmup_steps: int = 40
    min_lr_ratio: float = 0.1
    horizon: int = 0
    clip_threshold: float = 1.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optim: expected lr > 0, met {self.lr}")
        if not self.clip_threshold > 0:
            raise ConfigError(f"optim: expected clip_threshold > 0, met {self.clip_threshold}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint after every `every` steps. `keep` newest verified generations stay on disk (at least 2); 0 keeps
    all."""

    every: int = 25
    keep: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpoint: expected every >= 1, met {self.every}")
        if self.keep == 1 or self.keep < 0:
            raise ConfigError(f"checkpoint: expected keep 0 (all) or >= 2 generations, met {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A fault to inject: its name in `trainer/faults/` and its parameters."""

    name: str
    params: Mapping[str, float | int | str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """From the command line: `bad_shard:step=240,rank=1,mode=noise`."""
        name, _, rest = text.partition(":")
        params: dict[str, float | int | str] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"fault {text!r}: expected name:key=value,…, met {item!r}")
            params[key.strip()] = _number_or_text(value.strip())
        return cls(name=name.strip(), params=params)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One run. `world` counts data-parallel ranks, `steps` optimizer steps."""

    steps: int
    seed: int = 1
    world: int = 2
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval_every: int = 50
    eval_samples: int = 256
    layers_every: int = 10  # layer samples are recorded every so many steps
    updates_every: int = 1  # update ratio and weight norm likewise
    timeout_s: float = 60.0  # of collectives: a hang longer than this ends the attempt
    faults: tuple[FaultSpec, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "world", "eval_every", "eval_samples", "layers_every", "updates_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"config: expected {name} >= 1, met {getattr(self, name)}")
        if self.data.shards < self.world:
            raise ConfigError(f"config: expected at least one shard a rank, met {self.data.shards} for {self.world}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: object, where: str = "config") -> "TrainConfig":
        """Raises ConfigError that names the field."""
        built = _decode(cls, raw, where)
        assert isinstance(built, cls)
        return built


def _number_or_text(value: str) -> float | int | str:
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _decode(kind: Any, raw: object, where: str) -> Any:
    """Build `kind` out of JSON values; every mismatch is a ConfigError that says where."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: expected an object, met {raw!r}")
        hints = typing.get_type_hints(kind)
        unknown = set(raw) - set(hints)
        if unknown:
            raise ConfigError(f"{where}: unknown field {sorted(unknown)[0]!r}; known are {', '.join(hints)}")
        try:
            return kind(**{key: _decode(hints[key], value, f"{where}.{key}") for key, value in raw.items()})
        except TypeError as error:
            raise ConfigError(f"{where}: {error}") from error
    origin = typing.get_origin(kind)
    if origin is tuple:
        if not isinstance(raw, list | tuple):
            raise ConfigError(f"{where}: expected a list, met {raw!r}")
        return tuple(_decode(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if origin is Literal:
        if raw not in typing.get_args(kind):
            raise ConfigError(f"{where}: expected one of {typing.get_args(kind)}, met {raw!r}")
        return raw
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: expected an object, met {raw!r}")
        return {str(key): value for key, value in raw.items()}
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if float in allowed:
        allowed = (*allowed, int)
    if isinstance(raw, bool) or not isinstance(raw, tuple(allowed)):
        raise ConfigError(f"{where}: expected {getattr(kind, '__name__', kind)}, met {raw!r}")
    return float(raw) if kind is float and isinstance(raw, int) else raw
