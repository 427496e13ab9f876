"""DDP runs of a few steps in one world, one for each case of how gradients and the reduce can be. Saves what projection
and cosine should be in the case `whole`."""
# ruff: noqa: F821  RANK, WORLD_SIZE and FOLDER are set by the run_ranks fixture

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from runhealth.instrument import Monitor
from runhealth.instrument.ddp import allreduce_mean

STEPS = 6
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{FOLDER}/group", rank=RANK, world_size=WORLD_SIZE, timeout=timedelta(seconds=30)
)


def summed(group, bucket):  # a reduce that forgets to divide
    return allreduce_mean(group, bucket).then(lambda done: done.value() * WORLD_SIZE)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def batch(step, part=0):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * part + RANK))


def exact(plain, step):
    """<g, h> / <h, h> and <g, h> / (|g| |h|) in float64, from a copy of the model without DDP."""
    twin = network()
    twin.load_state_dict(plain.state_dict())
    (twin(batch(step)) - 1).square().mean().backward()
    g = torch.cat([p.grad.flatten() for p in twin.parameters()]).double()
    h = g.clone()
    dist.all_reduce(h)
    h /= WORLD_SIZE
    return float(g @ h / (h @ h)), float(g @ h / (g.norm() * h.norm()))


expected = []
group = dist.group.WORLD
HOOKS = {
    "compressed": {"hook": fp16_compress_hook, "state": group},
    "averaging": {"hook": allreduce_mean, "state": group, "averages": True},
    "summed": {"hook": summed, "state": group, "averages": True},
}
for case in ("buckets", "views", "whole", "flipped", "half", "nan", "twice", "no_sync", *HOOKS):
    plain = network()
    if case == "half":
        plain = plain.to(torch.float16)
    small = {"bucket_cap_mb": 0.0005} if case in ("buckets", "views") else {}
    model = DistributedDataParallel(plain, gradient_as_bucket_view=case == "views", **small)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = Monitor(case, f"{FOLDER}/store", model=model, optimizer=optimizer)
    monitor.watch_ddp(model, **HOOKS.get(case, {}))
    if case == "flipped" and RANK == 1:
        for parameter in plain.parameters():
            parameter.register_hook(lambda gradient: -0.3 * gradient)
    for step in range(STEPS):
        if case == "whole":
            expected.append(exact(plain, step))
        with monitor.step(step) as s:
            x = batch(0 if case == "flipped" else step).to(next(plain.parameters()).dtype)
            if case == "no_sync":
                with model.no_sync():
                    (model(batch(step, 1)) - 1).square().mean().backward()
            loss = (model(x) - 1).square().mean() * (5e3 if case == "half" else 1.0)
            if case == "nan" and step == 2 and RANK == 1:
                loss = loss * float("nan")
            loss.backward()
            if case == "twice":
                (model(batch(step, 1)) + 1).square().mean().backward()
            if case not in ("nan", "half"):
                monitor.clip_grad_norm_(model.parameters(), 0.5)  # in place: with views in the bucket itself
                optimizer.step()
            optimizer.zero_grad()
    monitor.close()
torch.save(expected, f"{FOLDER}/expected{RANK}.pt")
dist.barrier()
dist.destroy_process_group()
