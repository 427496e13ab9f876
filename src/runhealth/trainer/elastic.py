"""Going on with fewer ranks: the config of the attempts that follow when ranks are lost for good. Without torch.

Only data parallelism shrinks; a pipeline and tensor parallelism keep their sizes. The samples of a step stay exactly
the same (`data.BatchPlan` keeps its streams), so learning-rate schedule, consumed samples and skips go on as they were,
and the gradient is the mean over the same rows: the curve of the loss goes on, up to the order of sums. Each rank takes
more rows, in more micro-batches, none larger than before: memory for activations does not grow.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from runhealth.storage.errors import ConfigError
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan
from runhealth.trainer.fault import FaultContext, create


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """`dropped` are names of faults that were bound to a rank that is gone."""

    config: TrainConfig
    dropped: tuple[str, ...] = ()


def shrink(config: TrainConfig, room: int, least: int, gone: Collection[int]) -> Shrunk | None:
    """The largest layout of fewer data-parallel ranks that fits into `room` ranks, has at least `least`, and divides
    the samples of a step into equal parts; None if there is none. `gone` are the ranks that are lost: faults for drills
    go with them, or with the rank's new number."""
    together = config.parallel.tp * config.parallel.pp
    samples = config.dp * config.data.batch_size
    for dp in range(min(room // together, config.dp - 1), 0, -1):
        if dp * together < least:
            return None
        if samples % dp:
            continue
        batch = samples // dp
        parts = microbatches(config, batch)
        try:
            smaller = replace(
                config,
                world=dp * together,
                data=replace(config.data, batch_size=batch, stream_size=config.data.stream),
                parallel=replace(config.parallel, microbatches=parts),
                faults=(),
            )
        except ConfigError:
            continue  # the replicas of HSDP do not divide it, for one
        return _with_faults(smaller, config, gone)
    return None


def check_least(config: TrainConfig, least: int) -> None:
    """Raises ConfigError where a world could never shrink and keep so many ranks: better said now than when a rank is
    lost."""
    largest = shrink(config, config.world - 1, 1, ())
    if largest is None:
        together = config.parallel.tp * config.parallel.pp
        raise ConfigError(
            f"--min-world: this run cannot shrink: its {config.world} ranks are {config.dp} data-parallel"
            f" {'rank' if config.dp == 1 else 'ranks'} of {together} for tensor and pipeline parallelism, and no fewer"
            " data-parallel ranks divide the work"
        )
    if largest.config.world < least:
        raise ConfigError(
            f"--min-world: expected at most {largest.config.world}, the next smaller world of this run's"
            f" {config.world} ranks, met {least}"
        )


def microbatches(config: TrainConfig, batch: int) -> int:
    """The fewest equal parts of `batch` rows that are no larger than a micro-batch is now."""
    parallel = config.parallel
    now = config.data.batch_size // parallel.microbatches
    step = parallel.pp if parallel.schedule == "interleaved" else 1
    return next(n for n in range(step, batch * step + 1, step) if (batch % n == 0 and batch // n <= now) or n > batch)


def _with_faults(smaller: TrainConfig, config: TrainConfig, gone: Collection[int]) -> Shrunk:
    left = [rank for rank in range(config.world) if rank not in gone]
    numbers = {rank: number for number, rank in enumerate(left[: smaller.world])}
    plan = BatchPlan(data=smaller.data, seed=smaller.seed, world=smaller.dp)
    before = BatchPlan(data=config.data, seed=config.seed, world=config.dp)
    kept, dropped = [], []
    for spec in config.faults:
        fault = create(spec, FaultContext(config=config, plan=before, rank=0))
        rank, made = spec.params.get("rank"), spec
        if isinstance(rank, int) and rank >= 0 and not fault.label().shards:  # a machine's; of a shard it is the stream
            if rank not in numbers:
                dropped.append(spec.name)
                continue
            made = FaultSpec(name=spec.name, params={**spec.params, "rank": numbers[rank]})
        try:
            create(made, FaultContext(config=smaller, plan=plan, rank=0))
        except ConfigError:
            dropped.append(spec.name)
        else:
            kept.append(made)
    return Shrunk(config=replace(smaller, faults=tuple(kept)), dropped=tuple(dropped))


def describe(before: TrainConfig, after: TrainConfig) -> str:
    """One line for people."""
    samples = after.dp * after.data.batch_size
    lanes = "1 data-parallel rank" if after.dp == 1 else f"{after.dp} data-parallel ranks"
    return (
        f"the world shrinks from {before.world} to {after.world} rank{'s' if after.world > 1 else ''}: {lanes} of"
        f" {after.data.batch_size} samples for {before.dp} of {before.data.batch_size}, the same {samples} a step"
    )
