"""What each code and each suspect means, what evidence it needs, and what to do about it."""

import difflib
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from runhealth.diagnose.codes import CODES, KINDS
from runhealth.diagnose.detector import detector_classes
from runhealth.diagnose.suspect import load_suspects


@dataclass(frozen=True, slots=True)
class Explanation:
    when: str
    needs: str
    do: str


_CAUSES = "Look at the suspects of the finding; `diagnose rollback plan` when the loss does not come back."

EXPLANATIONS: Mapping[str, Explanation] = MappingProxyType(
    {
        "loss_spike": Explanation(
            "The loss leaves its trend upward by at least 10 %, or 0.1 nats, and 5 robust sigma of the last 128 rows: "
            "a row by more where the noise has heavy tails, three rows together by less. Gone in 20 steps, or under "
            "10 % with nothing else moving: info. Came back later: warning. Never came back: error.",
            "loss; for the cause: grad_norm, clip_threshold, lr, update_ratio, token statistics, overflow counts",
            _CAUSES,
        ),
        "loss_divergence": Explanation(
            "A sustained climb of the loss over the lowest level it had reached, or a blow-up without return.",
            "loss; for the cause as for a spike",
            _CAUSES,
        ),
        "non_finite": Explanation(
            "NaN or Inf in the loss, the gradient norm or the evaluation loss. A skipped fp16 step does not count.",
            "loss, grad_norm or eval_loss; nonfinite_count and grad_norm_rank name the rank",
            "Find the first rank and tensor; one rank: data or hardware; all at once: learning rate or dtype. "
            "Go back to the last good checkpoint; never apply such an update.",
        ),
        "gradient_spike": Explanation(
            "The gradient norm is over 3 x its median and 6 robust sigma, and the loss does not show it.",
            "grad_norm",
            "Three bursts or more: look at the batches of these steps, and at clipping.",
        ),
        "clip_breach": Explanation(
            "The norm is over 5 x the clip threshold and 3 x what the run is used to, in 3 of 5 steps.",
            "grad_norm, clip_threshold",
            "Look for the cause of the gradients first; else lower the threshold.",
        ),
        "loss_scale_collapse": Explanation(
            "The fp16 loss scale falls by 2^5 or more in at least 4 decreases without regrowth, outside the start-up.",
            "loss_scale",
            "Go back to before the first decrease; keep the overflowing tensors in higher precision or use bf16.",
        ),
        "fp_overflow": Explanation(
            "Overflow counts leave a quiet habit, or amax / believed amax is over 1.3 x its 98th percentile.",
            "overflow_count or amax_ratio; layer samples name the tensors",
            "Refill the amax histories; keep the named tensors in higher precision.",
        ),
        "not_learning": Explanation(
            "The loss ends where it started, after a whole run.",
            "loss",
            "Check learning rate, frozen parameters, labels, and that the optimizer steps.",
        ),
        "overfitting": Explanation(
            "The evaluation loss rises while the training loss falls.",
            "loss, eval_loss",
            "Stop earlier, regularise, or add data.",
        ),
        "eval_drift": Explanation(
            "The evaluation loss leaves its trend and the training loss does not.",
            "loss, eval_loss",
            "Score a frozen checkpoint again: the evaluation itself may have changed.",
        ),
        "data_corrupt": Explanation(
            "A shard whose hash is not that of the data manifest, or 8 batches of one shard whose token statistics are "
            "degenerate (repeated, zeroed or random tokens), also where the loss did not rise: repeated tokens make it "
            "fall; or inputs that are not finite where none were before. Joins a loss incident of the same cause.",
            "token statistics, nonfinite_share, or shard hashes with a manifest",
            "`diagnose rollback plan`: go back to before the first bad batch and skip them; write the shard again.",
        ),
        "update_jump": Explanation(
            "Updates are over twice as large, against the parameters, as the trailing median, in 2 of 3 rows, and the "
            "loss does not show it (yet). A learning rate that rises smoothly is allowed for.",
            "update_ratio; lr, adam_rms and second_moment_norm for the cause",
            "Look at the learning rate and at the optimizer's state before the loss follows.",
        ),
        "masked_non_finite": Explanation(
            "The log hides non-finite steps: a loss of 0.0, a mean instead of NaN, a loss field that vanished.",
            "loss and grad_norm",
            "Turn the logger's NaN filter off (Hugging Face: logging_nan_inf_filter=False).",
        ),
        "optimizer_not_stepping": Explanation(
            "Weights, or a loss that is constant to all digits, show that no update is applied.",
            "loss, or weight_norm and grad_norm",
            "Check step skipping, the optimizer's parameters, and gradient hooks.",
        ),
        "no_training_signal": Explanation(
            "Loss and gradient are exactly 0 from the start.",
            "loss, grad_norm",
            "Check labels and masking: every token may be ignored.",
        ),
        "placeholder_value": Explanation(
            "A logged constant that is no measurement.", "any", "Log the real value, or nothing."
        ),
        "scale_change": Explanation(
            "Loss or gradient changes by an exact factor from one step to the next.",
            "loss, grad_norm",
            "Look for a changed reduction, accumulation or world size.",
        ),
        "short_accumulation_window": Explanation(
            "An exact fraction on the last step of each epoch.",
            "loss, grad_norm, epoch",
            "Drop or pad the last window, or normalise by its real size.",
        ),
        "epoch_staircase": Explanation(
            "The training loss steps down at each epoch boundary.",
            "loss, epoch",
            "Normal for small data; watch the evaluation loss.",
        ),
        "restart": Explanation(
            "The step number goes back, or the run was resumed: a new attempt.",
            "step",
            "Nothing, unless the restart was not meant.",
        ),
        "resume_jump": Explanation(
            "The loss right after a resume is off the old trend.",
            "loss",
            "Check that optimizer, schedule, scaler and data position were restored.",
        ),
        "data_repeated": Explanation(
            "Samples that were seen before come again after a resume.",
            "consumed_samples or batch hashes",
            "Restore the data position with the checkpoint.",
        ),
        "data_restarted": Explanation(
            "The data position goes back at a resume.",
            "consumed_samples or batch records",
            "Restore the data position with the checkpoint; the loss since is too low.",
        ),
        "lr_discontinuity": Explanation(
            "The learning rate after a resume is off its schedule.", "lr", "Restore the scheduler with the checkpoint."
        ),
        "loss_scale_reset": Explanation(
            "The loss scale after a resume is not what it was.", "loss_scale", "Restore the scaler with the checkpoint."
        ),
        "optimizer_state_lost": Explanation(
            "The update ratio after a resume shows that moments were not restored.",
            "update_ratio",
            "Restore the optimizer with the checkpoint.",
        ),
        "data_skipped": Explanation(
            "After a resume, steps that are done again read other samples than the first time, and fresh ones.",
            "batch records",
            "Restore the data position with the checkpoint. Skipping on purpose (a rollback plan) is not told.",
        ),
        "hyperparameter_changed": Explanation(
            "A beta, the weight decay or the epsilon of the optimizer goes from one value to another at once, within a "
            "run or at a resume; a slow schedule is no jump. By a factor of 1.5 and more: warning.",
            "beta1, beta2, weight_decay or adam_eps, as the optimizer used them",
            "If it was not meant, go back to a checkpoint from before and give the optimizer its settings.",
        ),
        "slow_step": Explanation(
            "One step takes far longer than its neighbours.", "t_step_s", "Nothing, unless it recurs."
        ),
        "periodic_stall": Explanation(
            "Slow steps recur with a period.",
            "t_step_s or phase times",
            "Match the period with saves, evaluation, garbage collection.",
        ),
        "sustained_slowdown": Explanation(
            "Steps become slower and stay so.",
            "t_step_s or phase times",
            "Look at the device: clocks, memory pressure, other jobs.",
        ),
        "straggler": Explanation(
            "One rank or stage holds the others up: its compute is longest and its wait shortest.",
            "per-rank compute and wait times",
            "Take the rank out, or look at its host.",
        ),
        "hang": Explanation("No step for a long time.", "heartbeats", "Dump stacks; restart."),
        "dead_rank": Explanation(
            "A rank that stopped reporting, or never came.", "per-rank records", "Restart without it."
        ),
        "crash": Explanation(
            "An exception ended the attempt.", "events", "Read the traceback of the first rank that failed."
        ),
        "memory_growth": Explanation(
            "The floor of allocated memory rises.", "mem_allocated_bytes", "Look for tensors kept between steps."
        ),
        "out_of_memory": Explanation(
            "An allocation failed.", "events", "Smaller micro-batch, checkpointing, sharding."
        ),
        "low_mfu": Explanation(
            "Utilisation is under 0.75 x that of the plan kept with the run (runhealth plan --run).",
            "mfu; bubble_fraction, mem_allocated_bytes, t_wait_s say more",
            "Look at what else is off the plan; profile a step.",
        ),
        "rank_outlier": Explanation(
            "One rank's own loss or gradient differs from its peers, in size or in direction; or what the reduce "
            "returned is not the mean of what the ranks sent.",
            "per-rank loss, grad_norm_rank, grad_cosine_rank, grad_projection_rank",
            "Repeat the batch on another device; differing results mean silent corruption.",
        ),
        "replica_desync": Explanation(
            "Replicated parameters differ between ranks.",
            "parameter checksums",
            "Restore from the last good checkpoint; look for a missing reduce.",
        ),
        "logit_growth": Explanation(
            "The largest logit climbs for a long time.", "logit_max", "QK-norm, z-loss, lower rate."
        ),
        "dead_layer": Explanation(
            "A layer's gradient is as small as the optimizer's epsilon.",
            "layer gradient norms",
            "Check its input and initialisation.",
        ),
        "router_collapse": Explanation(
            "One expert takes all load.", "router load", "Balance loss; restart the router."
        ),
        "checkpoint_corrupt": Explanation(
            "A checkpoint that fails verification.",
            "checkpoint records",
            "It is never chosen for a rollback; check the disk.",
        ),
        "checkpoint_slow": Explanation("Saves stall the run.", "t_checkpoint_s", "Save asynchronously or less often."),
    }
)


