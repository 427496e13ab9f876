"""The planner's answer as text and as JSON. Bytes are decimal: 1 GB = 1e9."""

from collections.abc import Iterator
from typing import Any

from runhealth.trainer.cadence import duration
from runhealth.trainer.planner import memory
from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.estimate import KERNEL_EFFICIENCY, RESERVE, Estimate, Job
from runhealth.trainer.planner.layout import Recompute
from runhealth.trainer.planner.saving import RESTART_S, Saving, saving
from runhealth.trainer.planner.walk import Stop, Walk

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
STATE_PARTS = (
    ("weights", "bf16", memory.WEIGHT),
    ("gradients", "bf16", memory.GRADIENT),
    ("master_weights", "fp32", memory.MASTER),
    ("first_moment", "fp32", memory.MOMENT),
    ("second_moment", "fp32", memory.MOMENT),
)


def size(count: float) -> str:
    """`112 GB`, `1.12 TB`, `840 MB`."""
    sign, count = ("-" if count < 0 else ""), abs(count)
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{sign}{count / factor:.3g} {unit}"
    return f"{sign}{count / 1e3:.3g} kB"


def text(walk: Walk) -> str:
    """The whole answer, in the order in which one would ask."""
    job, cluster = walk.job, walk.cluster
    lines = [
        *_asked(job, cluster),
        "",
        *_memory(job, cluster),
        "",
        "THE WALK  each stop allows one thing more; the fastest layout that fits stands for it",
    ]
    for number, stop in enumerate(walk.stops, start=1):
        lines.extend(_stop(number, stop, walk))
    lines.append("")
    lines.extend(_chosen(walk))
    lines.append("")
    lines.extend(_tensor_boundary(walk))
    lines.append("")
    lines.extend(_saving(saving(job.shape, cluster), walk.chosen))
    lines.append("")
    lines.extend(_assumptions(cluster))
    return "\n".join(lines)


def _asked(job: Job, cluster: Cluster) -> Iterator[str]:
    shape = job.shape
    yield (
        f"{shape.name}: {shape.params / 1e9:.4g}B parameters, {shape.layers} layers of width {shape.width}; "
        f"{job.seq_len:,} tokens a sequence, {job.sequences * job.seq_len / 1e6:.3g}M tokens a step"
    )
    nodes = f"{cluster.nodes:,} node{'' if cluster.nodes == 1 else 's'}"
    yield f"{cluster.gpus:,} GPUs of {size(cluster.gpu_memory_bytes)}: {nodes} of {cluster.gpus_per_node}"


def _memory(job: Job, cluster: Cluster) -> Iterator[str]:
    whole = memory.state(job.shape.params)
    yield "WHAT SITS IN MEMORY  one copy of the model state, mixed-precision Adam"
    for name, precision, width in STATE_PARTS:
        part = getattr(whole, name)
        yield f"  {name.replace('_', ' '):<16}{precision:<6}{width:>3.0f} bytes a parameter  {size(part):>9}"
    fp32 = size(memory.state(job.shape.params, fp32_gradients=True).total)
    per = whole.total / job.shape.params
    together = f"  {'together':<22}{per:>3.0f} bytes a parameter  {size(whole.total):>9}"
    yield f"{together}   (18 with fp32 gradients: {fp32})"
    share = whole.total / cluster.gpu_memory_bytes
    yield f"  that is {share:.3g} x the memory of one GPU, before any activation"
    gpus = cluster.gpus
    yield f"  a GPU, shared by {gpus:,}: " + " · ".join(
        f"{'DP' if zero == 0 else f'ZeRO-{zero}'} {size(memory.state(job.shape.params, zero=zero, dp=gpus).total)}"
        for zero in range(4)
    )
    yield f"  activations of one layer, a micro-batch of 1 x {job.seq_len:,} tokens, recomputing:"
    for recompute, what in zip(RECOMPUTES, ("nothing", "attention", "everything"), strict=True):
        sizes = " · ".join(
            f"TP {tp}{' + SP' if tp > 1 else ''} {size(_layer(job, tp, recompute))}"
            for tp in (1, 2, 8)
            if tp <= cluster.gpus_per_node
        )
        yield f"    {what:<11}{sizes}   (x {job.shape.layers} layers)"


