"""Folders: which files belong to the run, which are ignored, and when there are several runs."""

import json
import struct
from pathlib import Path

import pytest

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log
from runhealth.storage.importers.tfevents import _masked_crc
from runhealth.storage.records import RunEvent, StepRecord


def text(steps, start: float = 3.0) -> str:
    return "".join(f"step {step} | loss {start - step / 100:.2f}\n" for step in steps)


def jsonl(steps, **more: float) -> str:
    return "".join(json.dumps({"step": step, "loss": 3 - step / 100, **more}) + "\n" for step in steps)


def events(steps, tag: str = "loss", begin: float = 1.7e9) -> bytes:
    out = b""
    for step in steps:
        value = b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", 3 - step / 100)
        summary = b"\x0a" + bytes([len(value)]) + value
        body = (
            b"\x09" + struct.pack("<d", begin + step) + b"\x10" + bytes([step]) + b"*" + bytes([len(summary)]) + summary
        )
        head = struct.pack("<Q", len(body))
        out += head + struct.pack("<I", _masked_crc(head)) + body + b"crc?"
    return out


def fill(root: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(root)


def keys(path: str):
    return [(one.attempt, one.step, one.rank) for one in open_log(path).records() if isinstance(one, StepRecord)]


def notes(path: str) -> str:
    log = open_log(path)
    list(log.records())
    return "\n".join(log.describe().notes)


def test_one_log_among_other_files(tmp_path):
    path = fill(
        tmp_path, {"train.log": text(range(10)), "config.yaml": "a: 1\n", "model.pt": b"\x80\x02", "x.txt": "hi\n"}
    )
    assert keys(path) == [(0, step, 0) for step in range(10)]
    assert "3 other files ignored: config.yaml, model.pt, x.txt" in notes(path)


def test_event_files_of_one_folder_are_parts_with_overlapping_steps(tmp_path):
    path = fill(
        tmp_path,
        {
            "events.out.tfevents.1": events(range(1, 20)),
            "events.out.tfevents.2": events(range(15, 30), begin=1.7e9 + 1000),
            "events.out.tfevents.3": events(range(30, 40), begin=1.7e9 + 2000),
        },
    )
    assert keys(path) == [
        *((0, step, 0) for step in range(1, 20)),
        *((1, step, 0) for step in range(15, 30)),
        *((2, step, 0) for step in range(30, 40)),
    ]


@pytest.mark.parametrize(
    "pattern", ["rank_{}.jsonl", "metrics-rank{}.jsonl", "logs/rank{}/metrics.jsonl", "worker_{}.jsonl"]
)
def test_files_of_ranks(tmp_path, pattern):
    path = fill(tmp_path, {pattern.format(rank): jsonl(range(5), t_step_s=rank + 1.0) for rank in range(3)})
    assert keys(path) == [(0, step, rank) for step in range(5) for rank in range(3)]
    assert next(iter(open_log(path).records())).values["t_step_s"] == 1.0


def test_torchrun_logs_with_stderr_of_the_failing_rank(tmp_path):
    trace = "Traceback (most recent call last):\n  File 'x'\nValueError: bad\n"
    files = {f"none_ab/attempt_0/{rank}/stdout.log": text(range(5)) for rank in range(2)}
    path = fill(
        tmp_path, {**files, "none_ab/attempt_0/1/stderr.log": trace, "none_ab/attempt_0/0/stderr.log": "W: x\n"}
    )
    assert keys(path) == [(0, step, rank) for step in range(5) for rank in range(2)]
    (event,) = [one for one in open_log(path).records() if isinstance(one, RunEvent)]
    assert (event.kind, event.rank, event.step, event.message) == ("exception", 1, 4, "ValueError: bad")


def test_jobs_that_continue_are_attempts_in_order(tmp_path):
    path = fill(
        tmp_path,
        {"slurm-9.out": text(range(1, 50)), "slurm-10.out": text(range(40, 90)), "slurm-11.out": text(range(90, 99))},
    )
    assert [(attempt, step) for attempt, step, _ in keys(path)] == [
        *((0, step) for step in range(1, 50)),
        *((1, step) for step in range(40, 90)),
        *((2, step) for step in range(90, 99)),
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"a.log": text(range(10)), "b.log": text(range(12), 4.0)},
        {"a/metrics.jsonl": jsonl(range(10)), "b/metrics.jsonl": jsonl(range(12))},
        {"v0/events.out.tfevents.1": events(range(1, 10)), "v1/events.out.tfevents.1": events(range(1, 12))},
    ],
)
def test_several_runs_are_refused_and_named(tmp_path, files):
    first, second = sorted(files)
    with pytest.raises(NoUsableDataError, match="2 runs") as error:
        open_log(fill(tmp_path, files))
    assert first.split("/")[0] in str(error.value)
    assert second.split("/")[0] in str(error.value)


def test_a_copy_is_no_second_run(tmp_path):
    path = fill(tmp_path, {"a.log": text(range(10)), "a.log.bak": text(range(10))})
    assert len(keys(path)) == 10
    assert "copy" in notes(path)


def test_metrics_and_console_are_one_run_seen_twice(tmp_path):
    trace = "Traceback (most recent call last):\n  File 'x'\nValueError: bad\n"
    path = fill(
        tmp_path,
        {"metrics.csv": "step,loss,lr\n" + "".join(f"{n},{3 - n / 100},1e-4\n" for n in range(30)),
         "out.log": "".join(f"step {n} | loss 1.00 | grad_norm 0.5\n" for n in range(0, 30, 5)) + trace},
    )  # fmt: skip
    records = list(open_log(path).records())
    steps = {one.step: one.values for one in records if isinstance(one, StepRecord)}
    assert steps[5] == {"loss": 2.95, "lr": 1e-4, "grad_norm": 0.5}
    assert steps[6] == {"loss": 2.94, "lr": 1e-4}
    assert [one.kind for one in records if isinstance(one, RunEvent)] == ["exception"]


def test_checkpoints_of_the_hugging_face_trainer_hold_copies(tmp_path):
    def state(last: int) -> str:
        return json.dumps({"log_history": [{"step": step, "loss": 3 - step / 100} for step in range(1, last)]})

    path = fill(tmp_path, {f"checkpoint-{last}/trainer_state.json": state(last) for last in (10, 20, 30)})
    assert keys(path) == [(0, step, 0) for step in range(1, 30)]
    path = fill(tmp_path, {"runs/Jan01/events.out.tfevents.1": events(range(1, 30), "train/grad_norm")})
    assert open_log(path).describe().source == path
    steps = [one for one in open_log(path).records() if isinstance(one, StepRecord)]
    assert steps[3].values.keys() == {"loss", "grad_norm"}


@pytest.mark.parametrize("files", [{}, {"a.txt": "nothing\n", "b.pt": b"\0"}])
def test_a_folder_without_logs_is_refused(tmp_path, files):
    with pytest.raises(NoUsableDataError, match="no file in it"):
        open_log(fill(tmp_path, files))


def test_rejected_lines_name_their_file(tmp_path):
    path = fill(tmp_path, {"rank_0.jsonl": jsonl(range(5)) + "broken\n", "rank_1.jsonl": jsonl(range(5))})
    log = open_log(path)
    list(log.records())
    assert [(one.line, one.why.split(":")[0]) for one in log.describe().rejected] == [(6, "rank_0.jsonl")]
