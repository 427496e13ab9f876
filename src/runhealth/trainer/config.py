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

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp8_torchao"]
LOW_PRECISION_BACKENDS = ("fp8", "fp8_torchao")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`precision` rules the linear layers and the attention of the blocks; embedding, norms, residual stream, head and
    loss are always fp32, and so are master weights, gradients, their reduction and the optimizer's moments. `fp8` is
    delayed scaling of our own, `fp8_torchao` torchao's dynamic one.

    `fused` keeps query, key and value in one matrix, and gate and up in another: tensor parallelism needs them apart.
    `experts` makes the feed-forward part of each block a mixture of so many, of `ffn_width` each; 0 for none.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    ffn_width: int = 160
    precision: Precision = "fp32"
    fused: bool = True
    experts: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "ffn_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model: expected {name} >= 1, met {getattr(self, name)}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(f"model: expected width to be an even multiple of heads {self.heads}, met {self.width}")
        _one_of("model: expected precision", self.precision, Precision)
        if self.experts < 0 or self.experts == 1:
            raise ConfigError(f"model: expected experts 0 (none) or >= 2, met {self.experts}")
        if self.experts and self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"model: experts expect precision fp32 or bf16, met {self.precision}")


DataParallel = Literal["ddp", "zero1", "zero2", "zero3", "hsdp"]
Schedule = Literal["gpipe", "1f1b", "interleaved"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work. Ranks are numbered with tensor parallelism innermost and the pipeline outermost;
    data parallelism takes what is left of the world.

    kind             ddp (replicas), zero1 (optimizer sharded), zero2 (and gradients), zero3 (and parameters), or hsdp:
                     zero3 within `replicas` groups, replicas between them
    tp               ranks that share every layer, with sequence parallelism between the matrices
    pp               ranks in a pipeline, `stages_per_rank` stages on each (more than one: interleaved)
    microbatches     parts that a rank's batch of one step is cut into: they fill the pipeline, and without one their
                     gradients are accumulated before the reduce
    recompute        activations made anew in the backward pass: none, selective (all but the results of matrix
                     products and attention) or full (a block keeps its input only)
    """

    kind: DataParallel = "ddp"
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "replicas", "microbatches", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel: expected {name} >= 1, met {getattr(self, name)}")
        _one_of("parallel: expected kind", self.kind, DataParallel)
        _one_of("parallel: expected schedule", self.schedule, Schedule)
        _one_of("parallel: expected recompute", self.recompute, Recompute)
        if (self.replicas > 1) != (self.kind == "hsdp"):
            raise ConfigError(
                f"parallel: hsdp needs replicas > 1 and nothing else does, met {self.kind} {self.replicas}"
            )
        interleaved = self.schedule == "interleaved"
        if (self.stages_per_rank > 1) != interleaved:
            raise ConfigError(
                f"parallel: schedule interleaved needs stages_per_rank > 1 and the others 1, met {self.schedule}"
                f" with {self.stages_per_rank}"
            )
        if interleaved and self.pp == 1:
            raise ConfigError("parallel: schedule interleaved needs pp > 1, met 1")
        if self.pp > 1 and self.microbatches < self.pp:
            raise ConfigError(
                f"parallel: expected at least as many microbatches as pipeline ranks, met {self.microbatches}"
                f" for {self.pp}"
            )
        if interleaved and self.microbatches % self.pp:
            raise ConfigError(
                f"parallel: interleaved expects microbatches to be a multiple of pp {self.pp}, met {self.microbatches}"
            )

    @property
    def stages(self) -> int:
        """Pipeline stages in all."""
        return self.pp * self.stages_per_rank

    @property
    def shards_state(self) -> bool:
        """Whether FSDP holds the state: parameters, gradients and moments are sharded over the data-parallel ranks."""
        return self.kind in ("zero2", "zero3", "hsdp")


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
    """A checkpoint after every `every` steps; 0: as often as the measured cost of a save and the mean time between
    failures of the job, `mtbf_h` hours, make it best. `keep` newest verified generations stay (at least 2); 0 keeps
    all. `background`: training goes on while files are written. `target`: an fsspec URL or folder that holds the
    checkpoints of all runs, each under its run's name; empty for the run's own folder."""

    every: int = 25
    keep: int = 0
    background: bool = False
    mtbf_h: float = 0.0
    target: str = ""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"checkpoint: expected every >= 1, or 0 for the best interval, met {self.every}")
        if not (self.mtbf_h >= 0 and self.mtbf_h != float("inf")):
            raise ConfigError(f"checkpoint: expected mtbf_h >= 0 hours, met {self.mtbf_h}")
        if not self.every and not self.mtbf_h:
            raise ConfigError("checkpoint: every 0 needs mtbf_h, the hours between two failures of the job")
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
    """One run. `world` counts ranks, `steps` optimizer steps. The ranks that share a batch (a pipeline times tensor
    parallelism) are one data-parallel rank; `dp` counts these."""

    steps: int
    seed: int = 1
    world: int = 2
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
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
        check_layout(self)

    @property
    def dp(self) -> int:
        """Data-parallel ranks: how many different batches a step has."""
        return self.world // (self.parallel.tp * self.parallel.pp)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: object, where: str = "config") -> "TrainConfig":
        """Raises ConfigError that names the field."""
        built = _decode(cls, raw, where)
        assert isinstance(built, cls)
        return built


def check_layout(config: TrainConfig) -> None:
    """Raises ConfigError where the layout does not fit the world, the model or the data."""
    parallel, model, data, world = config.parallel, config.model, config.data, config.world
    if world % (parallel.tp * parallel.pp):
        raise ConfigError(
            f"config: expected world to be a multiple of tp x pp = {parallel.tp * parallel.pp}, met {world}"
        )
    if config.dp % parallel.replicas:
        raise ConfigError(f"config: expected {config.dp} data-parallel ranks in {parallel.replicas} equal replicas")
    streams = config.dp * data.batch_size // data.stream
    if data.shards < streams:
        raise ConfigError(f"config: expected at least one shard a rank, met {data.shards} for {streams}")
    if data.batch_size % parallel.microbatches:
        raise ConfigError(
            f"config: expected batch_size {data.batch_size} to be a multiple of microbatches {parallel.microbatches}"
        )
    if model.layers < parallel.stages:
        raise ConfigError(f"config: expected a layer a pipeline stage, met {model.layers} for {parallel.stages} stages")
    if model.experts and (parallel.tp > 1 or parallel.pp > 1 or parallel.recompute != "none"):
        raise ConfigError("config: experts do not go with tensor or pipeline parallelism, nor with recomputation")
    if parallel.tp == 1:
        return
    if model.fused:
        raise ConfigError("config: tensor parallelism needs model.fused = False: a fused matrix cannot be cut by heads")
    if model.precision in LOW_PRECISION_BACKENDS:
        raise ConfigError(f"config: {model.precision} does not work with tensor parallelism; use fp32, bf16 or fp16")
    if config.dp > 1 and not parallel.shards_state:
        raise ConfigError(f"config: tensor parallelism needs zero2, zero3 or hsdp beside it, met {parallel.kind}")
    for name, value in (("heads", model.heads), ("ffn_width", model.ffn_width), ("seq_len", data.seq_len)):
        if value % parallel.tp:
            raise ConfigError(f"config: expected {name} {value} to be a multiple of tp {parallel.tp}")


def _one_of(what: str, met: object, kind: Any) -> None:
    known = typing.get_args(kind)
    if met not in known:
        raise ConfigError(f"{what} out of {', '.join(known)}, met {met!r}")


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
    if kind is bool and isinstance(raw, bool):
        return raw
    if float in allowed:
        allowed = (*allowed, int)
    if isinstance(raw, bool) or not isinstance(raw, tuple(allowed)):
        raise ConfigError(f"{where}: expected {getattr(kind, '__name__', kind)}, met {raw!r}")
    return float(raw) if kind is float and isinstance(raw, int) else raw