# What a kind cannot be judged without: one signal of each group. Kinds that are not listed need no signal of the
# catalogue, or are not looked for yet.
KIND_SIGNALS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "loss_spike": (("loss",),),
        "loss_divergence": (("loss",),),
        "non_finite": (("loss", "grad_norm", "eval_loss"),),
        "gradient_spike": (("grad_norm",),),
        "clip_breach": (("grad_norm",), ("clip_threshold",)),
        "update_jump": (("update_ratio",),),
        "loss_scale_collapse": (("loss_scale",),),
        "fp_overflow": (("overflow_count", "amax_ratio"),),
        "not_learning": (("loss",),),
        "overfitting": (("loss",), ("eval_loss",)),
        "eval_drift": (("loss",), ("eval_loss",)),
        "masked_non_finite": (("loss", "grad_norm"),),
        "optimizer_not_stepping": (("loss", "weight_norm"),),
        "no_training_signal": (("loss",),),
        "scale_change": (("loss", "grad_norm"),),
        "short_accumulation_window": (("loss", "grad_norm"),),
        "epoch_staircase": (("loss",),),
        "resume_jump": (("loss",),),
        "lr_discontinuity": (("lr",),),
        "loss_scale_reset": (("loss_scale",),),
        "optimizer_state_lost": (("update_ratio", "second_moment_norm"),),
        "hyperparameter_changed": (("beta1", "beta2", "weight_decay", "adam_eps"),),
        "slow_step": (("t_step_s", "elapsed_s"),),
        "periodic_stall": (("t_step_s", "elapsed_s"),),
        "sustained_slowdown": (("t_step_s", "elapsed_s"),),
        "straggler": (("t_wait_s", "t_forward_s", "t_step_s"),),
        "memory_growth": (("mem_allocated_bytes",),),
        "rank_outlier": (("loss", "grad_norm_rank"),),
        "replica_desync": (("param_checksum",),),
        "logit_growth": (("logit_max", "attn_logit_max"),),
        "dead_layer": (("grad_rms", "grad_norm"),),
        "router_collapse": (("router_load_max",),),
        "checkpoint_slow": (("t_checkpoint_s",),),
    }
)


