"""How jobs fail, as torch.distributed, torchrun, Slurm and fp16 libraries print it."""

import pytest

ROWS = "".join(f"step {n} | loss {3 - n / 100:.2f} | lr 1e-4\n" for n in range(1, 6))
WATCHDOG = (
    "[rank{rank}]:[E1129 10:15:02.123456789 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=8123, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600029 milliseconds before timing out.\n"
)
TORCHRUN = """\
E1129 10:00:00 140 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: 2 \
(pid: 991) of binary: /usr/bin/python
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-11-29_10:00:00
  host      : node1
  rank      : 7 (local_rank: 3)
  exitcode  : 1 (pid: 992)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-29_09:59:58
  host      : node0
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 991)
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""


def test_a_watchdog_timeout_is_a_hang_and_the_silent_rank_is_named(read):
    got = read(ROWS + "".join(WATCHDOG.format(rank=rank) for rank in (0, 1, 3)))
    hang, exception = got.events
    assert (hang.kind, hang.step, hang.rank) == ("hang", 5, 2)
    assert hang.data["ranks"] == [2]
    assert hang.data["waiting_ranks"] == [0, 1, 3]
    assert (hang.data["op"], hang.data["seq"], hang.data["waited_s"]) == ("ALLREDUCE", "8123", 600.029)
    assert exception.kind == "exception"
    assert exception.data["cause"] == "hang"


def test_a_hang_of_all_known_ranks_blames_none(read):
    got = read(ROWS + "".join(WATCHDOG.format(rank=rank) for rank in (0, 1, 2, 3)))
    assert "ranks" not in got.events[0].data


def test_the_rank_whose_queue_is_behind_is_to_blame(read):
    line = (
        "[rank{0}]:[E1 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank {0}] Timeout at NCCL work: {1}, last "
        "enqueued NCCL work: {1}, last completed NCCL work: 40.\n"
    )
    got = read(ROWS + line.format(0, 50) + line.format(1, 44) + line.format(2, 50))
    assert (got.events[0].kind, got.events[0].data["ranks"]) == ("hang", [1])


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA error: out of memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
    ],
)
def test_out_of_memory_with_its_rank_comes_before_what_the_others_say(read, text):
    trace = f"[rank3]: Traceback (most recent call last):\n[rank3]:   File 't.py', line 1\n[rank3]: {text}\n"
    got = read(ROWS + trace + WATCHDOG.format(rank=0))
    memory, exception = got.events
    assert (memory.kind, memory.rank, memory.data["ranks"]) == ("out_of_memory", 3, [3])
    assert exception.message == text


def test_a_killed_rank_is_dead(read):
    got = read(ROWS + TORCHRUN.format(code=-9, traceback="Signal 9 (SIGKILL) received by PID 991"))
    dead, exception = got.events
    assert (dead.kind, dead.rank, dead.data["ranks"]) == ("dead_rank", 2, [2])
    assert exception.data["exitcode"] == "-9 (pid: 991)"
    assert exception.data["host"] == "node0"


def test_torchrun_names_the_rank_and_the_worker_the_reason(read):
    trace = "Traceback (most recent call last):\n  File 't.py', line 1\nValueError: bad batch\n"
    got = read(ROWS + trace + TORCHRUN.format(code=1, traceback="To enable traceback see: x"))
    (exception,) = got.events
    assert (exception.kind, exception.message, exception.rank) == ("exception", "ValueError: bad batch", 2)


def test_a_job_that_was_told_to_end_did_not_crash(read):
    got = read(
        ROWS + "W1129 torch/distributed/elastic/agent/server/api.py:741] Received 15 death signal\n"
        "Traceback (most recent call last):\n  File 'x', line 1\n"
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 12 got signal: 15\n"
    )
    assert [event.kind for event in got.events] == ["attempt_end"]


def test_a_crash_that_torchrun_restarts_belongs_to_the_attempt_before(read):
    trace = "Traceback (most recent call last):\n  File 't.py', line 1\nValueError: bad batch\n"
    got = read(ROWS + trace + ROWS)
    assert [(event.kind, event.attempt, event.step) for event in got.events] == [
        ("exception", 0, 5),
        ("attempt_start", 1, 1),
    ]


def test_an_exception_that_training_survives_is_a_note(read):
    got = read(
        ROWS + "Traceback (most recent call last):\n  File 'x'\nOSError: slow disk\nstep 6 | loss 2.94 | lr 1e-4\n"
    )
    assert got.events == []
    assert any("went on" in note for note in got.info.notes)


@pytest.mark.parametrize(
    ("lines", "scale"),
    [
        (["Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"], 32768.0),
        (["[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"], 32768),
        (
            [
                f"[deepspeed] OVERFLOW! Rank {rank} Skipping step. Attempted loss scale: 65536.0, reducing to 32768.0"
                for rank in range(4)
            ],
            32768.0,
        ),
        (["Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"] * 8, 32768.0),
        (["OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing it to 1"], 65536),
        (["| WARNING: overflow detected, setting loss scale to: 64.0"], 64.0),
    ],
)
def test_overflow_lines_are_skips_of_the_next_step(read, lines, scale):
    got = read("step 1 | loss 3.0\n" + "\n".join(lines) + "\nstep 2 | loss 3.0\nstep 3 | loss 2.9\n")
    assert got.series("step_skipped") == [(2, 1)]
    assert got.series("loss_scale") == [(2, scale)]


def test_every_overflow_between_two_rows_counts(read):
    halving = "".join(
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {2.0 ** (15 - n)}\n" for n in range(3)
    )
    got = read("step 10 | loss 3.0\n" + halving + "step 20 | loss 3.0\n")
    assert got.series("step_skipped") == [(20, 3)]
    assert got.series("loss_scale") == [(20, 8192.0)]


def test_warnings_and_stack_frames_of_the_store_are_no_failure(read):
    noise = (
        "[rank0]:[W321 04:00:38.901697716 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=43): Broken pipe\n"
        "frame #5: c10d::ProcessGroupNCCL::HeartbeatMonitor::runLoop() + 0x3c8 (0x7d5f in libtorch_cuda.so)\n"
        "[rank0]:[W321 04:00:38.915377638 ProcessGroupNCCL.cpp:1771] [Rank 0] Connection closed by peer\n"
    )
    assert read(ROWS + noise).events == []


def test_an_evaluation_after_an_exception_joins_its_step(read):
    trace = "Traceback (most recent call last):\n  File 'x'\nOSError: slow disk\n"
    got = read(ROWS + trace + "step 5 | val_loss 2.9\n")
    assert got.events == []
    assert got.series("eval_loss") == [(5, 2.9)]
