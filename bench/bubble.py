"""The bubble of a pipeline, measured against the formula (p - 1) / (v m + p - 1).

Stages sleep in the place of computing, so the number of cores does not matter: 60 ms forward and 120 ms backward a rank
and micro-batch. A rank is busy while its chunks run; the bubble is the rest of the step, the mean over ranks, in the
best of a few steps: other load on the machine only adds to it. Prints one JSON object as its last line; exits with 1 if
any case is off by more than 0.05. Takes minutes.

    OMP_NUM_THREADS=1 python bench/bubble.py [--ranks 2 4] [--microbatches 4 8 16] [--schedules gpipe 1f1b interleaved]
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

FORWARD_S, BACKWARD_S = 0.06, 0.12
STEPS = 4
TOLERANCE = 0.05
WIDTH, SEQ = 4, 2


def rank_main(rank: int, parallel: Any, rendezvous: str, results: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from runhealth.trainer.parallel.pipeline import Pipeline

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
            ctx.share = share
            time.sleep(FORWARD_S * share)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            time.sleep(BACKWARD_S * ctx.share)
            return grads[0], None

    class Stage(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first = first
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x[..., None].float() if self.first else x
            out: Tensor = Sleep.apply(x * self.weight, 1.0 / parallel.stages_per_rank)
            return out

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=parallel.pp, timeout=timedelta(seconds=60)
    )
    numbers = range(rank, parallel.stages, parallel.pp)
    pipeline = Pipeline(
        parallel,
        [Stage(first=number == 0) for number in numbers],
        numbers,
        (1, SEQ, WIDTH),
        WIDTH,
        dist.group.WORLD,
        lambda output, _labels: output.mean(),
    )
    tokens = torch.zeros(parallel.microbatches, SEQ, dtype=torch.int64)
    bubbles = []
    for _ in range(STEPS):
        dist.barrier()
        start_s = time.perf_counter()
        pipeline.train(tokens, tokens, lambda _name: nullcontext())
        dist.barrier()
        bubbles.append(1.0 - pipeline.busy_s / (time.perf_counter() - start_s))
    results.put((rank, bubbles[1:]))  # the first step makes the connections
    dist.barrier()
    dist.destroy_process_group()


def measured(parallel: Any) -> float:
    """The smallest of the steps, each the mean over the ranks."""
    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, parallel, f"file://{folder}/store", results), daemon=True)
            for rank in range(parallel.pp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        if [process.exitcode for process in ranks] != [0] * len(ranks):
            sys.exit(f"{parallel}: exit codes {[process.exitcode for process in ranks]}")
        found = [results.get()[1] for _ in ranks]
    return min(statistics.mean(step) for step in zip(*found, strict=True))


def main() -> int:
    from runhealth.trainer.config import ParallelConfig
    from runhealth.trainer.parallel.pipeline import bubble_fraction

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved"])
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["runhealth.trainer.parallel.pipeline"])
    cases = []
    for schedule in arguments.schedules:
        for pp in arguments.ranks:
            for microbatches in arguments.microbatches:
                parallel = ParallelConfig(
                    pp=pp,
                    microbatches=microbatches,
                    schedule=schedule,
                    stages_per_rank=2 if schedule == "interleaved" else 1,
                )
                expected, met = bubble_fraction(parallel), measured(parallel)
                print(
                    f"{schedule:12} p {pp}  m {microbatches:2}  formula {expected:.3f}  measured {met:.3f}", flush=True
                )
                cases.append(
                    {
                        "schedule": schedule,
                        "p": pp,
                        "m": microbatches,
                        "v": parallel.stages_per_rank,
                        "formula": round(expected, 4),
                        "measured": round(met, 4),
                    }
                )
    worst = max(abs(case["measured"] - case["formula"]) for case in cases)
    print(json.dumps({"bench": "bubble", "cases": cases, "worst_difference": worst, "tolerance": TOLERANCE}))
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
