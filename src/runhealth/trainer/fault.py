"""What a fault can touch, and the registry of all faults. Importable without torch."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from runhealth.storage.errors import ConfigError
from runhealth.trainer import faults as _folder
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultLabel:
    """The truth about an injected fault. `cause` is the suspect that a diagnosis should name. Steps are inclusive;
    `last_step` is None for a fault that stays."""

    fault: str
    cause: str
    onset_step: int
    last_step: int | None
    ranks: tuple[int, ...]
    shards: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultContext:
    """What a fault may know before training starts. `plan` is the data plan without any skip."""

    config: TrainConfig
    plan: BatchPlan
    rank: int


class Fault:
    """Base of all faults. The hooks do nothing here; each fault overrides those it needs.

    Every hook is a function of the step, so a fault acts alike after a resume. `repaired_by` names the repairs of a
    rollback plan that take the fault away.
    """

    name: ClassVar[str]
    repaired_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: FaultContext) -> None:
        self.context = context

    def label(self) -> FaultLabel:
        raise NotImplementedError

    def tamper(self, shard: str, blob: bytes) -> bytes:
        """Change a shard's bytes on their way from the disk."""
        del shard
        return blob

    def learning_rate(self, step: int, lr: float) -> float:
        """Change the scheduled learning rate."""
        del step
        return lr

    def before_step(self, step: int, model: "nn.Module") -> None:
        """Change the model before the forward pass."""

    def after_backward(self, step: int, model: "nn.Module") -> None:
        """Change the reduced gradients before they are measured and clipped."""


@cache
def registry() -> Mapping[str, type[Fault]]:
    """All faults by name; a file that does not keep to the rules is an error when it is loaded, not when it fires."""
    found: dict[str, type[Fault]] = {}
    for module in pkgutil.iter_modules(_folder.__path__):
        kind = getattr(importlib.import_module(f"{_folder.__name__}.{module.name}"), "FAULT", None)
        if not (isinstance(kind, type) and issubclass(kind, Fault) and kind.name == module.name):
            raise ConfigError(f"trainer/faults/{module.name}.py: expected FAULT, a Fault named {module.name!r}")
        found[kind.name] = kind
    return found


def create(spec: FaultSpec, context: FaultContext) -> Fault:
    """Raises ConfigError for an unknown fault or parameter."""
    kind = registry().get(spec.name)
    if kind is None:
        raise ConfigError(f"fault {spec.name!r}: expected one of {', '.join(sorted(registry()))}")
    hints = {
        key: hint for key, hint in typing.get_type_hints(kind.__init__).items() if key not in ("context", "return")
    }
    for key, value in spec.params.items():
        if key not in hints:
            raise ConfigError(f"fault {spec.name}: unknown parameter {key!r}; known are {', '.join(hints)}")
        allowed = (int, float) if hints[key] is float else (hints[key],)
        if not isinstance(value, allowed):
            raise ConfigError(f"fault {spec.name}: expected {key} as {hints[key].__name__}, met {value!r}")
    return kind(context, **spec.params)
