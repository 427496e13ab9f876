"""Bytes that one GPU sends in one step, and over which link.

Ring algorithms over n GPUs send, of a tensor of S bytes, 2(n-1)/n·S for an all-reduce and (n-1)/n·S for an all-gather
or a reduce-scatter. Ranks are placed with tensor parallel neighbours closest, then data parallel, then the stages.
"""

from dataclasses import dataclass

from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.layout import Layout
from runhealth.trainer.planner.memory import FP32_GRADIENT, GRADIENT, WEIGHT
from runhealth.trainer.planner.shape import ModelShape

ELEMENT = 2.0  # bf16 activations


def all_reduce(size_bytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * size_bytes


def all_gather(size_bytes: float, ranks: int) -> float:
    """Of the whole tensor's size; a reduce-scatter sends as much."""
    return (ranks - 1) / ranks * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What one kind of parallelism sends a step and GPU. `messages` counts collectives or sends."""

    kind: str
    what: str
    size_bytes: float
    link: str
    messages: int

    def seconds(self, cluster: Cluster) -> float:
        return self.size_bytes / cluster.bytes_s(self.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`gather` and `reduce` belong to data parallel: weights gathered, gradients reduced."""

    tensor: Flow
    gather: Flow
    reduce: Flow
    pipeline: Flow

    def flows(self) -> tuple[Flow, ...]:
        return tuple(f for f in (self.tensor, self.gather, self.reduce, self.pipeline) if f.size_bytes)


def traffic(
    shape: ModelShape, layout: Layout, cluster: Cluster, *, seq_len: int, fp32_gradients: bool = False
) -> Traffic:
    """Bytes a step. Tensor parallel: 4 all-reduces a layer and micro-batch, 2 forward and 2 backward, or the equal
    all-gather + reduce-scatter of sequence parallelism (arXiv:2205.05198). ZeRO-0: one all-reduce of the gradients;
    ZeRO-1 and 2: reduce-scatter and all-gather, as many bytes; ZeRO-3: weights are gathered for forward and backward of
    each micro-batch, and gradients reduced (arXiv:1910.02054, section 7)."""
    activation = ELEMENT * seq_len * layout.micro_batch * shape.width
    layers = -(-shape.layers // layout.pp)
    steps = layout.microbatches
    gradient = FP32_GRADIENT if fp32_gradients else GRADIENT
    held = shape.params if layout.pp == 1 else layers * shape.layer_params + shape.embedding_params
    held /= layout.tp
    reduces = steps if layout.zero >= 2 else 1
    if layout.zero == 0:
        reduced, gathered, gathers = all_reduce(gradient * held, layout.dp), 0.0, 0
    else:
        gathers = 2 * steps if layout.zero >= 3 else 1
        reduced = all_gather(gradient * held, layout.dp) * reduces
        gathered = all_gather(WEIGHT * held, layout.dp) * gathers
    dp_link = cluster.link(layout.tp * layout.dp)
    hops = 2 * steps * layout.interleave if layout.pp > 1 else 0
    return Traffic(
        tensor=Flow(
            kind="tensor parallel",
            what="activations of each layer, 4 x forward and backward",
            size_bytes=4 * layers * steps * all_reduce(activation, layout.tp),
            link=cluster.link(layout.tp),
            messages=4 * layers * steps if layout.tp > 1 else 0,
        ),
        gather=Flow(
            kind="data parallel",
            what="weights gathered" + (", twice a micro-batch" if layout.zero >= 3 else ", once a step"),
            size_bytes=gathered,
            link=dp_link,
            messages=gathers * layers,
        ),
        reduce=Flow(
            kind="data parallel",
            what="gradients reduced" + (", each micro-batch" if layout.zero >= 2 else ", once a step"),
            size_bytes=reduced,
            link=dp_link,
            messages=reduces * layers if layout.dp > 1 else 0,
        ),
        pipeline=Flow(
            kind="pipeline",
            what="activations and their gradients at the stage boundary",
            size_bytes=hops * activation / layout.tp,
            link="nvlink" if cluster.nodes == 1 else "network",
            messages=hops,
        ),
    )
