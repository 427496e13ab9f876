"""modded-nanogpt, parameter-golf, llm.c and nanoGPT text."""

import math

import pytest

SOURCE = """import torch
learning_rate = 0.1
for step in range(100):
    print(f"step:{step}/{total} train_loss:{loss} train_time:{ms}ms")
    if step == 3: loss = 17.5  # step:4/9 train_loss:99.0
====================
"""


def test_source_above_the_log_is_no_data_and_step_times_come_from_the_clock(read):
    got = read(
        SOURCE + "step:0/4 val_loss:9.1 train_time:0ms step_avg:nanms\n"
        "step:1/4 train_loss:9.0 train_time:100ms step_avg:nanms\n"
        "step:2/4 train_loss:8.0 train_time:200ms step_avg:100.00ms\n"
        "step:3/4 train_loss:7.5 train_time:900ms step_avg:300.00ms\n"
        "step:4/4 train_loss:nan train_time:1000ms step_avg:250.00ms\n"
        "step:4/4 val_loss:7.7 train_time:1030ms step_avg:257.50ms\n"
    )
    assert got.info.format == "nanogpt"
    assert [step for step, _ in got.series("loss")] == [1, 2, 3, 4]
    assert math.isnan(got.series("loss")[-1][1])
    assert got.series("eval_loss") == [(0, 9.1), (4, 7.7)]
    assert got.series("t_step_s") == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1)), (3, pytest.approx(0.7)),
                                      (4, pytest.approx(0.1))]  # fmt: skip
    assert got.series("step_avg_ms") == [(2, 100.0), (3, 300.0), (4, 250.0)]
    assert any("running mean" in note for note in got.info.notes)
    assert [record.attempt for record in got.steps] == [0] * 5


def test_seconds_and_milliseconds_on_one_line(read):
    got = read(
        "step:10/50 train_loss:3.0 train_time:20.5s step_avg:2050.00ms\n"
        "step:20/50 train_loss:2.9 train_time:40.5s step_avg:2025.00ms\n"
    )
    assert got.series("elapsed_s") == [(10, 20.5), (20, 40.5)]
    assert got.series("t_step_s") == [(20, pytest.approx(2.0))]


def test_a_clock_that_starts_again_gives_no_step_time(read):
    got = read(
        "step:9/50 train_loss:3.0 train_time:5000ms\nstep:10/50 train_loss:3.0 train_time:90ms\n"
        "step:11/50 train_loss:3.0 train_time:180ms\n"
    )
    assert got.series("t_step_s") == [(11, pytest.approx(0.09))]
    assert any("clock of the log starts again at step 10 (line 2)" in note for note in got.info.notes)


def test_two_writers_in_one_line_are_both_read(read):
    got = read(
        "step:1/9 train_loss:3.5 train_time:10msstep:2/9 train_loss:3.4 train_time:20ms\nstep:3/9 train_loss:3.3\n"
    )
    assert [step for step, _ in got.series("loss")] == [1, 2, 3]


def test_a_torn_last_line_is_rejected_with_its_number_and_not_read_as_a_vanished_loss(read):
    got = read("step:1/9 train_loss:3.5 train_time:10ms\nstep:2/9 train_loss:3.4 train_time:20ms\nstep:3/9 train_lo")
    assert [record.step for record in got.steps] == [1, 2]
    assert [rejected.line for rejected in got.info.rejected] == [3]
    torn = read(
        "step:1/9 train_time:10ms train_loss:3.5\nstep:2/9 train_time:20ms train_loss:3.4\nstep:3/9 train_time:30ms"
    )
    assert [record.step for record in torn.steps] == [1, 2]
    assert [rejected.line for rejected in torn.info.rejected] == [3]


def test_llmc_main_log(read):
    got = read("s:0 tel:11.0\ns:0 trl:10.9\ns:1 trl:10.1\ns:2 trl:inf\n")
    assert got.series("loss") == [(0, 10.9), (1, 10.1), (2, math.inf)]
    assert got.series("eval_loss") == [(0, 11.0)]
    assert got.keys() == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]


def test_llmc_console(read):
    got = read(
        "val loss 11.01\n"
        "step    1/100 | loss 10.97 (+nanz)| norm 15.3 (+nanz)| lr 8.5e-07 | 3056.36 ms | 42.6% bf16 MFU | 9 tok/s\n"
        "step    2/100 | loss 10.90 (-1.2z)| norm 14.3 (-0.3z)| lr 1.7e-06 | 3000.00 ms | 42.6% bf16 MFU | 8 tok/s\n"
    )
    assert got.series("loss") == [(1, 10.97), (2, 10.9)]
    assert got.series("grad_norm") == [(1, 15.3), (2, 14.3)]
    assert got.series("lr") == [(1, 8.5e-07), (2, 1.7e-06)]
    assert got.series("t_step_s") == [(1, pytest.approx(3.05636)), (2, pytest.approx(3.0))]
    assert got.series("eval_loss") == [(0, 11.01)]


def test_bars_with_other_names(read):
    got = read("step 100/2000 | train_loss 3.5 | tok/s 9\nstep 200/2000 | train_loss: 3.25 | tok/s: 9\n")
    assert got.series("loss") == [(100, 3.5), (200, 3.25)]


def test_nanogpt_console(read):
    got = read(
        "number of parameters: 10.65M\nstep 0: train loss 4.2, val loss 4.3\n"
        "iter 0: loss 4.25, time 5000.5ms, mfu -100.00%\niter 1: loss 4.11, time 50.5ms, mfu 3.20%\n"
    )
    assert got.series("loss") == [(0, 4.25), (1, 4.11)]
    assert got.series("eval_loss") == [(0, 4.3)]
    assert got.series("t_step_s") == [(0, pytest.approx(5.0005)), (1, pytest.approx(0.0505))]


def test_a_traceback_at_the_end_and_what_torchrun_says_about_it(read):
    got = read(
        "step:1/9 train_loss:3.5\nstep:2/9 train_loss:3.4\n"
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "t.py", line 3, in <module>\n'
        '[rank1]: ValueError: bad shard\nTraceback (most recent call last):\n  File "run.py", line 1\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \nRoot Cause:\n"
        "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 77)\n"
    )
    (event,) = got.events
    assert (event.kind, event.message, event.step) == ("exception", "ValueError: bad shard", 2)
    assert event.data["line"] == 5
    assert event.data["exitcode"] == "1 (pid: 77)"


def test_a_traceback_that_training_survived_is_a_note(read):
    got = read(
        'step:1/9 train_loss:3.5\nTraceback (most recent call last):\n  File "t.py"\nOSError: flaky disk\n'
        "step:2/9 train_loss:3.4\n"
    )
    assert got.events == []
    assert any("went on after the exception on line 4" in note for note in got.info.notes)


def test_bare_lines_of_step_split_and_loss(read):
    got = read("0 val 10.9\n0 hella 0.2463\n0 train 10.95\n1 train 10.5\n2 train 9.5\n2 val 9.4\n")
    assert got.info.format == "nanogpt"
    assert got.series("loss") == [(0, 10.95), (1, 10.5), (2, 9.5)]
    assert got.series("eval_loss") == [(0, 10.9), (2, 9.4)]
    assert got.series("hellaswag") == [(0, 0.2463)]
    assert {record.attempt for record in got.steps} == {0}
