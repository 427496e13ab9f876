"""Columns in place of records: many steps of one attempt in a handful of arrays.

A source that can read columns offers `blocks()` beside `records()`. Both say the same: a block stands for the records
that `StepBlock.records()` yields, in that order, and the diagnosis of blocks equals that of records.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from runhealth.storage.records import BatchRecord, LayerSample, Record, StepRecord

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One signal. `values` is float64 or int64; `present` has its shape, or is None where every value was measured.
    Values that are not present mean nothing. NaN and infinities that are present are measurements."""

    values: npt.NDArray[Any]
    present: Bools | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchColumns:
    """B micro-batches, sorted by (step, rank, micro_batch). `row` (B,) is the index of the step within the block.
    Hashes are kept as Python ints (they use all 64 bits), None where not known; `shards` (B,) indexes `shard_names`."""

    row: Ints
    rank: Ints
    micro_batch: Ints
    ts_ns: Ints
    shard_names: tuple[str, ...]
    shards: Ints
    first_sample: Ints
    last_sample: Ints
    samples: Ints
    content_hash: list[int | None]
    shard_hash: list[int | None]
    manifest_hash: list[int | None]
    columns: Mapping[str, Column] = field(default_factory=dict)  # each (B,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerColumns:
    """K layer samples, sorted by (step, rank, layer). `row` (K,) is the index of the step within the block; `layers`
    (K,) indexes `layer_names`."""

    row: Ints
    rank: Ints
    ts_ns: Ints
    layer_names: tuple[str, ...]
    layers: Ints
    columns: Mapping[str, Column] = field(default_factory=dict)  # each (K,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """n steps of one attempt on R ranks, each rank with a record at each step.

    `steps` (n,) ascends strictly; `ranks` ascends. `ts_ns` and the values of `columns` are (n, R). `others` holds
    checkpoints and events as (i, record): the record comes before step i of the block, or at its end where i = n.
    """

    attempt: int
    ranks: tuple[int, ...]
    steps: Ints
    ts_ns: Ints
    columns: Mapping[str, Column] = field(default_factory=dict)
    batches: BatchColumns | None = None
    layers: LayerColumns | None = None
    others: tuple[tuple[int, Record], ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def records(self) -> Iterator[Record]:
        """The records that the block stands for: per step those of `others`, then per rank the scalars, the batches
        and the layer samples of that rank."""
        others = list(self.others)
        batches = _by_row_and_rank(self.batches)
        layers = _by_row_and_rank(self.layers)
        names = list(self.columns.items())
        for i, step in enumerate(self.steps.tolist()):
            while others and others[0][0] <= i:
                yield others.pop(0)[1]
            for j, rank in enumerate(self.ranks):
                values = {
                    name: column.values[i, j].item()
                    for name, column in names
                    if column.present is None or column.present[i, j]
                }
                ts_ns = int(self.ts_ns[i, j])
                yield StepRecord(attempt=self.attempt, step=step, rank=rank, ts_ns=ts_ns, values=values)
                for k in batches.get((i, rank), ()):
                    assert self.batches is not None
                    yield batch_record(self.batches, k, self.attempt, step)
                for k in layers.get((i, rank), ()):
                    assert self.layers is not None
                    yield layer_sample(self.layers, k, self.attempt, step)
        for _, record in others:
            yield record


@runtime_checkable
class BlockSource(Protocol):
    """A RecordSource that also hands over columns. `blocks()` yields everything that `records()` yields, in the same
    order; what does not fit into a block (a step that a rank lacks, say) comes as single records."""

    def blocks(self) -> Iterator[StepBlock | Record]: ...


def batch_record(batches: BatchColumns, k: int, attempt: int, step: int) -> BatchRecord:
    """The k-th micro-batch as a record."""
    return BatchRecord(
        attempt=attempt,
        step=step,
        rank=int(batches.rank[k]),
        micro_batch=int(batches.micro_batch[k]),
        ts_ns=int(batches.ts_ns[k]),
        shard=batches.shard_names[batches.shards[k]],
        first_sample=int(batches.first_sample[k]),
        last_sample=int(batches.last_sample[k]),
        samples=int(batches.samples[k]),
        content_hash=batches.content_hash[k],
        shard_hash=batches.shard_hash[k],
        manifest_hash=batches.manifest_hash[k],
        values=_values(batches.columns, k),
    )


def layer_sample(layers: LayerColumns, k: int, attempt: int, step: int) -> LayerSample:
    """The k-th layer sample as a record."""
    return LayerSample(
        attempt=attempt,
        step=step,
        rank=int(layers.rank[k]),
        layer=layers.layer_names[layers.layers[k]],
        ts_ns=int(layers.ts_ns[k]),
        values=_values(layers.columns, k),
    )


def _values(columns: Mapping[str, Column], k: int) -> dict[str, float | int]:
    return {
        name: column.values[k].item() for name, column in columns.items() if column.present is None or column.present[k]
    }


def _by_row_and_rank(columns: BatchColumns | LayerColumns | None) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    if columns is not None:
        for k, key in enumerate(zip(columns.row.tolist(), columns.rank.tolist(), strict=True)):
            found.setdefault(key, []).append(k)
    return found
