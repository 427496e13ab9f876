"""What the ranks of the multi-process tests run. Loaded by path in children of the forkserver (`run` in conftest.py):
test modules cannot be imported by name."""

import json
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from runhealth.trainer.config import TrainConfig
from runhealth.trainer.model import build, next_byte_loss
from runhealth.trainer.precision.loss_scale import LossScaler
from runhealth.trainer.precision.policy import needs_loss_scale

JOBS: dict[str, Callable[..., Any]] = {}


def job(function: Callable[..., Any]) -> Callable[..., Any]:
    JOBS[function.__name__] = function
    return function


def batch(config: TrainConfig, step: int) -> Tensor:
    """The global batch of a step, int64 [dp x batch_size, seq + 1]; data-parallel rank r takes the r-th part."""
    generator = torch.Generator().manual_seed(1_000 + step)
    size = (config.dp * config.data.batch_size, config.data.seq_len + 1)
    return torch.randint(0, 40, size, generator=generator)


def alone(config: TrainConfig, steps: int) -> dict[str, list[float]]:
    """Plain single-process training, with nothing of the trainer but the model: losses and norms before clipping."""
    model = build(config.model, config.data.seq_len, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        tokens = batch(config, step)
        loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_threshold)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms}


class Watch:
    """A watcher that keeps the losses."""

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.losses: list[float] = []
        self._scaler = scaler

    def phase(self, _name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def forward_done(self, loss: Tensor, _logits: Tensor) -> None:
        self.losses.append(float(loss.detach()))

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scaler is None else self._scaler.scale(loss)


@job
def layout(rank: int, config: TrainConfig, steps: int) -> dict[str, Any]:
    """Train in the config's layout; this rank's losses (None where it has none), norms, and the whole weights' sum."""
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    scaler = LossScaler(initial_scale=1024.0) if needs_loss_scale(config.model.precision) else None
    engine.wrap()
    losses, norms = [], []
    for step in range(steps):
        watch = Watch(scaler)
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        engine.train(tokens[:, :-1], tokens[:, 1:], watch)
        engine.end_step()
        if scaler is not None:
            assert not scaler.agree(optimizer)
        norm = engine.norm()
        norms.append(float(norm))
        nn.utils.clip_grads_with_norm_(engine.part.parameters(), config.optim.clip_threshold, norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(sum(watch.losses) / len(watch.losses) if watch.losses else None)
    tokens = batch(config, 0)[:4]
    logits = engine.logits(tokens[:, :-1])
    return {
        "losses": losses,
        "norms": norms,
        "plain": [name for name, p in engine.part.named_parameters() if not isinstance(p, DTensor)],
        "local": {name: _local(p).numel() for name, p in engine.part.named_parameters()},
        "eval": None if logits is None else float(next_byte_loss(logits, tokens[:, 1:])),
    }


def _step(engine: Any, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> tuple[float | None, float]:
    """The mean loss of this rank's rows, where it knows one, and the norm."""
    watch = Watch()
    tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
    engine.train(tokens[:, :-1], tokens[:, 1:], watch)
    engine.end_step()
    norm = engine.norm()
    nn.utils.clip_grads_with_norm_(engine.part.parameters(), config.optim.clip_threshold, norm)
    optimizer.step()
    optimizer.zero_grad()
    return (sum(watch.losses) / len(watch.losses) if watch.losses else None), float(norm)


def _hashes(engine: Any, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """xxh3 of every whole tensor of parameters and moments that this rank has a part of."""
    import xxhash

    from runhealth.trainer.dcp import state_of

    found = {}
    for name, value in sorted(state_of(engine.part, optimizer, 0, 0).items()):
        if not name.startswith(("local.", "trainer.")):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = xxhash.xxh3_64_hexdigest(whole.detach().contiguous().numpy().tobytes())
    return found


@job
def save_layout(
    rank: int, config: TrainConfig, base: str, steps: int, more: int, background: bool, s3: dict[str, str] | None = None
) -> dict[str, Any]:
    """Train, start a save, train on at once: hashes when the save was started and at the end, and what became of it."""
    import fsspec

    from runhealth.trainer.async_save import Saver
    from runhealth.trainer.dcp import state_of
    from runhealth.trainer.parallel.engine import Engine

    fsspec.config.conf.setdefault("s3", {}).update(s3 or {})
    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    engine.wrap()
    saver = Saver(base, attempt=0, background=background, timeout_s=20.0)
    for step in range(steps):
        _step(engine, optimizer, config, step)
    saved = _hashes(engine, optimizer)
    saver.start(state_of(engine.part, optimizer, steps, rank), steps)
    for step in range(steps, steps + more):
        _step(engine, optimizer, config, step)
    outcome = saver.wait()
    return {"saved": saved, "end": _hashes(engine, optimizer), "outcome": outcome}


@job
def load_layout(rank: int, config: TrainConfig, folder: str, more: int) -> dict[str, Any]:
    """Load into fresh ranks of this layout, train on: hashes after both, or the error."""
    from runhealth.trainer import dcp
    from runhealth.trainer.checkpoints import UnloadableError
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    try:
        first = dcp.load(folder, engine.part, optimizer, rank=rank)
    except UnloadableError as error:
        return {"error": str(error)}
    loaded = _hashes(engine, optimizer)
    engine.wrap()
    done = [_step(engine, optimizer, config, step) for step in range(first, first + more)]
    return {
        "step": first,
        "loaded": loaded,
        "end": _hashes(engine, optimizer),
        "losses": [loss for loss, _ in done],
        "norms": [norm for _, norm in done],
    }


@job
def save_on_a_full_disk(rank: int, base: str) -> Any:
    """Two saves in the background; the disk of rank 1 is full at the first."""
    import errno

    from torch.distributed.checkpoint.filesystem import FileSystem

    from runhealth.trainer.async_save import Saver

    saver = Saver(base, attempt=0, background=True, timeout_s=20.0)
    state = {"trainer.step": torch.tensor(1), f"local.r{rank:05d}.x": torch.arange(1000.0) + rank}
    real = FileSystem.create_stream

    def full(*_arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        FileSystem.create_stream = full
    saver.start(state, 1)
    first = saver.wait()
    FileSystem.create_stream = real
    saver.start(state, 2)
    return first, saver.wait()


@job
def save_beyond_the_file_limit(rank: int, base: str) -> Any:
    """Rank 1 may write files of 4 kB only, and saves one of 80 kB: a short write in the middle of a tensor."""
    import resource

    from runhealth.trainer.async_save import save

    state = {"trainer.step": torch.tensor(1), f"local.r{rank:05d}.x": torch.arange(20_000.0) + rank}
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
    return save(base, state, step=1, attempt=0)


@job
def scaled_overflow(rank: int, config: TrainConfig, bad_rank: int) -> dict[str, Any]:
    """Two steps of which one rank's gradient is infinite in the first: whether each rank's weights moved, and the
    scale after each step."""
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    scaler = LossScaler(initial_scale=256.0)
    engine.wrap()
    moved, scales = [], []
    for step in range(2):
        before = [_local(p).detach().clone() for p in engine.part.parameters()]
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        engine.train(tokens[:, :-1], tokens[:, 1:], Watch(scaler))
        if step == 0 and rank == bad_rank:
            first = next(p for p in engine.part.parameters() if p.grad is not None and _local(p.grad).numel())
            _local(first.grad).view(-1)[0] = torch.inf
        skipped = scaler.agree(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, _local(b)) for a, b in zip(before, engine.part.parameters(), strict=True)))
        scales.append(float(scaler.state.scale))
        assert skipped is not moved[-1]
    return {"moved": moved, "scales": scales}


@job
def histories(rank: int, config: TrainConfig, steps: int) -> dict[str, Any]:
    """fp8 training: amax histories and counters of every scaled tensor, and the gradients of the last step."""
    from runhealth.trainer.parallel.engine import Engine
    from runhealth.trainer.precision.fp8 import scales

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    engine.wrap()
    for step in range(steps):
        optimizer.zero_grad()
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        engine.train(tokens[:, :-1], tokens[:, 1:], Watch())
        engine.end_step()
        optimizer.step()
    return {
        "history": {name: scale.history.tolist() for name, scale in scales(engine.part)},
        "elements": {name: scale.elements for name, scale in scales(engine.part)},
        "grads": {name: _local(p.grad).tolist() for name, p in engine.part.named_parameters()},
    }


@job
def collectives(rank: int, config: TrainConfig) -> dict[str, Any]:
    """What the process groups did in the third step, from the Flight Recorder, and the bytes that the stages of a
    pipeline handed over to be sent, which it does not see."""
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    engine.wrap()
    sent = [0]
    for stage in engine.pipeline._built if engine.pipeline else ():
        for method in ("get_fwd_send_ops", "get_bwd_send_ops"):
            setattr(stage, method, _counting(getattr(stage, method), sent))
    for step in range(3):  # DDP sorts its buckets after the first
        last = max((entry["record_id"] for entry in _recorded()), default=-1)
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        sent[0] = 0
        engine.train(tokens[:, :-1], tokens[:, 1:], Watch())
        engine.end_step()
        optimizer.step()
        optimizer.zero_grad()
    return {"entries": [entry for entry in _recorded() if entry["record_id"] > last], "sent": sent[0]}


def _recorded() -> list[dict[str, Any]]:
    return json.loads(c10d._dump_fr_trace_json()).get("entries", [])


def _counting(inner: Callable[..., Any], sent: list[int]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        operations = inner(*args)
        sent[0] += sum(operation.tensor.nbytes for operation in operations)
        return operations

    return counted


@job
def memory(rank: int, config: TrainConfig) -> dict[str, int]:
    """Memory by part in the second step, before the optimizer's."""
    from runhealth.trainer.memory import ActivationMeter, state_bytes
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    engine.wrap()
    found: dict[str, int] = {}
    for step in range(2):
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        meter = ActivationMeter(engine.part)
        with meter.measure():
            engine.train(tokens[:, :-1], tokens[:, 1:], Watch())
        found = {**state_bytes(engine.part, optimizer), "activations": meter.peak_bytes}
        optimizer.step()
        optimizer.zero_grad()
    return found


@job
def waiting(rank: int, config: TrainConfig, slow_rank: int, stall_s: float) -> dict[str, float]:
    """Seconds by phase, over three steps in which one rank sleeps before its forward pass."""
    from runhealth.instrument.clock import Clock
    from runhealth.instrument.phases import Phase, Phases
    from runhealth.trainer.parallel.engine import Engine

    phases = Phases(Clock())
    watch = Watch()
    watch.phase = lambda name: Phase(phases, name)  # type: ignore[method-assign]
    engine = Engine(config, rank)
    optimizer = engine.make_optimizer()
    engine.wrap()
    engine.time_waiting(watch.phase)
    for step in range(4):
        if step == 1:
            phases.take()  # the first step makes connections
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        with watch.phase("forward"):
            time.sleep(stall_s if rank == slow_rank else 0.0)
        engine.train(tokens[:, :-1], tokens[:, 1:], watch)
        engine.end_step()
        with watch.phase("wait"):
            engine.norm()
        optimizer.step()
        optimizer.zero_grad()
    return phases.take()


@job
def hang(rank: int, config: TrainConfig, hung_rank: int) -> dict[str, Any]:
    """One rank stops in its second step: what the others are told, and after how many seconds."""
    from runhealth.trainer.parallel.engine import Engine

    engine = Engine(config, rank)
    engine.wrap()
    store = dist.distributed_c10d._get_default_store()
    start_s, said = time.monotonic(), ""
    for step in range(2):
        start_s = time.monotonic()
        if rank == hung_rank and step:
            store.wait([f"told {other}" for other in range(config.world) if other != rank], timedelta(seconds=60))
            break
        tokens = batch(config, step).chunk(config.dp)[engine.place.dp]
        try:
            engine.train(tokens[:, :-1], tokens[:, 1:], Watch())
            engine.norm()
        except RuntimeError as error:
            said = str(error)
            break
    seconds = time.monotonic() - start_s
    store.set(f"told {rank}", "1")
    return {"said": said, "seconds": seconds}


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def main(name: str, rank: int, world: int, rendezvous: str, arguments: tuple[Any, ...], results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20000"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        result = JOBS[name](rank, *arguments)
        if name != "hang":  # whose groups are beyond use
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    results.put((rank, result, ""))


if "work" in globals():  # set by `run`
    main(*globals()["work"])
