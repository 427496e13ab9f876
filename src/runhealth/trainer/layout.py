"""Where a rank stands in the layout: plain arithmetic, importable without torch."""

from dataclasses import dataclass

from runhealth.trainer.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Coordinates of one rank, each counted from 0. `dp` is `replica` x ranks of a shard group + `shard`."""

    pp: int
    dp: int
    tp: int
    replica: int
    shard: int


def dimensions(config: TrainConfig) -> dict[str, int]:
    """Sizes by name, outermost first: `pp`, `replica`, `shard`, `tp`. Their product is the world."""
    parallel = config.parallel
    return {
        "pp": parallel.pp,
        "replica": parallel.replicas,
        "shard": config.dp // parallel.replicas,
        "tp": parallel.tp,
    }


def place(config: TrainConfig, rank: int) -> Place:
    """Tensor-parallel ranks are neighbours, since they talk most; the stages of a pipeline, which talk least, are
    farthest apart."""
    sizes = dimensions(config)
    rest, tp = divmod(rank, sizes["tp"])
    rest, shard = divmod(rest, sizes["shard"])
    pp, replica = divmod(rest, sizes["replica"])
    return Place(pp=pp, dp=replica * sizes["shard"] + shard, tp=tp, replica=replica, shard=shard)


def stages_of(config: TrainConfig, pp: int) -> tuple[int, ...]:
    """The stages of a pipeline rank: its own number, and every `pp`-th after it where stages are interleaved."""
    return tuple(range(pp, config.parallel.stages, config.parallel.pp))


def layers_of(config: TrainConfig, stage: int) -> range:
    """The blocks of a stage: as equal as can be, the earlier stages have one more."""
    each, more = divmod(config.model.layers, config.parallel.stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def loss_ranks(config: TrainConfig) -> tuple[int, ...]:
    """The ranks that know a loss: those of the last stage."""
    last = config.parallel.pp - 1
    return tuple(rank for rank in range(config.world) if place(config, rank).pp == last)


def describe(config: TrainConfig) -> str:
    """One line for people, such as `8 ranks: pp 2 x zero3 2 x tp 2, 1f1b with 4 micro-batches, bf16`."""
    parallel, sizes = config.parallel, dimensions(config)
    data = f"hsdp {sizes['replica']}x{sizes['shard']}" if parallel.kind == "hsdp" else f"{parallel.kind} {config.dp}"
    if config.dp == 1 and config.world > 1:
        data = ""
    parts = [f"pp {parallel.pp}" if parallel.pp > 1 else "", data, f"tp {parallel.tp}" if parallel.tp > 1 else ""]
    line = f"{config.world} rank{'s' if config.world > 1 else ''}: {' x '.join(filter(None, parts))}"
    if parallel.pp > 1:
        stages = f" over {parallel.stages} stages" if parallel.stages_per_rank > 1 else ""
        line += f", {parallel.schedule}{stages} with {parallel.microbatches} micro-batches"
    elif parallel.microbatches > 1:
        line += f", {parallel.microbatches} micro-batches accumulated"
    if parallel.recompute != "none":
        line += f", {parallel.recompute} recomputation"
    return f"{line}, {config.model.precision}"