def _layer(job: Job, tp: int, recompute: Recompute) -> float:
    return memory.layer_activations(job.shape, seq_len=job.seq_len, micro_batch=1, tp=tp, recompute=recompute)


def _stop(number: int, stop: Stop, walk: Walk) -> Iterator[str]:
    yield f"  {number}. {stop.family.name}: {stop.family.buys}"
    best = stop.best
    if best is None:
        yield (
            f"     cannot be laid: {walk.job.sequences:,} sequences a step are too few for {walk.cluster.gpus:,} GPUs "
            "with equal shares"
        )
        return
    yield f"     {best.layout.words()}"
    if best.fits:
        yield (
            f"     fits: {size(best.memory.total)} of {size(best.budget_bytes)}; step {duration(best.step_s)}, MFU "
            f"{best.mfu:.0%}; bottleneck: {best.bottleneck}"
        )
    else:
        yield (
            f"     does not fit: {size(best.memory.total)} of {size(best.budget_bytes)}, {size(best.over_bytes)} too "
            f"much; bottleneck: {best.bottleneck}"
        )


def _chosen(walk: Walk) -> Iterator[str]:
    best = walk.chosen
    if best is None:
        laid = [stop.best for stop in walk.stops if stop.best is not None]
        nearest = min(laid, key=lambda e: e.memory.total)
        yield f"NOTHING FITS  the nearest misses by {size(nearest.over_bytes)} a GPU: {nearest.layout.words()}"
        yield "  take more GPUs, or GPUs with more memory"
        return
    yield f"RECOMMENDED  {best.layout.words()}"
    held = best.memory
    yield (
        f"  memory a GPU: state {size(held.state.total)} + activations {size(held.activations)} + working "
        f"{size(held.working)} + logits {size(held.logits)} = {size(held.total)}, {size(-best.over_bytes)} left of "
        f"{size(best.budget_bytes)}"
    )
    terms = [f"compute {best.terms.compute / best.step_s:.0%}"]
    terms += [f"{name} {seconds / best.step_s:.1%}" for name, seconds in best.terms.named() if seconds]
    yield f"  a step of {duration(best.step_s)}: " + " · ".join(terms)
    yield f"  {best.tokens_s:,.0f} tokens/s, MFU {best.mfu:.1%}"
    if best.layout.pp > 1:
        layout = best.layout
        yield (
            f"  bubble (p-1)/(v·m+p-1) = {layout.pp - 1}/({layout.interleave}·{layout.microbatches}+{layout.pp - 1}) = "
            f"{layout.bubble:.1%}"
        )
    yield "  sent by a GPU in a step:"
    for flow in best.traffic.flows():
        yield (
            f"    {flow.kind:<16} {size(flow.size_bytes):>8} over {flow.link:<8} in {flow.messages:,} messages "
            f"({duration(flow.seconds(walk.cluster))}): {flow.what}"
        )


def _tensor_boundary(walk: Walk) -> Iterator[str]:
    cluster = walk.cluster
    yield "WHERE THE TENSOR-PARALLEL BOUNDARY GOES"
    inside, between = size(cluster.intra_bytes_s), size(cluster.inter_bytes_s)
    yield (
        "  tensor parallel sends 4 all-reduces of s·b·h a layer and micro-batch, and compute waits for each; inside a "
        f"node a GPU sends {inside}/s, between nodes {between}/s: {cluster.intra_bytes_s / cluster.inter_bytes_s:.3g} x"
    )
    best, wider = walk.chosen, walk.wider
    if best is None or wider is None:
        why = "no layout fits" if best is None else "there is one node" if cluster.nodes == 1 else "it cannot be wider"
        yield f"  nothing to compare: {why}"
        return
    yield (
        f"  across two nodes (TP {wider.layout.tp}) a step would wait {duration(wider.terms.tensor_parallel)} for it "
        f"and take {duration(wider.step_s)}; here it waits {duration(best.terms.tensor_parallel)} of "
        f"{duration(best.step_s)}, so the boundary is the node"
    )


