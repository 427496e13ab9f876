"""torchtitan console text."""

import pytest


def line(second: int, text: str, *, rank: int = 0) -> str:
    return f"[rank{rank}]:[titan] 2026-01-02 03:04:{second:02d},500 - root - INFO - {text}\n"


def step(number: int, loss: str) -> str:
    return (
        f"\x1b[31mstep: {number:2d}  \x1b[32mloss: {loss}  \x1b[38;2;180;60;0mgrad_norm:  1.2500  "
        f"\x1b[38;2;54;234;195mmemory:  2.00GiB(1.05%)  \x1b[34mtps: 9,869  \x1b[35mmfu: N/A\x1b[39m"
    )


def test_colours_prefixes_and_validation_lines(read):
    got = read(
        "+ NGPU=8\n"
        + line(1, "Training starts at step 1")
        + line(2, step(1, "12.5"))
        + line(4, step(2, " nan"))
        + line(6, "\x1b[32mvalidate step:  2  loss:  9.75  memory:  2.00GiB(1.05%)  tps: 1,000\x1b[39m")
        + line(9, step(3, " 8.5"))
    )
    assert got.info.format == "torchtitan"
    assert got.keys() == [(0, 1, 0), (0, 2, 0), (0, 3, 0)]
    assert got.series("loss")[0] == (1, 12.5)
    assert got.series("loss")[1][1] != got.series("loss")[1][1]
    assert got.series("eval_loss") == [(2, 9.75)]
    values = got.steps[0].values
    assert (values["grad_norm"], values["mem_reserved_bytes"], values["tps"]) == (1.25, 2 * 2**30, 9869)
    assert got.series("t_step_s") == [(2, pytest.approx(2.0)), (3, pytest.approx(5.0))]


def test_rank_prefixes_become_ranks(read):
    got = read("".join(line(2 * at, step(at, f" {at}.5"), rank=rank) for at in range(1, 12) for rank in (1, 0)))
    assert got.keys() == [(0, at, rank) for at in range(1, 12) for rank in (0, 1)]
