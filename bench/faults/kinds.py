"""The kinds of run: which fault, in which precision, at which severities, and on which split.

This is generation 2 of the splits. They were fixed before any result of this generation was looked at:

- by base seed: bases 0 to 2 are for tuning, bases 200 to 202 for the report;
- by severity: the tuning runs use the three severities below, those of the report are drawn around them (up to a factor
  of `JITTER` either way), so that none is met twice;
- by kind: the kinds of `held_out.py` are in the report alone. They were written down by somebody who had not seen the
  suspects, while those who wrote detectors and suspects had not seen them. No threshold, weight or calibration has.

Generation 1 reported on bases 100 to 102 and held out bad_shard_shuffle, nan_batch, rank_duplicate, wrong_beta2,
sdc_exponent and long_sequences. Its figures were read, missed three bars, and led to new signals and new rules; so what
it held out is not unseen any more, and its six kinds are tuned on like all others here. Every draw of a run contains
the number of the generation: a run of generation 2 is none of generation 1 under another name.
"""

import dataclasses
from typing import Any

from bench.faults import held_out
from bench.faults.kind import Kind

GENERATION = 2
TUNING_SEEDS, REPORT_SEEDS = range(3), range(200, 203)


def _shard(mode: str) -> Kind:
    return Kind(
        name=f"bad_shard_{mode}",
        cause="bad_shard",
        fault="bad_shard",
        severities=(0.3, 0.6, 1.0),
        params={"mode": mode},
        cap=1.0,
        ranked=True,
        visit=True,
    )


def _corruption(mode: str, severities: tuple[float, float, float], **changes: Any) -> Kind:
    return Kind(
        name=f"sdc_{mode}",
        cause="silent_corruption",
        fault="silent_corruption",
        severities=severities,
        params={"mode": mode, "steps": 5},
        ranked=True,
        **changes,
    )


