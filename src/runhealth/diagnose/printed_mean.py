"""Rows that print the mean of all losses before them where there was no finite loss to print: no loss, and no spike.

Some trainers replace what is not finite by a mean. Such a row gives itself away by a gradient norm that is not finite;
`masked_non_finite` tells of it.
"""

import math

import numpy as np

from runhealth.diagnose.frame_block import FrameBlock
from runhealth.diagnose.frames import Frame
from runhealth.storage.blocks import Bools, Floats

LEAST_ROWS = 5
SHARE = 1e-3  # of the mean: it is printed with few digits


class PrintedMean:
    """The mean of all losses so far."""

    def __init__(self) -> None:
        self.total = 0.0
        self.rows = 0

    def hides(self, frame: Frame, loss: float) -> bool:
        """Whether the finite loss of a row is such a mean. Takes it in."""
        norm = frame.get("grad_norm")
        hidden = False
        if norm is not None and not math.isfinite(norm) and self.rows >= LEAST_ROWS:
            mean = self.total / self.rows
            hidden = abs(loss - mean) <= SHARE * abs(mean)
        self.total += loss
        self.rows += 1
        return hidden

    def take(self, losses: Floats) -> None:
        """Take in losses of rows whose gradient norm, if there is one, is finite."""
        if len(losses):
            # cumsum adds one by one, as `hides` does; sum would not
            self.total = float(np.cumsum(np.concatenate([[self.total], losses]))[-1])
            self.rows += len(losses)


def doubtful(block: FrameBlock) -> Bools:
    """The rows that only `hides` can tell about."""
    norms = block.get("grad_norm")
    if norms is None:
        return np.zeros(len(block), dtype=np.bool_)
    found: Bools = norms.present & ~np.isfinite(norms.values)
    return found
