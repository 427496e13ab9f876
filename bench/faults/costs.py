"""What the kinds that are missed, or named wrong, would need. Printed for a kind only while the figures show it."""

WOULD_TELL = {
    "adam_staleness": "the age of each tensor's second moment",
    "checkpoint_corrupt": "the checksum of each layer at the save and after the load",
    "partial_load": "the checksum or norm of each layer at the save and after the load: the loss right after a resume "
    "looks alike for all that a load can lose",
    "moments_swapped": "a checksum of the optimizer's state at the save and after the load; the loss does not move",
    "squares_underflow": "a rule for climbs of `adam_rms` over tens of steps in one tensor; the signal is there",
    "lr_climb": "the rate that the schedule wants, beside the one that is used: a climb in a line looks like a warm-up",
    "scaled_log": "a rule that holds the loss against the evaluation, which did not move; both are recorded",
    "save_shadow": "a rule that folds step times by the time since the last save; they are recorded",
    "loader_loop": "a longer memory of batches: loops of more than a few batches come again too late",
    "wrong_lane": "the same step computed again on another device (`diagnose replay`): one rank's loss is odd, as with "
    "odd data",
    "wrong_tokenizer": "the identity of the tokenizer in the manifest: where few samples are hit, their statistics are "
    "within the habit and one rank's loss is all there is",
    "local_gradient": "nothing more: the odd rank is told first, its differing weights later; right at the end",
    "stale_bucket": "nothing more: right at the end",
    "sdc_sign": "larger batches: with four small ones the cosines of healthy ranks scatter as far",
    "sdc_exponent": "a recomputed step: a flipped exponent of a small number moves no norm",
    "sdc_scale": "a recomputed step: a few tensors of one rank, a few times as large, lie within its norm's scatter",
    "eval_drift": "more evaluations: at the lowest severity it lies within their scatter",
    "fp16_collapse": "overflow counts by tensor: one that costs the scale a halving or two lies within its habit",
    "long_sequences": "padding and length of each batch from its first step on",
}


def would_tell(name: str) -> str:
    return WOULD_TELL.get(name, "not looked into")