def absent_for(kind: str, signals: frozenset[str]) -> str:
    """What a kind cannot be judged for want of, in words; empty if it can be."""
    groups = [group for group in KIND_SIGNALS.get(kind, ()) if not signals.intersection(group)]
    return " and ".join(" or ".join(group) for group in groups)


def explain(topic: str) -> str | None:
    """Text for a code (RH101), a kind (loss_spike) or a suspect (bad_shard); None when there is no such. A word that is
    both a kind and a suspect gets both."""
    word = topic.lower().replace("-", "_").replace(" ", "_")
    kind = KINDS.get(topic.upper(), word)
    parts = []
    if kind in CODES:
        entry = EXPLANATIONS[kind]
        reserved = "" if kind in checked_kinds() else "  (not looked for yet)"
        parts.append(f"{CODES[kind]} {kind}{reserved}\n" + _rows(When=entry.when, Needs=entry.needs, Do=entry.do))
    suspects = {suspect.name: suspect for suspect in load_suspects()}
    suspect = suspects.get(kind)
    if suspect is not None:
        needs = suspect.needs
        wanted = list(needs.all)
        if needs.any:
            wanted.append(f"one of {', '.join(needs.any)}")
        rows = {
            "What": f"{suspect.title}: {suspect.explains}",
            "Needs": "; ".join(wanted) or "nothing beside the finding itself",
        }
        if needs.optional:
            rows["Better"] = f"with {', '.join(needs.optional)}"
        rows["Do"] = suspect.remedy or suspect.action.replace("_", " ")
        parts.append(f"suspect {suspect.name}\n" + _rows(**rows))
    return "\n".join(parts) or None


