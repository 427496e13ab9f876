"""A simulated clock: how long each rank takes for each phase of a step, with the noise of a real job.

Times of real ranks on one small machine would measure that machine. So the phases are drawn (lognormal, seeded by run
and step), the faults' stalls are added, and the waiting follows from them: every rank waits for the last to arrive at
the collective.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runhealth.trainer.fault import Phase

WORLD = 4
DATA_S, FORWARD_S, BACKWARD_S, COMM_S, OPTIMIZER_S, CHECKPOINT_S = 0.03, 0.28, 0.54, 0.09, 0.05, 0.6
LENGTH_SHARE = 0.1  # of the compute goes with the sum of squared lengths
LENGTHS = 48  # documents a rank and step
USUAL_SQUARES = LENGTHS * math.exp(2 * 6.0 + 2 * 0.5**2)  # expected sum of squares of the lognormal lengths
Stall = Callable[[int, Phase], float]


@dataclass(slots=True)
class Times:
    """Seconds by rank, each (4,); `sum_len_sq` in tokens squared."""

    data: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    gc: np.ndarray
    wait: np.ndarray
    comm: np.ndarray
    optimizer: np.ndarray
    sum_len_sq: np.ndarray
    step_s: float


def draw(seed: int, step: int, stall: Stall, blip: tuple[int, float] | None = None) -> Times:
    """`stall` gives extra seconds of (rank, phase); `blip` = (rank, factor) slows one rank's compute."""
    rng = np.random.default_rng([seed, step, 7])
    lengths = rng.lognormal(6.0, 0.5, (WORLD, LENGTHS))
    squares = (lengths**2).sum(1)
    work = 1 - LENGTH_SHARE + LENGTH_SHARE * squares / USUAL_SQUARES
    shared = rng.lognormal(0, 0.01)

    def noisy(seconds: float, sigma: float) -> np.ndarray:
        return seconds * shared * rng.lognormal(0, sigma, WORLD)

    def extra(phase: Phase) -> np.ndarray:
        return np.array([stall(rank, phase) for rank in range(WORLD)])

    data = noisy(DATA_S, 0.25) + extra("data")
    gc = extra("gc")
    forward = noisy(FORWARD_S, 0.015) * work
    backward = noisy(BACKWARD_S, 0.012) * work
    if blip is not None:
        forward[blip[0]] *= blip[1]
        backward[blip[0]] *= blip[1]
    forward = forward + extra("forward") + gc
    backward = backward + extra("backward")
    comm = noisy(COMM_S, 0.06)
    slow = extra("comm")
    comm = comm + slow
    arrival = data + forward + backward
    done = arrival.max() + comm.max()
    wait = done - arrival - comm
    optimizer = noisy(OPTIMIZER_S, 0.05)
    return Times(
        data=data,
        forward=forward,
        backward=backward,
        gc=gc,
        wait=wait,
        comm=comm,
        optimizer=optimizer,
        sum_len_sq=squares.astype(np.int64),
        step_s=float(done + optimizer.max()),
    )
