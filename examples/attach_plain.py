"""Attach the monitor to a plain PyTorch loop. Runs in seconds on synthetic data:

    python examples/attach_plain.py [STORE]

Then: diagnose --run attach-plain
"""

import sys

import torch
from torch import nn

from runhealth.instrument import Monitor

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 64, 32, 16, 8, 30


def synthetic_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and the next token of each position, both (BATCH, LENGTH): a sequence that counts upwards."""
    start = torch.randint(0, VOCABULARY, (STEPS, BATCH, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    return [(batch[:, :-1], batch[:, 1:]) for batch in ids]


def main(store: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    monitor = Monitor(run="attach-plain", store=store, model=model, optimizer=optimizer)  # 1
    for step, (x, y) in enumerate(monitor.iterate(synthetic_batches())):
        with monitor.step(step) as s:  # 2
            s.batch(x, y, shard=f"shard-{step // 10:04d}", first_sample=step % 10 * BATCH)  # 3
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            s.loss(loss)  # 4
            monitor.clip_grad_norm_(model.parameters(), 1.0)  # in place of torch.nn.utils.clip_grad_norm_
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()  # 5
    print(f"{STEPS} steps, last loss {loss.item():.3f}, {monitor.dropped} records lost")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
