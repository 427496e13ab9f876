"""A log that has a row every so many steps only: the cause may lie a row, and so many steps, before the loss."""

import math

import numpy as np
import pytest

from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import Alarm, Incident
from runhealth.diagnose.frames import Frame
from runhealth.diagnose.suspect import load_suspects

LR_CHANGE = next(suspect for suspect in load_suspects() if suspect.name == "lr_change")
MOVED = 240  # the row at which the loss moves


def case(every: int, jump: int | None) -> Case:
    """300 rows, the learning rate ten times as high from row `jump` on."""
    rng = np.random.default_rng(100)
    frames = []
    for row in range(MOVED + 20):
        frame = Frame(0, row * every)
        lr = 1e-3 * (1 + math.cos(math.pi * row / 300)) * (10 if jump is not None and row >= jump else 1)
        loss = 2.0 + 0.02 * rng.normal() + (1.5 if row >= MOVED else 0.0)
        frame.values = {"loss": loss, "lr": lr}
        frame.ranks[0], frame.loss = frame.values, loss
        frames.append(frame)
    step = MOVED * every
    alarm = Alarm(
        detector="loss_spike",
        kind="loss_spike",
        signal="loss",
        attempt=0,
        step=step,
        onset_step=step,
        score=9.0,
        value=3.5,
        baseline=2.0,
        message="",
    )
    return Case(Incident(id="a0", attempt=0, onset_step=step, alarms=(alarm,), last_alarm_step=step), frames)


@pytest.mark.parametrize("every", [1, 10, 50, 100])
@pytest.mark.parametrize("rows_before", [0, 1, 3])
def test_the_jump_is_found_however_sparse_the_log(every: int, rows_before: int) -> None:
    evidence = list(LR_CHANGE.investigate(case(every, MOVED - rows_before)))
    assert evidence[0].weight_nats > 3, evidence
    assert evidence[0].steps == ((MOVED - rows_before) * every,) * 2


@pytest.mark.parametrize("every", [1, 100])
def test_no_jump_and_one_long_before_are_none(every: int) -> None:
    for jump in (None, MOVED - 60):
        (evidence,) = LR_CHANGE.investigate(case(every, jump))
        assert evidence.weight_nats < -3
