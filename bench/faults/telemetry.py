"""What a run of the bench leaves behind: the records that the Monitor of a real run would have written. Never the truth
about a fault.

`python -m bench.faults real` names every signal that only one of the two has, and `docs/attach.md` says where each
comes from. Of those here a loop has to record itself:

- `t_comm_s`: no hook can tell the transfer from the waiting inside a collective; the trainer records it only where a
  fault makes a transfer slow;
- `stage`: the trainer records it in pipelines, where it means something;
- `router_load_max`: the trainer records it of its own experts;
- `sum_len_sq`: from lengths or a mask that the loop hands over; the trainer's sequences are all equally long.

`mem_allocated_bytes` and `mem_reserved_bytes` are of an accelerator. The gain of each sample, whose `nonfinite_share`
is written here always, is an input of the trainer only where a fault changes it. Layers are written every 5 steps here
and every `layers_every` (10) steps in a real run, memory each step here and every 10 steps there.
"""

import gzip
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash
from bench.faults.clock import WORLD, Times
from bench.faults.corpus import DATA
from bench.faults.world import Outcome, World

from runhealth.instrument.batches import nonfinite_share, token_statistics
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

LAYERS_EVERY = 5
BURST = 4.0  # as in runhealth.instrument.gradients: such a norm has its layers written whatever the cadence
HELD_BYTES, RESERVED_BYTES = 20 << 30, 24 << 30
EPOCH_STEPS = DATA.shards // WORLD * DATA.steps_per_visit


