"""One layout's step time, term by term, so that the largest can be named.

A model of the first order, for comparing layouts: compute at a fixed share of the peak; tensor-parallel traffic stands
in the way of compute; data-parallel traffic hides behind the backward (and forward) pass of one micro-batch; the
pipeline stretches everything by its bubble.
"""

from dataclasses import dataclass

from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.layout import Layout
from runhealth.trainer.planner.memory import GpuBytes, gpu_bytes
from runhealth.trainer.planner.shape import ModelShape
from runhealth.trainer.planner.traffic import Traffic, traffic

# Assumptions, printed with every plan.
KERNEL_EFFICIENCY = 0.6  # of the peak that matrix kernels reach when nothing is in their way
RESERVE = 0.10  # of GPU memory, for the CUDA context, communication buffers and fragmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What shall be trained. `batch_tokens` counts the tokens of one optimizer step over all GPUs."""

    shape: ModelShape
    seq_len: int
    batch_tokens: float
    fp32_gradients: bool = False

    @property
    def sequences(self) -> int:
        return max(1, round(self.batch_tokens / self.seq_len))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Seconds of a step. They add to the step."""

    compute: float
    recompute: float
    tensor_parallel: float
    data_parallel: float
    pipeline_sends: float
    bubble: float

    @property
    def step(self) -> float:
        return (
            self.compute
            + self.recompute
            + self.tensor_parallel
            + self.data_parallel
            + self.pipeline_sends
            + self.bubble
        )

    def named(self) -> tuple[tuple[str, float], ...]:
        """What is lost, the largest first. Compute is not a loss."""
        losses = [
            ("recomputation", self.recompute),
            ("tensor-parallel traffic", self.tensor_parallel),
            ("data-parallel traffic", self.data_parallel),
            ("pipeline sends", self.pipeline_sends),
            ("pipeline bubble", self.bubble),
        ]
        return tuple(sorted(losses, key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    layout: Layout
    memory: GpuBytes
    traffic: Traffic
    terms: Terms
    step_s: float
    mfu: float
    tokens_s: float
    budget_bytes: float  # of GPU memory, less the reserve

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget_bytes

    @property
    def over_bytes(self) -> float:
        """By how much it does not fit; negative: what is left."""
        return self.memory.total - self.budget_bytes

    @property
    def bottleneck(self) -> str:
        if not self.fits:
            part = "activations" if self.memory.activations > self.memory.state.total else "model state"
            return f"memory ({part})"
        name, seconds = self.terms.named()[0]
        return name if seconds > 0.05 * self.terms.step else "compute"


def estimate(job: Job, layout: Layout, cluster: Cluster) -> Estimate:
    shape = job.shape
    model_flops = shape.flops_a_token(job.seq_len) * job.sequences * job.seq_len
    compute = model_flops / (layout.gpus * cluster.peak_flops * KERNEL_EFFICIENCY)
    recompute = compute * _recomputed_share(job, layout)
    moved = traffic(shape, layout, cluster, seq_len=job.seq_len, fp32_gradients=job.fp32_gradients)
    tensor = moved.tensor.seconds(cluster)
    busy = compute + recompute + tensor
    bubble = busy * (layout.pp - 1) / (layout.interleave * layout.microbatches)
    sends = 0.0
    if layout.pp > 1:  # a send waits only while the pipeline fills and drains
        sends = 2 * (layout.pp - 1) * moved.pipeline.seconds(cluster) / moved.pipeline.messages
    terms = Terms(
        compute=compute,
        recompute=recompute,
        tensor_parallel=tensor,
        data_parallel=_exposed(layout, moved, cluster, busy),
        pipeline_sends=sends,
        bubble=bubble,
    )
    return Estimate(
        layout=layout,
        memory=gpu_bytes(shape, layout, seq_len=job.seq_len, fp32_gradients=job.fp32_gradients),
        traffic=moved,
        terms=terms,
        step_s=terms.step,
        mfu=model_flops / (layout.gpus * cluster.peak_flops * terms.step),
        tokens_s=job.sequences * job.seq_len / terms.step,
        budget_bytes=cluster.gpu_memory_bytes * (1 - RESERVE),
    )


def _recomputed_share(job: Job, layout: Layout) -> float:
    """Extra FLOP over those of forward and backward. The forward pass is a third of them."""
    if layout.recompute == "full":
        return 1 / 3
    if layout.recompute == "selective":
        attention = 12 * job.shape.layers * job.shape.width * job.seq_len
        return attention / job.shape.flops_a_token(job.seq_len) / 3
    return 0.0


def _exposed(layout: Layout, moved: Traffic, cluster: Cluster, busy: float) -> float:
    """Data-parallel seconds that no compute hides. Forward is a third of a micro-batch's work, backward two thirds."""
    forward, backward = busy / layout.microbatches / 3, busy / layout.microbatches * 2 / 3
    gather, reduce = moved.gather.seconds(cluster), moved.reduce.seconds(cluster)
    if layout.zero >= 3:
        each_gather, each_reduce = gather / (2 * layout.microbatches), reduce / layout.microbatches
        exposed = max(0.0, each_gather - forward) + max(0.0, each_gather + each_reduce - backward)
        return exposed * layout.microbatches
    if layout.zero == 2:
        each = reduce / layout.microbatches
        return max(0.0, each - backward) * layout.microbatches + max(0.0, gather - forward)
    return max(0.0, reduce - backward) + max(0.0, gather - forward)
