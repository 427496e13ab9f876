"""The codes of findings: one a kind, never renumbered.

RH1xx the loss and what drives it · RH2xx the truth of the log · RH3xx attempts and resumes · RH4xx time and ranks ·
RH5xx slow internal failures and replicas · RH6xx checkpoints.
"""

from collections.abc import Mapping
from types import MappingProxyType

CODES: Mapping[str, str] = MappingProxyType(
    {
        "loss_spike": "RH101",
        "loss_divergence": "RH102",
        "non_finite": "RH103",
        "gradient_spike": "RH104",
        "clip_breach": "RH105",
        "loss_scale_collapse": "RH106",
        "fp_overflow": "RH107",
        "not_learning": "RH108",
        "overfitting": "RH109",
        "eval_drift": "RH110",
        "data_corrupt": "RH111",
        "update_jump": "RH112",
        "masked_non_finite": "RH201",
        "optimizer_not_stepping": "RH202",
        "no_training_signal": "RH203",
        "placeholder_value": "RH204",
        "scale_change": "RH205",
        "short_accumulation_window": "RH206",
        "epoch_staircase": "RH207",
        "restart": "RH301",
        "resume_jump": "RH302",
        "data_repeated": "RH303",
        "data_restarted": "RH304",
        "lr_discontinuity": "RH305",
        "loss_scale_reset": "RH306",
        "optimizer_state_lost": "RH307",
        "data_skipped": "RH308",
        "hyperparameter_changed": "RH309",
        "slow_step": "RH401",
        "periodic_stall": "RH402",
        "sustained_slowdown": "RH403",
        "straggler": "RH404",
        "hang": "RH405",
        "dead_rank": "RH406",
        "crash": "RH407",
        "memory_growth": "RH408",
        "out_of_memory": "RH409",
        "low_mfu": "RH410",
        "rank_outlier": "RH501",
        "replica_desync": "RH502",
        "logit_growth": "RH503",
        "dead_layer": "RH504",
        "router_collapse": "RH505",
        "checkpoint_corrupt": "RH601",
        "checkpoint_slow": "RH602",
    }
)
KINDS: Mapping[str, str] = MappingProxyType({code: kind for kind, code in CODES.items()})
