"""Attach the monitor to a DistributedDataParallel loop. Runs in seconds on synthetic data:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/attach_ddp.py [STORE]

Then: diagnose --run attach-ddp
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument import Monitor

STEPS, BATCH, WIDTH = 20, 16, 32


def main(store: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)

    monitor = Monitor(run="attach-ddp", store=store, model=model, optimizer=optimizer)  # on every rank, after the group
    monitor.watch_ddp(model)  # each rank's gradient before the reduce, and who waits for whom
    for step in range(STEPS):
        with monitor.step(step) as s:
            with s.phase("data"):
                x = torch.randn(BATCH, WIDTH, generator=data)
                s.batch(x, shard=f"rank-{rank}", first_sample=step * BATCH)
            with s.phase("forward"):
                loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            with s.phase("backward"):
                loss.backward()
            s.loss(loss)
            monitor.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    if rank == 0:
        print(f"{STEPS} steps on {dist.get_world_size()} ranks, last loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
