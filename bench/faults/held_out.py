"""The kinds that no threshold, weight or calibration has seen. They are in the report alone.

They were written by somebody who had not read the detectors and suspects, and fixed before any result on them was
looked at. Each one comes about in another way than the kinds for tuning of the same cause; the sources are in the
faults' own files.
"""

from bench.faults.clock import BACKWARD_S, FORWARD_S
from bench.faults.kind import Kind

_COMPUTE_S = FORWARD_S + BACKWARD_S

KINDS: tuple[Kind, ...] = (
    # data
    Kind(
        name="wrong_tokenizer",
        cause="bad_shard",
        fault="wrong_tokenizer",
        severities=(0.3, 0.6, 1.0),
        cap=1.0,
        ranked=True,
        visit=True,
        held_out=True,
    ),
    Kind(
        name="loader_loop",
        cause="data_order",
        fault="loader_loop",
        severities=(12, 5, 1),
        whole=True,
        resume=True,
        ranked=True,
        tail=56,
        held_out=True,
    ),
    # learning rate and optimizer
    Kind(
        name="lr_climb",
        cause="lr_change",
        fault="lr_climb",
        severities=(3.0, 8.0, 25.0),
        resume=True,
        tail=48,
        held_out=True,
    ),
    Kind(
        name="moments_swapped",
        cause="optimizer_state",
        fault="moments_swapped",
        params={"mode": ("matrices", "ends", "all")},
        resume=True,
        fixed=True,
        held_out=True,
    ),
    Kind(
        name="squares_underflow",
        cause="adam_staleness",
        fault="squares_underflow",
        severities=(0.3, 0.6, 1.0),
        params={"tensor": ("blocks.0.qkv", "head", "blocks.1.gate_up")},
        cap=1.0,
        tail=70,
        held_out=True,
    ),
    Kind(
        name="noop_steps",
        cause="not_stepping",
        fault="noop_steps",
        severities=(3, 5, 9),
        whole=True,
        tail=56,
        held_out=True,
    ),
    # numbers
    Kind(
        name="logit_drift",
        cause="logit_growth",
        fault="logit_drift",
        severities=(0.1, 0.25, 0.6),
        tail=80,
        held_out=True,
    ),
    Kind(
        name="wrong_lane",
        cause="silent_corruption",
        fault="wrong_lane",
        severities=(15.0, 60.0, 300.0),
        ranked=True,
        held_out=True,
    ),
    Kind(
        name="stale_bucket",
        cause="silent_corruption",
        fault="stale_bucket",
        severities=(0.2, 0.5, 1.0),
        precisions=("fp32", "fp32", "fp8", "moe"),
        cap=1.0,
        held_out=True,
    ),
    Kind(
        name="local_gradient",
        cause="replica_desync",
        fault="local_gradient",
        severities=(0.1, 0.4, 1.0),
        precisions=("fp32", "fp32", "fp8", "moe"),
        cap=1.0,
        ranked=True,
        held_out=True,
    ),
    Kind(
        name="closed_gate",
        cause="dead_layer",
        fault="closed_gate",
        severities=(10.0, 20.0, 60.0),
        params={"block": ("blocks.1", "blocks.0", "blocks.0")},
        precisions=("fp32", "fp32", "fp8", "fp16"),  # a router behind closed gates has nothing to choose by
        tail=48,
        held_out=True,
    ),
    # time and checkpoints
    Kind(
        name="throttle",
        cause="compute_straggler",
        fault="throttle",
        severities=(_COMPUTE_S * 0.15, _COMPUTE_S * 0.35, _COMPUTE_S * 0.9),
        ranked=True,
        tail=56,
        held_out=True,
    ),
    Kind(
        name="partial_load",
        cause="checkpoint_io",
        fault="partial_load",
        params={"layer": ("blocks.1.out", "blocks.0", "embed")},
        resume=True,
        fixed=True,
        held_out=True,
    ),
    Kind(
        name="save_shadow",
        cause="checkpoint_io",
        fault="save_shadow",
        severities=(0.3, 0.8, 2.0),
        tail=80,
        held_out=True,
    ),
    # evaluation and log
    Kind(
        name="eval_padding",
        cause="eval_drift",
        fault="eval_padding",
        severities=(0.15, 0.35, 0.6),
        tail=56,
        held_out=True,
    ),
    Kind(
        name="scaled_log",
        cause="reporting_artifact",
        fault="scaled_log",
        params={"factor": (2.0, 0.25, 8.0)},
        resume=True,
        fixed=True,
        held_out=True,
    ),
    # benign twins
    Kind(
        name="compile_warmup",
        cause="benign",
        fault="compile_warmup",
        severities=(5.0, 15.0, 40.0),
        resume=True,
        held_out=True,
    ),
    Kind(
        name="synchronised_gc",
        cause="benign",
        fault="synchronised_gc",
        severities=(0.05, 0.1, 0.2),
        tail=64,
        held_out=True,
    ),
    Kind(
        name="rank_remap",
        cause="benign",
        fault="rank_remap",
        params={"shift": (1, 2, 3)},
        resume=True,
        fixed=True,
        held_out=True,
    ),
)
