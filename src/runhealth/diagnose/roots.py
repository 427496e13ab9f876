"""Signs that belong to few causes: where one of them came first, an answer that does not account for it is doubted.

Each suspect looks for its own signature and knows its usual look-alikes. What none of them was written for shows in
another way: a channel that left its habit before the trouble, and that the most probable suspect has nothing to say of.
"""

from collections.abc import Iterator, Mapping

from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Evidence

UNEXPLAINED_NATS = -2.5
_DATA = frozenset({"bad_shard", "data_order", "benign"})
_RANKS = frozenset({"silent_corruption", "bad_shard", "data_order", "replica_desync"})
_OPTIMIZER = frozenset({"optimizer_state", "adam_staleness", "not_stepping"})
_NUMBERS = frozenset({"fp_overflow", "loss_scale", "logit_growth"})

# signal of an alarm -> the suspects that account for it when it comes first
ROOTS: Mapping[str, frozenset[str]] = {
    "lr": frozenset({"lr_change", "optimizer_state", "resume_artifact"}),
    **dict.fromkeys(("beta1", "beta2", "weight_decay", "adam_eps"), frozenset({"optimizer_state"})),
    **dict.fromkeys(
        ("token_entropy", "token_unique_share", "token_repeat_share", "label_mismatch_share", "shard_hash"), _DATA
    ),
    "nonfinite_share": frozenset({"bad_shard"}),
    **dict.fromkeys(("grad_norm_rank", "grad_cosine_rank"), _RANKS),
    "grad_projection_rank": frozenset({"silent_corruption"}),
    "param_checksum": frozenset({"silent_corruption", "replica_desync", "not_stepping"}),
    **dict.fromkeys(("overflow_count", "amax_ratio"), _NUMBERS | {"silent_corruption"}),
    "loss_scale": _NUMBERS,
    "update_ratio": _OPTIMIZER | {"lr_change", "checkpoint_io", "resume_artifact"},
    "second_moment_norm": _OPTIMIZER | {"checkpoint_io", "resume_artifact"},
}
CERTAIN = ("benign", "reporting_artifact")  # these judge by what else moved anyway


def unexplained(suspect: str, evidence: tuple[Evidence, ...], case: Case) -> Iterator[Evidence]:
    """Against a suspect: a sign of other causes came before all that speaks for it."""
    own = [e.steps[0] for e in evidence if e.weight_nats >= 1.0 and e.steps is not None]
    spoken = [e.steps for e in evidence if e.weight_nats < 0 and e.steps is not None]
    if not own or suspect in CERTAIN:
        return
    for alarm in sorted(case.incident.alarms, key=lambda a: (a.onset_step, a.signal)):
        of = ROOTS.get(alarm.signal)
        if of is None or suspect in of or alarm.onset_step > case.cause_until or alarm.onset_step >= min(own):
            continue
        if any(first <= alarm.onset_step <= last for first, last in spoken):
            continue  # it is counted against it already
        yield Evidence(
            claim=f"{alarm.signal.replace('_', ' ')} had left its habit at step {alarm.onset_step:,}, which this does "
            "not explain",
            weight_nats=UNEXPLAINED_NATS,
            steps=(alarm.onset_step, alarm.step),
            ranks=alarm.ranks,
        )
        return
