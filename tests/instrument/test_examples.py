"""The examples run as they stand and leave the telemetry that they promise."""

import runpy
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from runhealth.storage.records import BatchRecord, StepRecord
from runhealth.storage.tail import RunTail

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_attach_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["attach_plain.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "attach_plain.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert printed.out.endswith("0 records lost\n")
    assert printed.err == ""
    records = RunTail(str(tmp_path / "attach-plain")).read()
    steps = [record.values for record in records if isinstance(record, StepRecord)]
    batches = [record for record in records if isinstance(record, BatchRecord)]
    assert len(steps) == len(batches) == 30
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert {"grad_norm", "grad_norm_rank", "clip_coef", "lr", "t_step_s", "t_data_s", "tokens"} <= set(steps[1])
    assert {"update_ratio", "weight_norm"} <= set(steps[10])
    assert all(batch.values["label_mismatch_share"] == 0.0 and batch.content_hash for batch in batches)
    assert {batch.shard for batch in batches} == {"shard-0000", "shard-0001", "shard-0002"}


def test_attach_ddp(run_ranks: Callable[..., Path]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = run_ranks("example_ddp.py", 2, EXAMPLE=str(EXAMPLES / "attach_ddp.py"), PORT=port)
    records = RunTail(str(folder / "attach-ddp")).read()
    steps = {(r.rank, r.step): r.values for r in records if isinstance(r, StepRecord)}
    assert len(steps) == 40
    assert steps[0, 5]["grad_norm_rank"] != steps[1, 5]["grad_norm_rank"]
    assert {"t_wait_s", "t_forward_s", "t_backward_s", "t_data_s"} <= set(steps[1, 5])


def test_the_five_lines_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (EXAMPLES.parent / "docs" / "attach.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "attach.md", "exec"), {})
    steps = [r for r in RunTail(str(tmp_path / "runs" / "my-run")).read() if isinstance(r, StepRecord)]
    assert len(steps) == 20
