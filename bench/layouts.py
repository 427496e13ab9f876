"""What each layout costs on this machine: tokens/s, MFU, CPU time and memory by part; and what the trainer costs beside
a plain DDP loop written by hand.

Every layout trains the same model (4 layers, width 128, sequence 128) on the same global batch of 16 sequences, through
the trainer's own step with its monitor. Ranks beyond the cores share them, so tokens/s says what a layout costs here,
not what it would bring on as many devices. Wall time is the best of a few steps (other load only adds to it), CPU time
the median, of the rank that needed most. MFU is by PaLM's convention against the fastest float32 (bfloat16) matrix
product of one thread, times the cores in use.

Trainer and plain loop take turns step by step in the same processes; the ratio is that of their CPU times. Overlap is
the share of the time in which gradients are reduced that the backward pass hides. Prints one JSON object as its last
line; exits with 1 if the trainer's step costs over 3 % more than the plain one.

    OMP_NUM_THREADS=1 python bench/layouts.py [--layouts ddp-2 3d …] [--steps 6] [--pairs 60]
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

GLOBAL_BATCH = 16
LIMIT = 1.03
BUCKETS_MB = (1, 25)
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "single": (1, {}, "fp32"),
    "single-full-recomputation": (1, {"recompute": "full"}, "fp32"),
    "single-selective-recomputation": (1, {"recompute": "selective"}, "fp32"),
    "single-fp8": (1, {}, "fp8"),
    "ddp-2": (2, {}, "fp32"),
    "ddp-2-bf16": (2, {}, "bf16"),
    "ddp-4": (4, {}, "fp32"),
    "zero1-2": (2, {"kind": "zero1"}, "fp32"),
    "zero2-2": (2, {"kind": "zero2"}, "fp32"),
    "zero3-2": (2, {"kind": "zero3"}, "fp32"),
    "zero3-2-bf16": (2, {"kind": "zero3"}, "bf16"),
    "zero3-4": (4, {"kind": "zero3"}, "fp32"),
    "hsdp-2x2": (4, {"kind": "hsdp", "replicas": 2}, "fp32"),
    "tp-2": (2, {"tp": 2}, "fp32"),
    "zero3-2-tp-2": (4, {"kind": "zero3", "tp": 2}, "fp32"),
    "gpipe-2": (2, {"pp": 2, "schedule": "gpipe", "microbatches": 8}, "fp32"),
    "1f1b-2": (2, {"pp": 2, "microbatches": 8}, "fp32"),
    "interleaved-2": (2, {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2, "microbatches": 8}, "fp32"),
    "1f1b-4": (4, {"pp": 4, "microbatches": 8}, "fp32"),
    "1f1b-2-ddp-2": (4, {"pp": 2, "microbatches": 4}, "fp32"),
    "3d": (8, {"pp": 2, "tp": 2, "kind": "zero3", "microbatches": 4}, "fp32"),
}


def configured(name: str) -> Any:
    from runhealth.trainer.config import CheckpointConfig, ModelConfig, ParallelConfig, TrainConfig
    from runhealth.trainer.data import DataConfig

    world, parallel, precision = LAYOUTS[name]
    chosen = ParallelConfig(**parallel)
    ranks = world // (chosen.tp * chosen.pp)
    return TrainConfig(
        steps=1_000,
        seed=1,
        world=world,
        data=DataConfig(shards=8, shard_bytes=32_768, seq_len=128, batch_size=GLOBAL_BATCH // ranks),
        model=ModelConfig(layers=4, width=128, heads=4, ffn_width=384, precision=precision, fused=False),
        parallel=chosen,
        checkpoint=CheckpointConfig(every=1_000),
    )


def join(rank: int, world: int, rendezvous: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=120))


def trainer_for(config: Any, folder: str) -> Any:
    from runhealth.trainer.data import data_folder
    from runhealth.trainer.launch import LaunchSpec
    from runhealth.trainer.loop import Trainer

    os.environ["RUNHEALTH_ATTEMPT"] = "0"
    spec = LaunchSpec(
        run="bench",
        store=folder,
        run_path=f"{folder}/bench",
        data_path=data_folder(folder, config.data),
        attempt=0,
        config=config,
        stop_step=config.steps,
    )
    trainer = Trainer(spec)
    trainer._announced = True  # prints nothing
    trainer._progress_at_s = float("inf")
    return trainer


def layout_main(rank: int, config: Any, folder: str, steps: int, results: Any) -> None:
    """Seconds of wall and CPU of each step after the first two, and memory by part."""
    import torch.distributed as dist

    join(rank, config.world, f"file://{folder}/rendezvous")
    trainer = trainer_for(config, folder)
    walls, cpus = [], []
    for step in range(steps + 2):
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        trainer._train_step(step)
        cpus.append(time.process_time() - cpu_s)
        dist.barrier()
        walls.append(time.perf_counter() - wall_s)
    numbers = trainer.numbers
    results.put((rank, {"walls": walls[2:], "cpus": cpus[2:], "memory": numbers.memory, "peak": numbers.peak_flops_s}))
    trainer.monitor.close()
    dist.barrier()
    dist.destroy_process_group()


def plain_main(rank: int, config: Any, folder: str, pairs: int, results: Any) -> None:
    """CPU seconds of steps of the trainer and of a plain loop, in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from runhealth.trainer.model import build

    join(rank, config.world, f"file://{folder}/rendezvous")
    trainer = trainer_for(config, folder)
    model = DistributedDataParallel(build(config.model, config.data.seq_len, config.seed), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def plain(step: int) -> None:
        tokens = torch.from_numpy(trainer.reader.rows(trainer.plan.batch(step, rank)))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss.item()  # loops log their loss

    times: dict[str, list[float]] = {"trainer": [], "plain": []}
    loops: tuple[tuple[str, Callable[[int], None]], ...] = (("trainer", trainer._train_step), ("plain", plain))
    for pair in range(pairs + 3):
        for name, loop in loops if pair % 2 else reversed(loops):
            dist.barrier()
            cpu_s = time.process_time()
            loop(pair)
            if pair >= 3:
                times[name].append(time.process_time() - cpu_s)
    results.put((rank, times))
    trainer.monitor.close()
    dist.barrier()
    dist.destroy_process_group()


def overlap_main(rank: int, config: Any, folder: str, steps: int, results: Any) -> None:
    """The share of the reduce that the backward pass hides, by size of DDP's buckets; with FSDP on gloo it is none."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from runhealth.instrument.ddp import allreduce_mean
    from runhealth.trainer.model import build, next_byte_loss

    join(rank, config.world, f"file://{folder}/rendezvous")
    tokens = torch.randint(0, 256, (config.data.batch_size, config.data.seq_len + 1))
    found = {}
    for cap in BUCKETS_MB:
        model = DistributedDataParallel(
            build(config.model, config.data.seq_len, config.seed), bucket_cap_mb=cap, broadcast_buffers=False
        )
        launched: list[float] = []
        ended: list[float] = []

        def hook(group, bucket, launched=launched, ended=ended):  # type: ignore[no-untyped-def]  # DDP checks them
            launched.append(time.perf_counter())

            def arrived(done: Any) -> Any:
                ended.append(time.perf_counter())
                return done.value()

            return allreduce_mean(group, bucket).then(arrived)

        model.register_comm_hook(model.process_group, hook)
        shares, buckets = [], 0
        for step in range(steps + 2):
            launched.clear()
            ended.clear()
            next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            if step >= 2:  # DDP sorts its buckets after the first step
                reducing = _union(list(zip(launched, sorted(ended), strict=True)))
                shares.append(1.0 - max(0.0, max(ended) - max(launched)) / reducing)
                buckets = len(launched)
        found[str(cap)] = {"buckets": buckets, "hidden": statistics.median(shares)}
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def _union(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def on_ranks(main: Callable[..., None], config: Any, *arguments: Any) -> list[Any]:
    from runhealth.storage.store import Store
    from runhealth.trainer.data import data_folder, pack
    from runhealth.trainer.supervisor import create

    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        pack(data_folder(folder, config.data), config.data)
        store = Store(folder)
        store.claim_attempt(create(store, "bench", config), "bench")
        ranks = [
            context.Process(target=main, args=(rank, config, folder, *arguments, results), daemon=True)
            for rank in range(config.world)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        while len(found) < len(ranks):
            if not results.empty():
                found.update([results.get()])
            elif any(process.exitcode for process in ranks):
                sys.exit(f"exit codes {[process.exitcode for process in ranks]}")
            else:
                time.sleep(0.01)
        for process in ranks:
            process.join(60)
    return [found[rank] for rank in sorted(found)]


def measure(name: str, steps: int) -> dict[str, Any]:
    from runhealth.trainer import flops
    from runhealth.trainer.traffic import step_bytes

    config = configured(name)
    ranks = on_ranks(layout_main, config, steps)
    wall_s = min(max(step) for step in zip(*(rank["walls"] for rank in ranks), strict=True))
    memory = {key: max(rank["memory"][key] for rank in ranks) for key in ranks[0]["memory"]}
    return {
        "ranks": config.world,
        "tokens_s": round(GLOBAL_BATCH * config.data.seq_len / wall_s),
        "mfu": round(flops.mfu(config, wall_s, ranks[0]["peak"]), 4),
        "wall_ms": round(1e3 * wall_s, 1),
        "cpu_ms_rank": round(1e3 * max(statistics.median(rank["cpus"]) for rank in ranks), 1),
        "sends_bytes_rank": max(sum(step_bytes(config, rank).values()) for rank in range(config.world)),
        **memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=sorted(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=60)
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["runhealth.trainer.worker", "torch.distributed.pipelining"]
    )
    table = {}
    print(f"{'layout':30} ranks tokens/s   MFU  cpu ms/rank   params  grads  moments  activations KiB", flush=True)
    for name in arguments.layouts:
        row = table[name] = measure(name, arguments.steps)
        parts = ("parameters", "gradients", "optimizer", "activations")
        kib = [round(row[f"mem_{part}_bytes"] / 1024) for part in parts]
        print(
            f"{name:30} {row['ranks']:5} {row['tokens_s']:8,} {row['mfu']:5.1%} {row['cpu_ms_rank']:12}"
            f" {kib[0]:8,} {kib[1]:6,} {kib[2]:8,} {kib[3]:12,}",
            flush=True,
        )
    config = configured("ddp-2")
    config = dataclasses.replace(config, layers_every=10, updates_every=10)
    pairs = on_ranks(plain_main, config, arguments.pairs)
    medians = {key: statistics.median(statistics.median(rank[key]) for rank in pairs) for key in ("trainer", "plain")}
    ratio = statistics.median(
        ours / theirs for rank in pairs for ours, theirs in zip(rank["trainer"], rank["plain"], strict=True)
    )
    print(f"trainer over plain DDP loop, CPU time: {ratio:.3f}", flush=True)
    overlap = on_ranks(overlap_main, config, arguments.steps)[0]
    for cap, row in overlap.items():
        print(
            f"DDP, buckets of {cap} MB: {row['buckets']} buckets, {row['hidden']:.0%} of the reduce hidden", flush=True
        )
    report = {
        "bench": "layouts",
        "cores": os.cpu_count(),
        "layouts": table,
        "plain_ddp": {"ratio": round(ratio, 4), **{f"{k}_cpu_ms": round(1e3 * v, 2) for k, v in medians.items()}},
        "overlap": {"ddp": overlap, "fsdp": "none: the all-gathers and reduce-scatters of FSDP2 block on the CPU"},
    }
    print(json.dumps(report))
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
