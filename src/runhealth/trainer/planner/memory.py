"""Bytes that one GPU holds.

Model state of mixed-precision Adam, bytes a parameter (ZeRO, arXiv:1910.02054, section 3.1): 2 weights + 2 gradients
+ 4 master weights + 4 first moment + 4 second moment = 16; with gradients kept in fp32 18.

Activations, bytes a layer and micro-batch, by the bookkeeping of Korthikanti et al. (arXiv:2205.05198, section 4): what
the backward pass needs, in 2-byte elements, dropout masks in 1 byte. With s tokens, b sequences, width h, a heads:
34·s·b·h + 5·a·s²·b for a GPT layer with dropout. Tensor parallelism divides what lies within the matrices by t, which
leaves s·b·h·(10 + 24/t); sequence parallelism divides the rest as well. `selective` recomputes attention between q, k,
v and the projection, as flash attention always does, and so drops the term in s².
"""

from dataclasses import dataclass

from runhealth.trainer.planner.layout import Layout, Recompute
from runhealth.trainer.planner.shape import ModelShape

WEIGHT, GRADIENT, MASTER, MOMENT = 2.0, 2.0, 4.0, 4.0
FP32_GRADIENT = 4.0
LOGIT = 4.0  # logits and their gradient are fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Model state in bytes, by part."""

    weights: float
    gradients: float
    master_weights: float
    first_moment: float
    second_moment: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master_weights + self.first_moment + self.second_moment


def state(params: float, *, zero: int = 0, dp: int = 1, fp32_gradients: bool = False) -> StateBytes:
    """State of `params` parameters on one GPU. ZeRO-1 shards the optimizer over `dp`, ZeRO-2 the gradients as well,
    ZeRO-3 the weights too."""
    gradient = FP32_GRADIENT if fp32_gradients else GRADIENT
    shared = params / dp
    return StateBytes(
        weights=WEIGHT * (shared if zero >= 3 else params),
        gradients=gradient * (shared if zero >= 2 else params),
        master_weights=MASTER * (shared if zero >= 1 else params),
        first_moment=MOMENT * (shared if zero >= 1 else params),
        second_moment=MOMENT * (shared if zero >= 1 else params),
    )


def layer_activations(
    shape: ModelShape,
    *,
    seq_len: int,
    micro_batch: int,
    tp: int = 1,
    sequence_parallel: bool = True,
    recompute: Recompute = "none",
) -> float:
    """Bytes one layer keeps of one micro-batch for the backward pass, on one of `tp` GPUs."""
    tokens = seq_len * micro_batch
    outer = tp if sequence_parallel else 1
    if recompute == "full":
        return 2.0 * tokens * shape.width / outer  # the layer's input
    masks = 1.0 if shape.dropout else 0.0
    # outside of the matrices: inputs of two norms, of attention, of the feed-forward; dropout masks of both outputs
    outside = 2.0 * 4 * shape.width + 2 * masks * shape.width
    # within: q, k, v, the projection's input; the feed-forward's inner tensors: the activation's input and output, or
    # gate, up, activated gate and product
    within = 2 * 2.0 * shape.width + 2 * 2.0 * shape.kv_width + (4 if shape.gated else 2) * 2.0 * shape.ffn_width
    if recompute == "none":
        within += (2.0 + 3 * masks) * shape.heads * seq_len  # softmax; with dropout also its mask and output
    return tokens * (outside / outer + within / tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBytes:
    """What the fullest GPU holds."""

    state: StateBytes
    activations: float
    working: float  # gathered weights of ZeRO-3, the layer being recomputed
    logits: float

    @property
    def total(self) -> float:
        return self.state.total + self.activations + self.working + self.logits


def gpu_bytes(shape: ModelShape, layout: Layout, *, seq_len: int, fp32_gradients: bool = False) -> GpuBytes:
    """The larger of the first stage, which holds most activations, and the last, which holds the logits."""
    per_stage = -(-shape.layers // layout.pp)
    layer = layer_activations(
        shape, seq_len=seq_len, micro_batch=layout.micro_batch, tp=layout.tp, recompute=layout.recompute
    )
    working = 0.0
    if layout.recompute == "full":
        working += layer_activations(
            shape, seq_len=seq_len, micro_batch=layout.micro_batch, tp=layout.tp, recompute="selective"
        )
    if layout.zero >= 3:
        working += 2 * WEIGHT * shape.layer_params / layout.tp  # the layer at work and the one fetched ahead
    logits = 2 * LOGIT * seq_len * layout.micro_batch * shape.vocabulary / layout.tp
    stages = []
    for first, last in ((True, layout.pp == 1), (layout.pp == 1, True)):
        params = per_stage * shape.layer_params
        if layout.pp == 1:
            params = shape.params
        else:
            params += shape.embedding_params  # the embedding on the first stage, the head on the last
        stages.append(
            GpuBytes(
                state=state(params / layout.tp, zero=layout.zero, dp=layout.dp, fp32_gradients=fp32_gradients),
                activations=layer * per_stage * (layout.in_flight if first else 1.0),
                working=working,
                logits=logits if last else 0.0,
            )
        )
    return max(stages, key=lambda stage: stage.total)