def nearest(topic: str) -> list[str]:
    """Codes, kinds and suspects that are written like `topic`."""
    names = {name.lower(): name for name in (*CODES, *CODES.values(), *(s.name for s in load_suspects()))}
    return [names[name] for name in difflib.get_close_matches(topic.lower(), list(names), n=3, cutoff=0.5)]


def checked_kinds() -> tuple[str, ...]:
    """The kinds that are looked for, in the order of their codes; the other codes are reserved."""
    looked_for = {kind for detector in detector_classes() for kind in detector.kinds}
    looked_for |= {
        "crash",
        "out_of_memory",
        "checkpoint_corrupt",
        "low_mfu",
    }  # told by events, checkpoint records, the plan of a run
    return tuple(kind for kind in CODES if kind in looked_for)


def overview(width: int = 100) -> str:
    """A line for each code and each suspect."""
    looked_for = checked_kinds()
    room = max(20, width - 34)
    lines = ["Findings"]
    for kind, code in CODES.items():
        text = EXPLANATIONS[kind].when if kind in looked_for else f"(not looked for yet) {EXPLANATIONS[kind].when}"
        lines.append(f"  {code} {kind:25} {_first(text, room)}")
    lines += ["", "Suspects"]
    lines += [f"  {suspect.name:31} {_first(suspect.explains, room)}" for suspect in load_suspects()]
    lines += ["", "diagnose explain CODE says what each needs and what to do"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _first(text: str, room: int) -> str:
    return textwrap.shorten(text.split(". ")[0].rstrip("."), room, placeholder=" …")


def _rows(**rows: str) -> str:
    lines = []
    for label, text in rows.items():
        lines += textwrap.wrap(text, 100, initial_indent=f"  {label:6} ", subsequent_indent=" " * 9)
    return "\n".join(lines) + "\n"
