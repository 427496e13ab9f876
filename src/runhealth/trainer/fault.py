"""What a fault can touch, and the registry of all faults. Importable without torch."""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from runhealth.storage.errors import ConfigError
from runhealth.storage.records import Scalar
from runhealth.trainer import faults as _folder
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan, Part

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Phase = Literal["data", "forward", "backward", "comm", "gc", "checkpoint"]
End = Literal["", "dead", "hang"]


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

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole model, whose gradients are reduced in buckets."""
        parallel = self.config.parallel
        return parallel.pp == 1 and parallel.tp == 1 and not parallel.shards_state


class Fault:
    """Base of all faults. The hooks do nothing here; each fault overrides those it needs.

    There is one instance a rank. Every hook is a function of the step, so a fault acts alike after a resume.
    `repaired_by` names the repairs of a rollback plan that take the fault away. `splits` says that the weights of the
    labelled ranks may come to differ from those of the others: a simulation that shares the weights of all replicas has
    to keep theirs apart. `transient`: the fault stands for something a machine did once and would not do again if the
    same steps were computed anew, so a replay leaves it out; faults of data, config, weights or numbers happen again.
    `loss_scale` is what the loss of the step is multiplied with before the backward pass; it is set before
    `before_step`.
    """

    name: ClassVar[str]
    repaired_by: ClassVar[tuple[str, ...]] = ()
    splits: ClassVar[bool] = False
    transient: ClassVar[bool] = False

    def __init__(self, context: FaultContext) -> None:
        self.context = context
        self.loss_scale = 1.0

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

    def attach(self, model: "nn.Module") -> None:
        """Once, before the first step: put hooks on modules and parameters. A hook on a parameter sees the gradient of
        this rank before the reduce."""

    def after_load(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        """Change what a resume has loaded; `step` is the first one of the new attempt."""

    def parts(self, step: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Change which samples this rank reads."""
        del step
        return parts

    def tokens(self, step: int, inputs: "Tensor", labels: "Tensor") -> tuple["Tensor", "Tensor"]:
        """Change the batch of this rank, int64 [batch, seq] each, after it was read."""
        del step
        return inputs, labels

    def gain(self, step: int, gain: "Tensor") -> "Tensor":
        """Change the floating-point input of this rank's batch, float32 [batch]: what the embedded tokens of each
        sample are multiplied with. It is 1 where nothing is wrong."""
        del step
        return gain

    def heldout(self, step: int, tokens: "Tensor") -> "Tensor":
        """Change what is evaluated, int64 [samples, seq + 1]."""
        del step
        return tokens

    def before_step(self, step: int, model: "nn.Module") -> None:
        """Change the model before the forward pass."""

    def reduced(self, step: int, bucket: int, buffer: "Tensor") -> None:
        """Change, in place, what the reduce has given this rank: `buffer` (elements,) holds the gradients of one
        bucket. Called in replicated layouts only; what acts on the gradients of the others is `after_backward`."""

    def after_backward(self, step: int, model: "nn.Module") -> None:
        """Change the reduced gradients before they are measured and clipped."""

    def before_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        """Change the clipped gradients, the weights or the optimizer, right before its step; what changes here does
        not count as part of the update."""

    def after_optimizer(self, step: int, model: "nn.Module", optimizer: "Optimizer") -> None:
        """Change what the optimizer has done."""

    def stall_s(self, step: int, phase: Phase) -> float:
        """Seconds by which this rank takes longer in a phase: the loop sleeps them, a simulated clock adds them."""
        del step, phase
        return 0.0

    def held_bytes(self, step: int) -> int:
        """Memory that is held from here on and should not be."""
        del step
        return 0

    def ends(self, step: int) -> End:
        """How this rank's process ends before the step: killed, or stuck for good."""
        del step
        return ""

    def logged(self, step: int, values: dict[str, Scalar]) -> dict[str, Scalar]:
        """Change what is written about the step, not what happened in it."""
        del step
        return values


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
