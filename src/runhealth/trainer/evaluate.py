"""The held-out loss, with the same samples each time, divided among the data-parallel ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from runhealth.trainer.model import next_byte_loss
from runhealth.trainer.parallel.engine import Engine

ROWS = 64  # sequences of one forward pass


@torch.no_grad()
def heldout_loss(engine: Engine, heldout: Tensor) -> float:
    """Mean loss in nats over int64 [samples, seq + 1]; the same on every rank. Collective.

    Where a forward pass is a collective (FSDP), a rank that has no rows left takes part with one that does not count.
    """
    dp = engine.config.dp
    mine = heldout[engine.place.dp :: dp]
    most = -(-len(heldout) // dp)  # rows of the rank that has most
    total = torch.zeros(2, dtype=torch.float64)
    engine.part.eval()
    for first in range(0, most, ROWS):
        rows = mine[first : first + ROWS]
        counted = len(rows)
        logits = engine.logits((rows if counted else heldout[:1])[:, :-1])
        if counted and logits is not None and engine.place.tp == 0:
            total[0] += float(next_byte_loss(logits, rows[:, 1:])) * counted
            total[1] += counted
    engine.part.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])
