"""Rows of the published tables back into records: whole columns at a time, because a run has many rows."""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import polars as pl

from runhealth.storage.records import (
    BatchRecord,
    CheckpointRecord,
    CheckpointStatus,
    LayerSample,
    Record,
    RunEvent,
    Scalar,
    StepRecord,
)

Names = Mapping[str, str]  # column -> signal


def _columns(frame: pl.DataFrame, *names: str) -> list[list[Any]]:
    return [frame[name].to_list() for name in names]


def _values(frame: pl.DataFrame, names: Names) -> Sequence[dict[str, Scalar]]:
    """One dict a row; NULL means not measured and gives no key."""
    full: list[str] = []
    full_columns: list[list[Any]] = []
    sparse: list[tuple[str, list[Any]]] = []
    for column, name in names.items():
        series = frame[column]
        nulls = series.null_count()
        if nulls == len(series):
            continue
        values = series.to_list()
        if isinstance(series.dtype, pl.Decimal):
            values = [None if value is None else int(value) for value in values]
        if nulls:
            sparse.append((name, values))
        else:
            full.append(name)
            full_columns.append(values)
    if full:
        rows: list[dict[str, Scalar]] = [dict(zip(full, row, strict=True)) for row in zip(*full_columns, strict=True)]
    else:
        rows = [{} for _ in range(len(frame))]
    for name, values in sparse:
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[name] = value
    return rows


def _steps(frame: pl.DataFrame, names: Names) -> list[Record]:
    columns = _columns(frame, "attempt", "step", "rank", "ts_ns")
    return [
        StepRecord(attempt=attempt, step=step, rank=rank, ts_ns=ts_ns, values=values)
        for attempt, step, rank, ts_ns, values in zip(*columns, _values(frame, names), strict=True)
    ]


def _layers(frame: pl.DataFrame, names: Names) -> list[Record]:
    columns = _columns(frame, "attempt", "step", "rank", "ts_ns", "layer")
    return [
        LayerSample(attempt=attempt, step=step, rank=rank, ts_ns=ts_ns, layer=layer, values=values)
        for attempt, step, rank, ts_ns, layer, values in zip(*columns, _values(frame, names), strict=True)
    ]


def _batches(frame: pl.DataFrame, names: Names) -> list[Record]:
    columns = _columns(
        frame, "attempt", "step", "rank", "ts_ns", "micro_batch", "shard", "first_sample", "last_sample", "samples",
        "content_hash", "shard_hash", "manifest_hash",
    )  # fmt: skip
    return [
        BatchRecord(
            attempt=attempt, step=step, rank=rank, ts_ns=ts_ns, micro_batch=micro_batch, shard=shard,
            first_sample=first, last_sample=last, samples=samples, content_hash=content, shard_hash=shard_hash,
            manifest_hash=manifest, values=values,
        )
        for attempt, step, rank, ts_ns, micro_batch, shard, first, last, samples, content, shard_hash, manifest, values
        in zip(*columns, _values(frame, names), strict=True)
    ]  # fmt: skip


def _checkpoints(frame: pl.DataFrame, _: Names) -> list[Record]:
    return [CheckpointRecord(**{**row, "status": CheckpointStatus(row["status"])}) for row in frame.to_dicts()]


def _events(frame: pl.DataFrame, _: Names) -> list[Record]:
    return [RunEvent(**{**row, "data": json.loads(row["data"])}) for row in frame.to_dicts()]


Builder = Callable[[pl.DataFrame, Names], list[Record]]
# Table, how it becomes records, and what its rows of one step and rank are sorted by; in the order in which they come.
OTHERS: tuple[tuple[str, Builder, tuple[str, ...]], ...] = (("events", _events, ()), ("checkpoints", _checkpoints, ()))
ROWS: tuple[tuple[str, Builder, tuple[str, ...]], ...] = (
    ("steps", _steps, ()),
    ("batches", _batches, ("micro_batch",)),
    ("layers", _layers, ("layer",)),
)


def build_sorted(
    tables: Sequence[tuple[str, Builder, tuple[str, ...]]],
    frames: Mapping[str, pl.DataFrame],
    names: Mapping[str, Names],
) -> list[Record]:
    """The records of one attempt in these tables (OTHERS or ROWS), ordered by step and rank."""
    records: list[Record] = []
    for name, build, within in tables:
        frame = frames.get(name)
        if frame is not None and not frame.is_empty():
            records += build(frame.sort(within, maintain_order=True) if within else frame, names.get(name, {}))
    records.sort(key=attrgetter("step", "rank"))  # stable: keeps the order of tables and of arrival
    return records
