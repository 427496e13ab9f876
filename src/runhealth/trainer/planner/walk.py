"""From one GPU upwards: what does not fit and by how much, what holds the step up, and what the next choice buys.

Each family allows one thing more than the one before. Within a family the fastest layout that fits stands for it; if
none fits, the one that misses by least.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from runhealth.storage.errors import ConfigError
from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.estimate import Estimate, Job, estimate
from runhealth.trainer.planner.layout import Layout, Recompute

MICRO_BATCHES = (1, 2, 4, 8)
INTERLEAVES = (1, 2, 4)
WORTH = 0.02  # a family is preferred to a simpler one if it is faster by more than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`zeros`, tensor-parallel sizes up to `most_tp`, stages up to `most_pp`."""

    name: str
    buys: str  # what it changes against the family before
    zeros: tuple[int, ...]
    most_tp: int = 1
    most_pp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One stop of the walk: the best layout of a family, None where the batch has too few sequences for any."""

    family: Family
    best: Estimate | None
    fitting: int  # layouts of the family that fit
    looked_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    job: Job
    cluster: Cluster
    stops: tuple[Stop, ...]
    chosen: Estimate | None  # None: nothing fits
    wider: Estimate | None  # the chosen layout with tensor parallel across nodes


def families(job: Job, cluster: Cluster) -> tuple[Family, ...]:
    node = cluster.gpus_per_node
    stages = job.shape.layers
    return (
        Family(name="data parallel", buys="more samples a second; each GPU holds everything", zeros=(0,)),
        Family(name="ZeRO-1", buys="optimizer state is shared: 12 of 16 bytes divided by the GPUs", zeros=(1,)),
        Family(name="ZeRO-2", buys="gradients are shared too: 14 of 16 bytes", zeros=(2,)),
        Family(name="ZeRO-3 (FSDP)", buys="weights are shared too: all 16 bytes, for 1.5 x the traffic", zeros=(3,)),
        Family(
            name="tensor parallel in the node",
            buys="layers are shared: state and activations divided, fewer samples in flight",
            zeros=(0, 1, 2, 3),
            most_tp=node,
        ),
        Family(
            name="pipeline over the nodes",
            buys="stages of layers: state divided by the stages, only activations cross the network",
            zeros=(0, 1),
            most_tp=node,
            most_pp=stages,
        ),
    )


def walk(job: Job, cluster: Cluster) -> Walk:
    """Raises ConfigError when no layout can be laid at all: too few sequences a step, whatever the split."""
    stops: list[Stop] = []
    for family in families(job, cluster):
        found = [estimate(job, layout, cluster) for layout in layouts(job, cluster, family)]
        fitting = [e for e in found if e.fits]
        best = (
            min(fitting, key=_speed) if fitting else min(found, key=lambda e: (e.memory.total, _speed(e)), default=None)
        )
        stops.append(Stop(family=family, best=best, fitting=len(fitting), looked_at=len(found)))
    if not any(stop.looked_at for stop in stops):
        raise ConfigError(_no_layout(job, cluster))
    chosen: Estimate | None = None
    for stop in stops:
        if stop.fitting and stop.best and (chosen is None or stop.best.step_s < chosen.step_s * (1 - WORTH)):
            chosen = stop.best
    return Walk(job=job, cluster=cluster, stops=tuple(stops), chosen=chosen, wider=_wider(job, cluster, chosen))


def layouts(job: Job, cluster: Cluster, family: Family) -> Iterator[Layout]:
    """All layouts of a family that use every GPU, with equal work for each."""
    shape = job.shape
    recomputes: tuple[Recompute, ...] = ("none", "selective", "full")
    for tp, pp in _splits(job, cluster, family):
        dp = cluster.gpus // (tp * pp)
        for zero, micro_batch in itertools.product(family.zeros, MICRO_BATCHES):
            count, rest = divmod(job.sequences, dp * micro_batch)
            if rest or not count or (zero and dp == 1):
                continue
            for interleave, recompute in itertools.product(INTERLEAVES, recomputes):
                if interleave > 1 and (pp == 1 or count % pp or shape.layers % (pp * interleave)):
                    continue
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    zero=zero,
                    micro_batch=micro_batch,
                    microbatches=count,
                    interleave=interleave,
                    recompute=recompute,
                )


def _splits(job: Job, cluster: Cluster, family: Family) -> Iterator[tuple[int, int]]:
    """Tensor-parallel and pipeline sizes of a family that divide the model and the GPUs."""
    for tp in _powers(family.most_tp):
        if job.shape.heads % tp or cluster.gpus % tp:
            continue
        for pp in _powers(min(family.most_pp, cluster.gpus // tp)):
            if cluster.gpus % (tp * pp) or (pp > 1 and -(-job.shape.layers // pp) * (pp - 1) >= job.shape.layers):
                continue
            yield tp, pp


def _no_layout(job: Job, cluster: Cluster) -> str:
    """Why the sequences of a step can be dealt to no number of replicas, and what to change."""
    found = {cluster.gpus // (tp * pp) for family in families(job, cluster) for tp, pp in _splits(job, cluster, family)}
    least = min(found)
    met = f"met {job.sequences} sequences of {job.seq_len} tokens a step for {cluster.gpus} GPUs"
    if job.sequences < least:
        return (
            f"expected at least one sequence a replica, {met} with {job.shape.layers} layers, which make {least}"
            f" replicas or more: enlarge --batch-tokens to {least * job.seq_len} or above, or take fewer GPUs"
        )
    below = job.sequences // least * least * job.seq_len
    return (
        f"expected as many sequences for every replica, {met}, which make"
        f" {' or '.join(map(str, sorted(found)))} replicas: --batch-tokens {below} or"
        f" {below + least * job.seq_len} divides equally; or choose another number of GPUs"
    )


def _wider(job: Job, cluster: Cluster, chosen: Estimate | None) -> Estimate | None:
    """The chosen layout with its tensor parallel group made to reach into a second node, data parallel giving way."""
    if chosen is None or cluster.nodes < 2:
        return None
    old = chosen.layout
    tp = 2 * cluster.gpus_per_node
    if job.shape.heads % tp or cluster.gpus % (tp * old.pp):
        return None
    dp = cluster.gpus // (tp * old.pp)
    count, rest = divmod(job.sequences, dp * old.micro_batch)
    if rest or not count:
        return None
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=old.pp,
        zero=old.zero if dp > 1 else 0,
        micro_batch=old.micro_batch,
        microbatches=count,
        interleave=old.interleave,
        recompute=old.recompute,
    )
    return estimate(job, layout, cluster)


def _speed(found: Estimate) -> tuple[float, int, int]:
    """The fastest first; of equally fast ones the one that splits less."""
    return (found.step_s, found.layout.tp * found.layout.pp, found.layout.interleave)


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
