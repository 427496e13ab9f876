"""Following a log while it grows."""

import json

import pytest

from runhealth.storage.importers import open_log
from runhealth.storage.importers.follow import Follower
from runhealth.storage.importers.tfevents import _masked_crc
from runhealth.storage.records import StepRecord


def line(step: int) -> str:
    return f"step {step} | loss {3 - step / 100:.2f} | lr 1e-4\n"


def steps(records) -> list[int]:
    return [record.step for record in records if isinstance(record, StepRecord)]


def test_what_is_there_then_what_is_new(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(map(line, range(10))))
    with open_log(str(path)).follow() as follower:
        assert steps(follower.poll()) == list(range(9))
        assert follower.poll() == []
        with path.open("a") as file:
            file.write("".join(map(line, range(10, 15))))
        assert steps(follower.poll()) == [9, 10, 11, 12, 13]
        assert steps(follower.close()) == [14]
        assert follower.describe().rows_kept == 15


def test_the_same_records_as_one_reading_however_the_bytes_arrive(tmp_path):
    text = "".join(map(line, range(40))) + "Resuming from step 20\n" + "".join(map(line, range(20, 60)))
    whole = tmp_path / "whole"
    whole.write_text(text)
    path = tmp_path / "log"
    path.write_text("")
    follower = Follower(str(path))
    got = []
    for at in range(0, len(text), 37):
        with path.open("a") as file:
            file.write(text[at : at + 37])
        got += follower.poll()
    got += follower.close()
    assert got == list(open_log(str(whole)).records())


def test_a_file_that_is_not_there_yet(tmp_path):
    path = tmp_path / "log"
    follower = Follower(str(path))
    assert follower.poll() == []
    assert "No such file" in follower.waiting_for
    path.write_text("starting\n")
    assert follower.poll() == []
    path.write_text("starting\n" + line(0) + line(1))
    assert steps(follower.poll()) == [0]
    follower.close()


def test_a_half_line_waits_for_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_text(line(0) + line(1) + "step 2 | lo")
    follower = Follower(str(path))
    assert steps(follower.poll()) == [0]
    with path.open("a") as file:
        file.write("ss 2.98 | lr 1e-4\n" + line(3))
    assert steps(follower.poll()) == [1, 2]
    assert follower.describe().rows_rejected == 0
    follower.close()


def test_a_file_that_is_replaced_goes_on_as_a_new_attempt(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(map(line, range(10))))
    follower = Follower(str(path))
    follower.poll()
    path.unlink()
    path.write_text("".join(map(line, range(5))))
    records = follower.poll() + follower.close()
    assert [(record.attempt, record.step) for record in records if isinstance(record, StepRecord)] == [
        (0, 9),
        *((1, step) for step in range(5)),
    ]


def test_event_files_wait_for_whole_records(tmp_path):
    def event(step: int) -> bytes:
        body = b"\x10" + bytes([step]) + b"*\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x20\x40"
        head = len(body).to_bytes(8, "little")
        return head + _masked_crc(head).to_bytes(4, "little") + body + b"crc?"

    data = b"".join(event(step) for step in range(1, 20))
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(data[:100])
    follower = Follower(str(path))
    got = follower.poll()
    for at in range(100, len(data), 31):
        with path.open("ab") as file:
            file.write(data[at : at + 31])
        got += follower.poll()
    got += follower.close()
    assert steps(got) == list(range(1, 20))
    assert follower.describe().rejected == ()


def test_a_json_file_that_is_written_anew(tmp_path):
    path = tmp_path / "trainer_state.json"

    def write(last: int) -> None:
        path.write_text(json.dumps({"log_history": [{"step": step, "loss": 2.0} for step in range(1, last)]}))

    write(5)
    follower = Follower(str(path))
    assert steps(follower.poll()) == [1, 2, 3]
    assert follower.poll() == []
    write(8)
    assert steps(follower.poll()) == [4, 5, 6]
    assert steps(follower.close()) == [7]


def test_a_folder_is_read_again(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank_{rank}.jsonl").write_text("".join(f'{{"step": {n}, "loss": 2.0}}\n' for n in range(4)))
    follower = Follower(str(tmp_path))
    assert len(steps(follower.poll())) == 6
    with (tmp_path / "rank_1.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 2.0}\n{"step": 5, "loss": 2.0}\n')
    assert [(record.step, record.rank) for record in follower.poll()] == [(3, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize("times", [1, 3])
def test_closing_is_idempotent(tmp_path, times):
    path = tmp_path / "log"
    path.write_text(line(0) + line(1))
    follower = Follower(str(path))
    follower.poll()
    assert [len(follower.close()) for _ in range(times)] == [1] + [0] * (times - 1)


def test_a_poll_never_misses_what_was_there_before_it(tmp_path):
    path = tmp_path / "log"
    path.write_text(line(0) + line(1))
    with open_log(str(path)).follow() as follower:
        assert steps(follower.poll()) == [0]
        for number in range(2, 300):
            with path.open("a") as file:
                file.write(line(number))
            assert steps(follower.poll()) == [number - 1]
