"""A DDP run in which one rank's parameters are changed by hand after a step: one layer, all layers, or held still."""
# ruff: noqa: F821  RANK, WORLD_SIZE, FOLDER, CHANGE and AT are set by the run_ranks fixture

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument import Monitor

STEPS, ODD = 60, 1
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{FOLDER}/group", rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=30)
)
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 1))
model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
monitor = Monitor(
    "desync", f"{FOLDER}/store", model=model, optimizer=optimizer, replicas_every=2, layers_every=4, updates_every=0
)
monitor.watch_ddp(model)
for step in range(STEPS):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(100 * step + RANK))
    with monitor.step(step) as s:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        s.loss(loss)
        monitor.clip_grad_norm_(model.parameters(), 100.0)
        before = [p.detach().clone() for p in plain.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if RANK == ODD and step >= AT:
            with torch.no_grad():
                if CHANGE == "layer" and step == AT:
                    plain[-1].weight.view(-1)[:3].mul_(-1.0)
                elif CHANGE == "loud layer" and step == AT:
                    plain[-1].weight.mul_(-100.0)
                elif CHANGE == "all" and step == AT:
                    for p in plain.parameters():
                        p.add_(1e-4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
                elif CHANGE == "frozen":
                    for p, old in zip(plain.parameters(), before, strict=True):
                        p.copy_(old)
monitor.close()
dist.barrier()
dist.destroy_process_group()