def _saving(found: Saving, chosen: Estimate | None) -> Iterator[str]:
    yield (
        f"CHECKPOINTS  {size(found.size_bytes)} (14 bytes a parameter), written in {duration(found.save_s)}, "
        f"every {duration(found.cadence.interval_s)}"
        + (f" = {found.cadence.every_steps(chosen.step_s):,} steps" if chosen is not None else "")
    )
    for line in found.cadence.explain():
        yield f"  {line}"


def _assumptions(cluster: Cluster) -> Iterator[str]:
    yield (
        f"ASSUMED  {cluster.peak_flops / 1e12:,.0f} TFLOP/s peak, of which kernels reach {KERNEL_EFFICIENCY:.0%}; "
        f"{RESERVE:.0%} of memory kept back; one failure in {cluster.gpu_mtbf_hours:,.0f} GPU hours; "
        f"{size(cluster.storage_bytes_s)}/s to storage a node; {duration(RESTART_S)} to restart"
    )
    yield "  MFU counts 6 x matmul parameters + 12 x layers x width x seq_len FLOP a token (PaLM), no recomputation"


def to_json(walk: Walk) -> dict[str, Any]:
    """The same as JSON values; all sizes in bytes, all times in seconds."""
    job, cluster = walk.job, walk.cluster
    whole = memory.state(job.shape.params)
    found = saving(job.shape, cluster)
    return {
        "model": {
            "name": job.shape.name,
            "params": job.shape.params,
            "layers": job.shape.layers,
            "width": job.shape.width,
            "seq_len": job.seq_len,
            "batch_tokens": job.sequences * job.seq_len,
        },
        "cluster": {
            "gpus": cluster.gpus,
            "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu_memory_bytes": cluster.gpu_memory_bytes,
            "intra_bytes_s": cluster.intra_bytes_s,
            "inter_bytes_s": cluster.inter_bytes_s,
            "peak_flops": cluster.peak_flops,
            "mtbf_s": cluster.mtbf_s,
        },
        "state_bytes": {name: getattr(whole, name) for name, *_ in STATE_PARTS} | {"total": whole.total},
        "state_bytes_fp32_gradients": memory.state(job.shape.params, fp32_gradients=True).total,
        "state_bytes_a_gpu": {
            f"zero_{zero}": memory.state(job.shape.params, zero=zero, dp=cluster.gpus).total for zero in range(4)
        },
        "layer_activation_bytes": {
            recompute: {
                f"tp_{tp}": memory.layer_activations(
                    job.shape, seq_len=job.seq_len, micro_batch=1, tp=tp, recompute=recompute
                )
                for tp in (1, 2, 4, 8)
            }
            for recompute in RECOMPUTES
        },
        "walk": [
            {
                "family": stop.family.name,
                "buys": stop.family.buys,
                "fitting": stop.fitting,
                "looked_at": stop.looked_at,
                "best": None if stop.best is None else estimate_json(stop.best),
            }
            for stop in walk.stops
        ],
        "recommended": None if walk.chosen is None else estimate_json(walk.chosen),
        "tensor_parallel_across_nodes": None if walk.wider is None else estimate_json(walk.wider),
        "checkpoint": {"size_bytes": found.size_bytes, **found.cadence.to_json()},
        "assumed": {"kernel_efficiency": KERNEL_EFFICIENCY, "reserve": RESERVE, "restart_s": RESTART_S},
    }


def estimate_json(found: Estimate) -> dict[str, Any]:
    layout, held, terms = found.layout, found.memory, found.terms
    return {
        "layout": {name: getattr(layout, name) for name in layout.__dataclass_fields__},
        "words": layout.words(),
        "fits": found.fits,
        "over_bytes": found.over_bytes,
        "bottleneck": found.bottleneck,
        "memory_bytes": {
            "state": held.state.total,
            "activations": held.activations,
            "working": held.working,
            "logits": held.logits,
            "total": held.total,
        },
        "seconds": {name: getattr(terms, name) for name in terms.__dataclass_fields__} | {"step": terms.step},
        "traffic": [
            {"kind": f.kind, "what": f.what, "bytes": f.size_bytes, "link": f.link, "messages": f.messages}
            for f in found.traffic.flows()
        ],
        "bubble_fraction": layout.bubble,
        "mfu": found.mfu,
        "tokens_s": found.tokens_s,
    }
