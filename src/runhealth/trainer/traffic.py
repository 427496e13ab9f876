"""Bytes that a rank sends in one step, by the algorithm of each collective. Importable without torch.

They are computed, not measured: gloo runs a reduce-scatter as an all-reduce, so what crosses the wire there says
nothing of the layout. Ring algorithms over n ranks send 2(n-1)/n of a tensor's bytes for an all-reduce and (n-1)/n for
an all-gather, a reduce-scatter or, on average, a broadcast (Thakur et al., IJHPCA 19(1), 2005).
"""

from runhealth.trainer.config import TrainConfig
from runhealth.trainer.flops import VOCABULARY, rank_parameters
from runhealth.trainer.layout import dimensions, layers_of, place, stages_of
from runhealth.trainer.planner.traffic import all_gather, all_reduce

FLOAT32 = 4


def gathers_per_step(config: TrainConfig) -> int:
    """How often FSDP gathers a unit's parameters. Stage 2 keeps them until they are reduced. Stage 3 frees them after
    each forward pass, so whatever comes next gathers them: the backward pass of the same micro-batch, or in a pipeline,
    whose backward passes free nothing, one pass for every forward pass and the first forward pass itself."""
    parallel = config.parallel
    if parallel.pp > 1:
        return 1 if parallel.kind == "zero2" else parallel.microbatches + 1
    return parallel.microbatches * (1 if parallel.kind == "zero2" else 2)


def step_bytes(config: TrainConfig, rank: int) -> dict[str, int]:
    """By purpose: `gather` and `reduce` of data parallelism, `tensor`, `pipeline`. Single numbers (norms, counters) are
    left out."""
    here = place(config, rank)
    return {
        "gather": round(_gather(config, here.pp)),
        "reduce": round(_reduce(config, here.pp)),
        "tensor": round(_tensor(config, here.pp)),
        "pipeline": _pipeline(config, here.pp),
    }


def _gather(config: TrainConfig, pp: int) -> float:
    size_bytes = FLOAT32 * rank_parameters(config, pp)
    if config.parallel.kind == "zero1":
        return all_gather(size_bytes, config.dp)
    if not config.parallel.shards_state:
        return 0.0
    return gathers_per_step(config) * all_gather(size_bytes, dimensions(config)["shard"])


def _reduce(config: TrainConfig, pp: int) -> float:
    size_bytes = FLOAT32 * rank_parameters(config, pp)
    if not config.parallel.shards_state:
        return all_reduce(size_bytes, config.dp)
    sizes = dimensions(config)
    between = all_reduce(size_bytes / sizes["shard"], sizes["replica"])
    return all_gather(size_bytes, sizes["shard"]) + between


def _tensor(config: TrainConfig, pp: int) -> float:
    """A block gathers before each of its two halves and reduce-scatters after it, and the other way round in the
    backward pass; a recomputed block does the forward ones again, except its last, which nothing needs. Embedding: one
    reduce-scatter, one gather. Head: gathers of its input and of the logits, one reduce-scatter. Norms: their weights'
    gradients are all-reduced once a step."""
    parallel = config.parallel
    if parallel.tp == 1:
        return 0.0
    stream = FLOAT32 * _microbatch_tokens(config) * config.model.width
    low = stream // 2 if config.model.precision in ("bf16", "fp16") else stream  # results of low-precision products
    again = 0 if parallel.recompute == "none" else 2 * stream + low
    total, norms = 0.0, 0
    for stage in stages_of(config, pp):
        blocks = len(layers_of(config, stage))
        moved = blocks * (4 * stream + 4 * low + again)
        if stage == 0:
            moved += 2 * stream
        if stage == parallel.stages - 1:
            moved += 2 * stream + FLOAT32 * _microbatch_tokens(config) * VOCABULARY
        total += parallel.microbatches * all_gather(moved, parallel.tp)
        norms += (2 * blocks + (stage == parallel.stages - 1)) * config.model.width
    return total + all_reduce(FLOAT32 * norms, parallel.tp)


def _pipeline(config: TrainConfig, pp: int) -> int:
    """Each stage but the last sends its output on, each but the first sends a gradient back."""
    parallel = config.parallel
    size_bytes = FLOAT32 * _microbatch_tokens(config) * config.model.width // parallel.tp
    sends = sum((stage < parallel.stages - 1) + (stage > 0) for stage in stages_of(config, pp))
    return parallel.microbatches * sends * size_bytes


def _microbatch_tokens(config: TrainConfig) -> int:
    return config.data.batch_size // config.parallel.microbatches * config.data.seq_len