COMPUTE_S = 0.82
TUNED: tuple[Kind, ...] = (
    # data
    _shard("noise"),
    _shard("zeros"),
    _shard("repeat"),
    _shard("shuffle"),
    Kind(
        name="label_shift",
        cause="bad_shard",
        fault="label_shift",
        severities=(0.3, 0.6, 1.0),
        cap=1.0,
        ranked=True,
    ),
    Kind(
        name="nan_batch",
        cause="bad_shard",
        fault="nan_batch",
        severities=(1, 2, 6),
        precisions=("fp32", "moe"),
        whole=True,
        ranked=True,
    ),
    *(
        Kind(
            name=f"data_{mode}",
            cause="data_order",
            fault="data_order",
            severities=(20, 60, 120),
            params={"mode": mode, "honest": (1, 0, 0)},
            whole=True,
            resume=True,
        )
        for mode in ("repeated", "skipped")
    ),
    Kind(
        name="rank_duplicate",
        cause="data_order",
        fault="rank_duplicate",
        severities=(1, 2, 3),
        ranked=True,
        whole=True,
        fixed=False,
        cap=3,
    ),
    # learning rate and optimizer
    Kind(name="lr_jump", cause="lr_change", fault="lr_change", severities=(4.0, 10.0, 30.0)),
    Kind(name="lr_burst", cause="lr_change", fault="lr_change", severities=(6.0, 12.0, 30.0), params={"steps": 8}),
    Kind(
        name="optimizer_lost",
        cause="optimizer_state",
        fault="optimizer_state_lost",
        severities=(10.0, 100.0, 1e4),
        params={"mode": "scaled"},
        resume=True,
    ),
    Kind(
        name="optimizer_zeroed",
        cause="optimizer_state",
        fault="optimizer_state_lost",
        severities=(2.0, 2.0, 2.0),
        params={"mode": ("both", "second", "second")},
        resume=True,
        fixed=True,
    ),
    Kind(
        name="wrong_beta2",
        cause="optimizer_state",
        fault="wrong_beta2",
        severities=(0.5, 0.1, 0.01),
        cap=0.7,
    ),
    Kind(
        name="adam_staleness",
        cause="adam_staleness",
        fault="adam_staleness",
        severities=(100.0, 1e3, 1e4),
        params={"tensor": ("embed", "blocks.0.qkv", "blocks.1.out")},
    ),
    Kind(
        name="not_stepping",
        cause="not_stepping",
        fault="not_stepping",
        severities=(0.6, 1.0, 1.0),
        cap=1.0,
        tail=56,
    ),
    # numbers
    Kind(
        name="fp8_stale",
        cause="fp_overflow",
        fault="fp8_stale_amax",
        severities=(8.0, 32.0, 128.0),
        params={"tensor": ("down.x", "qkv.w", "out.x")},
        precisions=("fp8",),
    ),
    Kind(name="fp16_collapse", cause="loss_scale", fault="fp16_overflow", severities=(8, 11, 14), precisions=("fp16",)),
    # a resume that does not restore the loss scale, which then has to find its level again
    Kind(name="scaler_reset", cause="loss_scale", scene="scaler", resume=True, precisions=("fp16",), fixed=True),
    # in fp16 such a burst overflows, and the loss scale falls until it fits: that is `fp16_collapse`
    Kind(
        name="clip_breach",
        cause="clip_breach",
        fault="clip_breach",
        severities=(15.0, 50.0, 200.0),
        precisions=("fp32", "fp32", "fp8", "moe"),
    ),
    Kind(
        name="logits_attention",
        cause="logit_growth",
        fault="logit_growth",
        severities=(0.03, 0.06, 0.12),
        params={"mode": "attention"},
        tail=80,
    ),
    Kind(
        name="logits_output",
        cause="logit_growth",
        fault="logit_growth",
        severities=(0.02, 0.04, 0.08),
        params={"mode": "output"},
        tail=80,
    ),
    _corruption("scale", (10.0, 100.0, 1e4)),
    _corruption("sign", (0.5, 0.75, 1.0), cap=1.0),
    _corruption("exponent", (1, 4, 16), whole=True),
    _corruption("reduce", (1.0, 4.0, 30.0)),
    _corruption("weights", (4, 64, 1024), whole=True),
    *(
        Kind(
            name=f"desync_{mode}",
            cause="replica_desync",
            fault="replica_desync",
            severities=severities,
            params={"mode": mode},
            ranked=True,
            cap=1.0,
        )
        for mode, severities in (("frozen", (0.1, 0.5, 1.0)), ("drift", (0.05, 0.3, 1.0)))
    ),
    Kind(
        name="dead_layer",
        cause="dead_layer",
        fault="dead_layer",
        params={"severity": (0.999, 1.0, 1.0), "layer": ("blocks.1", "blocks.0", "embed")},
        fixed=True,
        tail=48,
    ),
    Kind(
        name="router_collapse",
        cause="router_collapse",
        fault="router_collapse",
        severities=(0.1, 0.25, 0.6),
        precisions=("moe",),
        tail=56,
    ),
    # time
    Kind(
        name="slow_rank",
        cause="compute_straggler",
        fault="compute_straggler",
        severities=tuple(COMPUTE_S * share for share in (0.12, 0.3, 0.8)),
        params={"mode": "rank"},
        ranked=True,
    ),
    Kind(
        name="slow_stage",
        cause="compute_straggler",
        fault="compute_straggler",
        severities=tuple(COMPUTE_S * share for share in (0.12, 0.3, 0.8)),
        params={"mode": "stage"},
    ),
    Kind(
        name="long_sequences",
        cause="compute_straggler",
        fault="compute_straggler",
        severities=tuple(COMPUTE_S * share for share in (0.3, 0.6, 1.0)),
        params={"mode": "length"},
    ),
    Kind(name="slow_link", cause="comm_straggler", fault="comm_straggler", severities=(0.08, 0.2, 0.6), ranked=True),
    Kind(name="stall_storage", cause="dataloader_stall", fault="dataloader_stall", severities=(0.4, 1.0, 3.0)),
    Kind(
        name="stall_host",
        cause="dataloader_stall",
        fault="dataloader_stall",
        severities=(0.4, 1.0, 3.0),
        ranked=True,
    ),
    Kind(name="gc_pause", cause="gc_pause", fault="gc_pause", severities=(0.6, 1.5, 4.0), tail=56),
    Kind(name="checkpoint_slow", cause="checkpoint_io", fault="checkpoint_slow", severities=(6.0, 15.0, 40.0), tail=80),
    Kind(
        name="checkpoint_corrupt",
        cause="checkpoint_io",
        fault="checkpoint_corrupt",
        severities=(0.06, 0.2, 0.6),
        cap=1.0,
        resume=True,
    ),
    # memory, ranks, log
    Kind(
        name="memory_growth",
        cause="memory",
        fault="memory_growth",
        severities=(20e6, 100e6, 400e6),
        whole=True,
        params={"rank": (-1, 1, -1)},
        tail=80,
    ),
    Kind(name="dead_rank", cause="dead_rank", fault="dead_rank", ranked=True, fixed=True),
    Kind(name="hang", cause="hang", fault="hang", ranked=True, fixed=True),
    Kind(name="eval_drift", cause="eval_drift", fault="eval_drift", severities=(0.25, 0.5, 1.0), cap=1.0, tail=56),
    Kind(
        name="lying_log",
        cause="reporting_artifact",
        fault="lying_log",
        params={"mode": ("zero", "mean", "repeat")},
        precisions=("fp32", "fp32", "moe"),
        fixed=True,
    ),
    # benign twins
    Kind(
        name="hard_batch",
        cause="benign",
        fault="hard_batch",
        severities=(0.5, 0.75, 1.0),
        params={"shard": "hard", "steps": (1, 2, 3)},
        cap=1.0,
        ranked=True,
    ),
    Kind(
        name="curriculum",
        cause="benign",
        fault="curriculum",
        severities=(0.25, 0.5, 1.0),
        params={"first": "prose", "count": 12},
        cap=1.0,
    ),
    Kind(
        name="lr_rewarm",
        cause="benign",
        fault="lr_schedule",
        severities=(0.7, 0.85, 1.0),
        params={"mode": "rewarm", "steps": 25},
        cap=1.0,
        resume=True,
    ),
    Kind(
        name="lr_decay",
        cause="benign",
        fault="lr_schedule",
        severities=(0.1, 0.3, 0.5),
        params={"mode": "decay", "steps": 40},
        cap=0.7,
    ),
    Kind(
        name="skipped_step",
        cause="benign",
        fault="fp16_overflow",
        severities=(18.0, 20.0, 24.0),
        params={"steps": 1},
        precisions=("fp16",),
        fixed=False,
    ),
    Kind(name="eval_pause", cause="benign", scene="eval_pause", fixed=True, severities=(5.0, 20.0, 60.0)),
    Kind(name="clean_resume", cause="benign", scene="resume", resume=True, fixed=True),
    Kind(name="epoch_boundary", cause="benign", scene="epoch", fixed=True),
    Kind(name="slow_blip", cause="benign", scene="blip", fixed=True, severities=(1.8, 2.5, 4.0)),
)
KINDS = (*TUNED, *(dataclasses.replace(kind, held_out=True) for kind in held_out.KINDS))
BY_NAME = {kind.name: kind for kind in KINDS}
HELD_OUT = tuple(kind.name for kind in KINDS if kind.held_out)
