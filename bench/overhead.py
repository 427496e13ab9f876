"""What the monitor costs: CPU time of a training step with it over without it.

A small transformer trains on random tokens. `ratio` is 1 + monitor / step: the monitor's own CPU time is taken from
steps without forward and backward pass, where it does not drown in noise; `ratio_whole_steps` is the plain quotient of
whole steps, which on a shared machine scatters by some percent. Prints one JSON line:

    OMP_NUM_THREADS=1 python bench/overhead.py [--layers 4] [--steps 50]
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from torch import Tensor, nn

from runhealth.instrument import Monitor

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 256, 128, 4, 128, 16


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 3 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))
        return logits


class Loop:
    """One training step, whole or without forward and backward pass, with the monitor or without."""

    def __init__(self, layers: int) -> None:
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        self.x, self.y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.model = Net(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loss = self.forward().detach()

    def forward(self) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())

    def bare(self, *, whole: bool) -> None:
        if whole:
            self.optimizer.zero_grad()
            self.loss = self.forward()
            self.loss.backward()
        self.loss.item()  # loops log their loss
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def watched(self, monitor: Monitor, number: int, *, whole: bool) -> None:
        with monitor.step(number) as s:
            s.batch(self.x, self.y, shard="bench", first_sample=number * BATCH)
            with s.phase("forward"):
                if whole:
                    self.optimizer.zero_grad()
                    self.loss = self.forward()
            with s.phase("backward"):
                if whole:
                    self.loss.backward()
            s.loss(self.loss)
            self.loss.item()
            monitor.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


def compare(loop: Loop, monitor: Monitor, steps: int, *, whole: bool) -> tuple[list[float], list[float]]:
    """Process CPU time in seconds of `steps` steps without and with the monitor, in turn, so that other load on the
    machine hits both alike."""
    bare, watched = [], []
    for number in range(steps):
        start = time.process_time()
        loop.bare(whole=whole)
        middle = time.process_time()
        loop.watched(monitor, number, whole=whole)
        bare.append(middle - start)
        watched.append(time.process_time() - middle)
    return bare, watched


def main() -> None:
    arguments = argparse.ArgumentParser(description="CPU time of a step with the monitor over without it")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=50, help="whole steps of each kind, a multiple of 10")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop = Loop(options.layers)
    with tempfile.TemporaryDirectory() as store:
        with Monitor("warm-up", store, model=loop.model, optimizer=loop.optimizer) as monitor:
            compare(loop, monitor, 3, whole=True)
        with Monitor("whole", store, model=loop.model, optimizer=loop.optimizer) as monitor:
            bare, watched = compare(loop, monitor, options.steps, whole=True)
        with Monitor("monitor-only", store, model=loop.model, optimizer=loop.optimizer) as monitor:
            light_bare, light_watched = compare(loop, monitor, 10 * options.steps, whole=False)
    # every tenth step also measures layers and updates, so the mean is what a run pays
    monitor_s = statistics.fmean(light_watched) - statistics.fmean(light_bare)
    usual_s = statistics.median(light_watched) - statistics.median(light_bare)
    bare_s = statistics.median(bare)
    result = {
        "bench": "monitor_overhead",
        "ratio": round(1 + monitor_s / bare_s, 4),
        "ratio_whole_steps": round(statistics.fmean(watched) / statistics.fmean(bare), 4),
        "step_cpu_ms": round(1e3 * bare_s, 2),
        "monitor_cpu_ms": round(1e3 * monitor_s, 3),
        "monitor_cpu_ms_median": round(1e3 * usual_s, 3),
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "tensors": len(list(loop.model.parameters())),
        "steps": options.steps,
        "torch": str(torch.__version__),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
