"""The signal catalogue: what each recorded number is called, its unit, scope and meaning.

Importers map foreign names to these; the reports say what a missing one would have told. Names outside the catalogue
are legal: they are kept and shown, and no detector reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Scope(StrEnum):
    GLOBAL = "global"  # one number for the whole job, written by rank 0
    RANK = "rank"  # one number a rank
    LAYER = "layer"  # one number a layer and rank (LayerSample)
    BATCH = "batch"  # one number a micro-batch (BatchRecord)


class Dtype(StrEnum):
    F32 = "f"  # measured in single precision: nothing is lost by keeping it so
    F64 = "d"
    I64 = "q"
    U64 = "Q"


@dataclass(frozen=True, slots=True)
class Signal:
    """One entry of the catalogue. `would_tell` completes the sentence 'if it were recorded, it would tell …'."""

    name: str
    unit: str
    scope: Scope
    dtype: Dtype
    meaning: str
    would_tell: str = ""


def _catalogue(*signals: Signal) -> Mapping[str, Signal]:
    return MappingProxyType({signal.name: signal for signal in signals})


_G, _R, _L, _B = Scope.GLOBAL, Scope.RANK, Scope.LAYER, Scope.BATCH
_F, _D, _Q, _U = Dtype.F32, Dtype.F64, Dtype.I64, Dtype.U64

STEP_SIGNALS = _catalogue(
    Signal("loss", "nats", _R, _F, "training loss of this rank's batch", "whether and when training left its trend"),
    Signal("eval_loss", "nats", _G, _F, "loss on held-out data", "overfitting and evaluation drift"),
    Signal(
        "grad_norm",
        "1",
        _G,
        _F,
        "global L2 gradient norm after the reduce, before clipping",
        "bursts of gradient, and what clipping did to them",
    ),
    Signal(
        "grad_norm_rank",
        "1",
        _R,
        _F,
        "L2 gradient norm of this rank before the reduce",
        "which rank a bad gradient came from",
    ),
    Signal(
        "grad_projection_rank",
        "1",
        _R,
        _F,
        "<g, h> / <h, h> of this rank's gradient g before the reduce and its result h, over one bucket a step",
        "whether the reduce returned the mean (these average to 1 over all ranks), and whose gradient is turned round",
    ),
    Signal(
        "grad_cosine_rank",
        "1",
        _R,
        _F,
        "cosine of this rank's gradient before the reduce with the result of the reduce, over one bucket a step",
        "a rank that sends something else than its peers",
    ),
    Signal(
        "clip_threshold", "1", _G, _F, "the norm that gradients are clipped to", "how far the norm is over its limit"
    ),
    Signal(
        "clip_coef",
        "1",
        _G,
        _F,
        "min(1, threshold / norm): what the gradient was multiplied with",
        "whether clipping took over the optimizer's direction",
    ),
    Signal(
        "lr", "1", _G, _D, "learning rate of the first parameter group", "a schedule that jumped, or was not restored"
    ),
    Signal("beta1", "1", _G, _D, "decay of Adam's first moment, as used", "an optimizer that was set up anew"),
    Signal("beta2", "1", _G, _D, "decay of Adam's second moment, as used", "an optimizer that was set up anew"),
    Signal("weight_decay", "1", _G, _D, "weight decay of the optimizer, as used", "a decay that changed by mistake"),
    Signal("adam_eps", "1", _G, _D, "term under Adam's fraction, as used", "a term that caps all updates"),
    Signal(
        "update_ratio",
        "1",
        _G,
        _F,
        "L2 norm of the last parameter update over L2 norm of the parameters",
        "learning-rate and optimizer-state faults, which move it before the loss",
    ),
    Signal("weight_norm", "1", _G, _F, "L2 norm of all parameters", "weights that run away or do not move"),
    Signal("loss_scale", "1", _G, _D, "loss scale of fp16 training", "an fp16 overflow"),
    Signal("step_skipped", "count", _G, _Q, "1 if the optimizer step was skipped", "updates that never happened"),
    Signal(
        "overflow_count",
        "elements",
        _R,
        _Q,
        "elements beyond the low-precision range before the cast",
        "an fp8 or fp16 overflow, and in which tensors",
    ),
    Signal(
        "underflow_count",
        "elements",
        _R,
        _Q,
        "non-zero elements that the cast turned into zero",
        "gradients lost to underflow",
    ),
    Signal(
        "nonfinite_count",
        "elements",
        _R,
        _Q,
        "NaN and Inf among this rank's gradients",
        "which rank went non-finite first",
    ),
    Signal(
        "amax_ratio", "1", _R, _F, "largest amax over the amax that the fp8 scale was chosen for", "a stale fp8 scale"
    ),
    Signal("logit_max", "1", _R, _F, "largest absolute logit", "logit growth"),
    Signal("activation_max", "1", _R, _F, "largest absolute activation", "activation outliers"),
    Signal("tokens", "tokens", _R, _Q, "tokens of this rank's batch", "cost in tokens"),
    Signal(
        "consumed_samples",
        "samples",
        _G,
        _Q,
        "samples seen since the run began",
        "data that is repeated or skipped at a resume",
    ),
    Signal("epoch", "1", _G, _D, "epochs of data seen", "effects at epoch boundaries"),
    Signal("t_step_s", "s", _R, _F, "wall time of the step", "slow steps"),
    Signal("t_data_s", "s", _R, _F, "waiting for data", "a dataloader stall"),
    Signal("t_forward_s", "s", _R, _F, "forward pass", "a compute straggler"),
    Signal("t_backward_s", "s", _R, _F, "backward pass without the waiting", "a compute straggler"),
    Signal("t_wait_s", "s", _R, _F, "waiting in collectives", "which rank the others wait for: it waits least"),
    Signal("t_optimizer_s", "s", _R, _F, "optimizer step", "a slow optimizer"),
    Signal("t_checkpoint_s", "s", _R, _F, "saving a checkpoint", "checkpoint stalls"),
    Signal("elapsed_s", "s", _R, _D, "wall time since the run began", "slow steps"),
    Signal("mem_allocated_bytes", "bytes", _R, _Q, "memory held by tensors", "memory growth"),
    Signal("mem_reserved_bytes", "bytes", _R, _Q, "memory held by the allocator", "fragmentation"),
    Signal("mem_rss_bytes", "bytes", _R, _Q, "resident set of the process", "host memory growth"),
    Signal(
        "adam_rms",
        "1",
        _G,
        _F,
        "largest over the tensors of the RMS of gradient over the root of Adam's second moment",
        "a second moment that is behind the gradient (Adam staleness)",
    ),
    Signal("second_moment_norm", "1", _G, _F, "L2 norm of Adam's second moment", "optimizer state that was lost"),
    Signal(
        "param_checksum",
        "1",
        _R,
        _U,
        "checksum of the parameters that all replicas should share",
        "replicas that differ, or weights that no step changes",
    ),
    Signal("attn_logit_max", "1", _R, _F, "largest absolute attention logit", "attention logit growth"),
    Signal("router_load_max", "1", _R, _F, "largest share of tokens sent to one expert", "a router that collapses"),
    Signal("t_comm_s", "s", _R, _F, "transfer in collectives without the waiting", "a slow link"),
    Signal("t_gc_s", "s", _R, _F, "garbage collection", "pauses that the interpreter makes itself"),
    Signal(
        "sum_len_sq", "tokens^2", _R, _Q, "sum over the sequences of length squared", "work that sequence length makes"
    ),
    Signal("stage", "1", _R, _Q, "pipeline stage of the rank", "a stage that holds the others up"),
    Signal("mfu", "1", _G, _F, "model FLOP/s over peak FLOP/s", "utilisation under the plan"),
    Signal("bubble_fraction", "1", _R, _F, "share of the step without work in the pipeline", "a pipeline that idles"),
    Signal("comm_bytes", "bytes", _R, _Q, "bytes that the collectives of the step move", "traffic beyond the plan"),
    Signal("mem_parameters_bytes", "bytes", _R, _Q, "parameters that this rank holds", "what fills the memory"),
    Signal("mem_gradients_bytes", "bytes", _R, _Q, "gradients that this rank holds", "what fills the memory"),
    Signal("mem_optimizer_bytes", "bytes", _R, _Q, "optimizer state that this rank holds", "what fills the memory"),
    Signal(
        "mem_activations_bytes",
        "bytes",
        _R,
        _Q,
        "most that was kept for the backward pass at a time",
        "what fills the memory, and what recomputation would save",
    ),
    Signal(
        "nan_steps",
        "steps",
        _G,
        _Q,
        "steps since the record before whose loss was not finite, as the log counts them",
        "non-finite losses that a printed mean leaves out",
    ),
    Signal("dropped", "records", _R, _Q, "telemetry records lost so far", "gaps in the telemetry itself"),
)

LAYER_SIGNALS = _catalogue(
    Signal("grad_norm", "1", _L, _F, "gradient norm of the layer before clipping", "the layer where a burst began"),
    Signal("weight_norm", "1", _L, _F, "parameter norm of the layer", "a layer that runs away"),
    Signal("update_norm", "1", _L, _F, "norm of the layer's last update", "a layer that does not move"),
    Signal("amax", "1", _L, _F, "largest absolute value before the cast", "how far a tensor is over its range"),
    Signal("amax_believed", "1", _L, _F, "the amax that the fp8 scale was chosen for", "a stale fp8 scale"),
    Signal(
        "overflow_count", "elements", _L, _Q, "elements beyond the range before the cast", "the tensor that overflows"
    ),
    Signal("underflow_count", "elements", _L, _Q, "non-zero elements cast to zero", "the tensor that underflows"),
    Signal("elements", "elements", _L, _Q, "elements that were cast", "the share that overflows"),
    Signal("grad_rms", "1", _L, _F, "RMS of the layer's gradient before clipping", "a layer that gets no gradient"),
    Signal("adam_rms", "1", _L, _F, "RMS of gradient over the root of Adam's second moment", "the stale tensors"),
    Signal("router_load_max", "1", _L, _F, "largest share of tokens sent to one expert", "the router that collapses"),
    Signal("logit_max", "1", _L, _F, "largest absolute attention logit", "attention logit growth"),
    Signal("activation_max", "1", _L, _F, "largest absolute activation", "activation outliers"),
    Signal(
        "param_checksum",
        "1",
        _L,
        _U,
        "checksum of the layer's parameters on this rank",
        "what replicas differ in: one tensor is a flipped bit, all of them an update that was not applied",
    ),
)

BATCH_SIGNALS = _catalogue(
    Signal(
        "token_entropy", "bits", _B, _F, "entropy of the batch's token histogram", "a corrupted or degenerate shard"
    ),
    Signal(
        "token_unique_share", "1", _B, _F, "distinct tokens over vocabulary size", "a corrupted or degenerate shard"
    ),
    Signal("token_repeat_share", "1", _B, _F, "tokens equal to the token before them", "padding or repeated n-grams"),
    Signal(
        "label_mismatch_share", "1", _B, _F, "labels that are not the next input token", "labels shifted or shuffled"
    ),
    Signal(
        "nonfinite_share",
        "1",
        _B,
        _F,
        "share of NaN and Inf among the floating-point inputs",
        "whether the data brought the NaN, or the model made it",
    ),
    Signal("batch_loss", "nats", _B, _F, "loss of this micro-batch", "which micro-batch was bad"),
)


def lookup(name: str) -> Signal | None:
    """The catalogue entry of a signal, looked for among step, batch and layer signals in this order."""
    return STEP_SIGNALS.get(name) or BATCH_SIGNALS.get(name) or LAYER_SIGNALS.get(name)


def dtype_of(name: str, catalogue: Mapping[str, Signal]) -> Dtype:
    """How to keep a value: as the catalogue says, free-form names as double."""
    signal = catalogue.get(name)
    return signal.dtype if signal is not None else Dtype.F64
