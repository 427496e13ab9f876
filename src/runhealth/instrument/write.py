"""From a draft to records."""

import math
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from runhealth.instrument.draft import Draft
from runhealth.instrument.scalars import Fetched
from runhealth.storage.records import BatchRecord, EventKind, LayerSample, Record, Scalar, StepRecord
from runhealth.storage.signals import LAYER_SIGNALS, STEP_SIGNALS, Dtype, Signal

_WHOLE = (Dtype.I64, Dtype.U64)


def step_records(draft: Draft, *, rank: int, ts_ns: int, dropped: Callable[[], int]) -> Callable[[int], list[Record]]:
    """What builds the records of a step once the attempt is known: the step, its batches, its layers."""
    losses = [loss.values[0] if isinstance(loss, Fetched) and loss.values else loss for loss in draft.losses]
    known = [loss for loss in losses if not isinstance(loss, Fetched)]  # the rest was lost with the fetch
    if known:
        draft.values["loss"] = sum(known) / len(known)
    if len(draft.batches) == len(known) == len(losses):
        for batch, loss in zip(draft.batches, known, strict=True):
            batch.values["batch_loss"] = loss
    for name, promise in draft.promised.items():
        if promise.values:
            draft.values[name] = promise.value
    logits = [promise.value for promise in draft.logits if promise.values]
    if logits:
        draft.values["logit_max"] = math.nan if any(map(math.isnan, logits)) else max(logits)
    for phase, seconds in draft.phases_s.items():
        draft.values[f"t_{phase}_s"] = seconds

    def build(attempt: int) -> list[Record]:
        draft.values["dropped"] = dropped()
        key = {"attempt": attempt, "step": draft.number, "rank": rank}
        records: list[Record] = []  # in the order in which a reader yields them
        for number, batch in enumerate(draft.batches):
            records.append(
                BatchRecord(
                    **key,
                    micro_batch=number,
                    ts_ns=batch.ts_ns,
                    shard=batch.shard,
                    first_sample=batch.first_sample,
                    last_sample=batch.last_sample,
                    samples=batch.samples,
                    content_hash=batch.content_hash,
                    shard_hash=batch.shard_hash,
                    manifest_hash=batch.manifest_hash,
                    values=batch.values,
                )
            )
        for layer, values in draft.layers.items():
            records.append(LayerSample(**key, layer=layer, ts_ns=ts_ns, values=_typed(values, LAYER_SIGNALS)))
        records.append(StepRecord(**key, ts_ns=ts_ns, values=_typed(draft.values, STEP_SIGNALS)))
        return records

    return build


def _typed(values: Mapping[str, Scalar], catalogue: Mapping[str, Signal]) -> dict[str, Scalar]:
    """Counters as ints, as the catalogue has them."""
    return {
        name: int(value) if name in catalogue and catalogue[name].dtype in _WHOLE and math.isfinite(value) else value
        for name, value in values.items()
    }


def exception_event(error: BaseException) -> dict[str, Any]:
    """Kind, message and data of the event for an exception of the loop's own."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "kind": EventKind.EXCEPTION,
        "message": f"{type(error).__name__}: {error}"[:500],
        "data": {"type": type(error).__name__, "traceback": "".join(frames)[-4000:]},
    }
