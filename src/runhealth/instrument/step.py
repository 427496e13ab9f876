"""One training step as the loop sees it."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runhealth.instrument.batches import (
    content_hash,
    floating_inputs,
    is_tokens,
    nonfinite_share,
    on_host,
    split_batch,
    squared_lengths,
    token_statistics,
)
from runhealth.instrument.draft import BatchDraft, Draft
from runhealth.instrument.phases import Phase
from runhealth.instrument.tensors import largest_magnitude
from runhealth.storage.signals import STEP_SIGNALS, Scope

if TYPE_CHECKING:
    from runhealth.instrument.monitor import Monitor


class Step:
    """What `with monitor.step(n) as s:` gives. No method raises; numbers may stay on their device until the end."""

    def __init__(self, monitor: "Monitor", draft: Draft | None) -> None:
        self._monitor = monitor
        self._draft = draft

    def __enter__(self) -> "Step":
        if self._draft is not None:
            self._monitor._begin(self._draft)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            self._monitor._end(draft, error)

    def loss(self, loss: Tensor | float) -> None:
        """The loss in nats, as it is logged (not scaled by a GradScaler). Called for several micro-batches, the step's
        loss is their mean. A tensor of several elements counts by its mean."""
        draft = self._draft
        if draft is None:
            return
        with self._monitor._latch.guard("loss"), torch.no_grad():
            if not isinstance(loss, Tensor):
                draft.losses.append(float(loss))
            elif loss.numel():
                draft.losses.append(draft.scalars.put(loss if loss.numel() == 1 else loss.detach().float().mean()))

    def batch(
        self,
        x: object,
        y: object = None,
        *,
        shard: str = "",
        first_sample: int = -1,
        last_sample: int = -1,
        samples: int | None = None,
        shard_hash: int | None = None,
        manifest_hash: int | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        """One micro-batch. Best called before the batch goes to the device: from there it has to be copied back.

        `x` (batch, T) holds token ids, `y` (batch, T) the next token of each position; other tensors are hashed, and of
        floating-point ones the share that is not finite is recorded. A mapping with `input_ids` and `labels` is
        understood too; its other tensors count among the floating-point inputs. Samples are numbered within `shard`,
        bounds inclusive; `last_sample` follows from `first_sample` where it is left out. `lengths` in
        tokens, of the sequences that attention sees apart (padding left out, documents in a packed row each for
        itself), are recorded as the sum of their squares; where they are left out, a mapping's `attention_mask`
        (batch, T) of zeros and ones gives them.
        """
        draft = self._draft
        if draft is None:
            return
        monitor = self._monitor
        with monitor._latch.guard("batch"), torch.no_grad():
            inputs, labels, aligned = split_batch(x, y)
            count = samples if samples is not None else inputs.shape[0] if inputs is not None and inputs.dim() else 0
            if first_sample >= 0 and last_sample < 0 and count:
                last_sample = first_sample + count - 1
            batch = BatchDraft(
                shard=str(shard),
                first_sample=int(first_sample),
                last_sample=int(last_sample),
                samples=int(count),
                content_hash=None,
                shard_hash=shard_hash,
                manifest_hash=manifest_hash,
                ts_ns=monitor._clock.now_ns(),
                values={},
            )
            draft.batches.append(batch)  # before the statistics: where they fail, the batch is still on record
            squares = squared_lengths(x, lengths)
            if squares is not None:
                draft.values["sum_len_sq"] = draft.values.get("sum_len_sq", 0) + squares
            share = nonfinite_share([on_host(tensor) for tensor in floating_inputs(x)])
            if share is not None:
                batch.values["nonfinite_share"] = share
            if inputs is None:
                return
            inputs = on_host(inputs)
            batch.content_hash = content_hash(inputs)
            if is_tokens(inputs):
                draft.values["tokens"] = draft.values.get("tokens", 0) + inputs.numel()
                labels = on_host(labels) if labels is not None else None
                batch.values.update(token_statistics(inputs, labels, vocab_size=monitor._vocab_size, aligned=aligned))

    def logits(self, logits: Tensor) -> None:
        """Record the largest absolute logit. Called for several micro-batches, the largest of all counts."""
        draft = self._draft
        if draft is None:
            return
        with self._monitor._latch.guard("logits"), torch.no_grad():
            largest = largest_magnitude(logits)
            if largest is not None:
                draft.logits.append(draft.scalars.put(largest))

    def record(self, name: str, value: Tensor | float) -> None:
        """One number of this step under a name of the catalogue or a free one. Numbers of scope `global` are kept on
        rank 0 only."""
        draft = self._draft
        if draft is None:
            return
        with self._monitor._latch.guard(f"record {name}"):
            signal = STEP_SIGNALS.get(name)
            if signal is not None and signal.scope is Scope.GLOBAL and self._monitor.rank != 0:
                return
            if isinstance(value, Tensor):
                draft.values.pop(name, None)
                draft.promised[name] = draft.scalars.put(value.detach().reshape(()))
            else:
                draft.promised.pop(name, None)
                draft.values[name] = value if type(value) in (int, float) else float(value)

    def record_layer(self, layer: str, values: Mapping[str, float]) -> None:
        """Numbers of one layer, on the host, such as `{"logit_max": 12.5}`; written at this step."""
        if self._draft is not None:
            with self._monitor._latch.guard("record_layer"):
                numbers = {name: v if type(v) in (int, float) else float(v) for name, v in values.items()}
                self._draft.layer(layer).update(numbers)

    def phase(self, name: str) -> Phase:
        """Time a part: data, forward, backward, optimizer or checkpoint."""
        return self._monitor.phase(name)