class Recorder:
    """Turns outcomes into records; one for each attempt of a run goes on where the last one was."""

    def __init__(self, world: World, start_ns: int = 0) -> None:
        self.world = world
        self.attempt = 0
        self.now_ns = start_ns
        self.norms: deque[float] = deque(maxlen=32)
        self._told_differences = 0  # steps
        self._precision_before: list[dict[str, dict[str, float]]] = [{} for _ in range(WORLD)]

    def started(self, step: int, checkpoint: int | None = None) -> list[Record]:
        """The events at the beginning of an attempt, from a checkpoint or from nothing."""
        records: list[Record] = [
            self.event(step, rank, "attempt_start", f"rank {rank} of {WORLD}", {"world_size": WORLD})
            for rank in range(WORLD)
        ]
        precision = self.world.precision
        data = {"precision": precision if precision != "moe" else "fp32", "clip_threshold": 1.0, "world_size": WORLD}
        records.append(self.event(step, 0, "config", "", data))
        if checkpoint is not None:
            path = f"checkpoints/step-{checkpoint:08d}"
            records.append(self.event(step, 0, "resume", f"from {path}", {"step": step}))
            records.append(self._checkpoint(checkpoint, CheckpointStatus.LOADED, 0.8))
        return records

    def event(
        self, step: int, rank: int, kind: str, message: str = "", data: Mapping[str, object] | None = None
    ) -> RunEvent:
        return RunEvent(
            attempt=self.attempt,
            step=step,
            rank=rank,
            kind=kind,
            message=message,
            ts_ns=self.now_ns,
            data=data or {},
        )

    def saved(self, step: int, seconds: float) -> list[Record]:
        return [
            self._checkpoint(step, CheckpointStatus.SAVED, seconds),
            self._checkpoint(step, CheckpointStatus.VERIFIED, seconds),
        ]

    def _checkpoint(self, step: int, status: CheckpointStatus, seconds: float) -> CheckpointRecord:
        return CheckpointRecord(
            attempt=self.attempt,
            step=step,
            rank=0,
            path=f"checkpoints/step-{step:08d}",
            status=status,
            ts_ns=self.now_ns,
            seconds=round(seconds, 3),
            size_bytes=447_000,
        )

    def wants_details(self, step: int) -> bool:
        return step % LAYERS_EVERY == 0

    def is_burst(self, outcome: Outcome) -> bool:
        norm = outcome.grad_norm
        return not math.isfinite(norm) or (len(self.norms) >= 8 and norm > BURST * statistics.median(self.norms))

    def step(
        self,
        step: int,
        outcome: Outcome,
        times: Times,
        *,
        eval_loss: float | None = None,
        checkpoint_s: float = 0.0,
        pause_s: float = 0.0,
        absent: tuple[int, ...] = (),
    ) -> list[Record]:
        """All records of a step, ordered by rank. `pause_s` is time that is not training. `absent` ranks write
        nothing."""
        self.now_ns += int((times.step_s + checkpoint_s + pause_s) * 1e9)
        records: list[Record] = []
        for rank in range(WORLD):
            if rank in absent:
                continue
            values = self._values(step, rank, outcome, times)
            values["t_step_s"] = times.step_s + pause_s + checkpoint_s
            if checkpoint_s:
                values["t_checkpoint_s"] = checkpoint_s
            if rank == 0 and eval_loss is not None:
                values["eval_loss"] = eval_loss
            for fault in self.world.faults[rank]:
                values = fault.logged(step, values)
            records.append(
                StepRecord(attempt=self.attempt, step=step, rank=rank, ts_ns=self.now_ns, values=_short(values))
            )
            records.extend(self._batches(step, rank, outcome))
            records.extend(self._layers(step, rank, outcome))
        if math.isfinite(outcome.grad_norm):
            self.norms.append(outcome.grad_norm)
        return records

    def _values(self, step: int, rank: int, out: Outcome, times: Times) -> dict[str, Scalar]:
        world = self.world
        held = sum(fault.held_bytes(step) for fault in world.faults[rank])
        wobble = int.from_bytes(xxhash.xxh3_64_digest(f"{world.config.seed}/{step}/{rank}".encode())[:3], "big")
        values: dict[str, Scalar] = {
            "loss": out.losses[rank],
            "grad_norm_rank": out.grad_norms[rank],
            "nonfinite_count": out.nonfinite[rank],
            "logit_max": out.logit_max[rank],
            "attn_logit_max": out.attn_logit_max[rank],
            "param_checksum": out.checksums[rank],
            "tokens": DATA.batch_size * DATA.seq_len,
            "t_data_s": float(times.data[rank]),
            "t_forward_s": float(times.forward[rank]),
            "t_backward_s": float(times.backward[rank]),
            "t_wait_s": float(times.wait[rank]),
            "t_comm_s": float(times.comm[rank]),
            "t_gc_s": float(times.gc[rank]),
            "t_optimizer_s": float(times.optimizer[rank]),
            "sum_len_sq": int(times.sum_len_sq[rank]),
            "stage": rank // (WORLD // 2) if world.config.seed % 2 else 0,
            "mem_allocated_bytes": HELD_BYTES + wobble * 4 + held,
            "mem_reserved_bytes": RESERVED_BYTES + max(0, held - (2 << 30)),
            "mem_rss_bytes": (4 << 30) + wobble,
        }
        for name, by_rank in (("grad_projection_rank", out.projections), ("grad_cosine_rank", out.cosines)):
            value = by_rank[rank]
            if value is not None:
                values[name] = value
        if out.router_load_max:
            values["router_load_max"] = out.router_load_max[rank]
        if world.precision == "fp16":
            values["overflow_count"] = out.nonfinite[rank]
        if world.precision == "fp8":
            values.update(self._fp8(rank, out))
        if rank == 0:
            values.update(
                grad_norm=out.grad_norm,
                clip_threshold=world.config.optim.clip_threshold,
                clip_coef=out.clip_coef,
                lr=out.lr,
                update_ratio=out.update_ratio,
                weight_norm=out.weight_norm,
                adam_rms=out.adam_rms,
                second_moment_norm=out.second_moment_norm,
                consumed_samples=(step + 1) * WORLD * DATA.batch_size,
                epoch=(step + 1) / EPOCH_STEPS,
                **out.hyper,  # every step, as update_ratio
            )
            if world.precision == "fp16":
                values.update(loss_scale=out.loss_scale, step_skipped=int(out.skipped))
        return values

    def _fp8(self, rank: int, out: Outcome) -> dict[str, Scalar]:
        """Counts of this step out of the modules' running ones; kept for the layer samples as well."""
        before = self._precision_before[rank]
        stats = out.precision[rank]
        overflow = underflow = 0
        ratio = 0.0
        for tensor, now in stats.items():
            last = before.get(tensor, {})
            for key in ("overflow_count", "underflow_count", "elements"):
                count = now[key] - last.get(key, 0.0)
                now[f"step_{key}"] = count if count >= 0 else now[key]
            overflow += int(now["step_overflow_count"])
            underflow += int(now["step_underflow_count"])
            if now["amax_believed"] > 0:
                ratio = max(ratio, now["amax"] / now["amax_believed"])
        self._precision_before[rank] = stats
        return {"overflow_count": overflow, "underflow_count": underflow, "amax_ratio": ratio}

    def _batches(self, step: int, rank: int, out: Outcome) -> Iterator[BatchRecord]:
        batch, reader = out.batches[rank], self.world.readers[rank]
        for part in batch.parts:
            shard = reader.shard(part.shard)
            chosen = list(part.positions)
            inputs, labels = batch.inputs[chosen], batch.labels[chosen]
            values = token_statistics(inputs, labels, vocab_size=256, aligned=False)
            share = nonfinite_share([batch.gain[chosen]])
            if share is not None:
                values["nonfinite_share"] = share
            yield BatchRecord(
                attempt=self.attempt,
                step=step,
                rank=rank,
                ts_ns=self.now_ns,
                shard=shard.name,
                first_sample=min(part.samples),
                last_sample=max(part.samples),
                samples=len(part.samples),
                content_hash=xxhash.xxh3_64_intdigest(inputs.contiguous().numpy().data),
                shard_hash=shard.shard_hash,
                manifest_hash=shard.manifest_hash,
                values=_short(values),
            )

    def _layers(self, step: int, rank: int, out: Outcome) -> Iterator[LayerSample]:
        samples: dict[str, dict[str, Scalar]] = {}
        if rank == 0 and (self.wants_details(step) or self.is_burst(out)):
            samples = {layer: dict(values) for layer, values in out.layer_values.items()}
        if out.layer_checksums and (self.wants_details(step) or self._told_differences < 2):
            self._told_differences += rank == WORLD - 1
            for layer, checksum in out.layer_checksums[rank].items():
                samples.setdefault(layer, {})["param_checksum"] = checksum
        for layer, values in samples.items():
            yield self._layer(step, rank, layer, values)
        if out.precision:
            for tensor, now in out.precision[rank].items():
                if self.wants_details(step) or now["step_overflow_count"] > 0:
                    stats: dict[str, Scalar] = {key: now[key] for key in ("amax", "amax_believed")}
                    for key in ("overflow_count", "underflow_count", "elements"):
                        stats[key] = int(now[f"step_{key}"])
                    yield self._layer(step, rank, tensor, stats)

    def _layer(self, step: int, rank: int, layer: str, values: Mapping[str, Scalar]) -> LayerSample:
        return LayerSample(
            attempt=self.attempt, step=step, rank=rank, layer=layer, ts_ns=self.now_ns, values=_short(values)
        )


def _short(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Seven digits are what a single-precision number has."""
    return {k: v if isinstance(v, int) or not math.isfinite(v) else float(f"{v:.7g}") for k, v in values.items()}


# ------------------------------------------------------------------------------------------------------------- files

_KINDS = {"S": StepRecord, "L": LayerSample, "B": BatchRecord, "C": CheckpointRecord, "E": RunEvent}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


def write(path: Path, records: Iterable[Record]) -> None:
    """One JSON array a line: the letter of the kind, then the fields in the order of the class. NaN and Infinity are
    written as Python's json has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with gzip.open(temporary, "wt", compresslevel=1, encoding="utf-8") as file:
        for record in records:
            fields = [getattr(record, name) for name in type(record).__slots__]
            file.write(json.dumps([_LETTERS[type(record)], *fields], separators=(",", ":")) + "\n")
    temporary.replace(path)


def read(path: Path) -> Iterator[Record]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            letter, *fields = json.loads(line)
            kind: Any = _KINDS[letter]
            values = dict(zip(kind.__slots__, fields, strict=True))
            if letter == "C":
                values["status"] = CheckpointStatus(values["status"])
            yield kind(**values)
