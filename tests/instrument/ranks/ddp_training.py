"""A few DDP steps, with the monitor or without; saves parameters and this rank's records."""
# ruff: noqa: F821  RANK, WORLD_SIZE, FOLDER, MONITORED and DELAY_S are set by the run_ranks fixture

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument import Monitor

torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{FOLDER}/group", rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=30)
)
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
model = DistributedDataParallel(plain, bucket_cap_mb=0.0005)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
monitor = None
if MONITORED:
    monitor = Monitor("ddp", f"{FOLDER}/store", model=model, optimizer=optimizer, layers_every=1, updates_every=1)
    monitor.watch_ddp(model)
local_norms = []
for step in range(5):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + RANK)) * (1 + RANK)
    time.sleep(DELAY_S if RANK == 1 else 0.0)

    if monitor is None:
        # what this rank's gradient is before the reduce, from a copy without DDP
        twin = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        twin.load_state_dict(plain.state_dict())
        (twin(x) - 1).square().mean().backward()
        local_norms.append(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))
        (model(x) - 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    else:
        with monitor.step(step) as s:
            with s.phase("backward"):
                loss = (model(x) - 1).square().mean()
                loss.backward()
                s.loss(loss)
            monitor.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
if monitor is not None:
    monitor.close()
torch.save({"params": plain.state_dict(), "local_norms": local_norms}, f"{FOLDER}/rank{RANK}.pt")
dist.barrier()
dist.destroy_process_group()
