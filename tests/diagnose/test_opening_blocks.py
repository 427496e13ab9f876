"""What reads a log as columns says what the same says by records: doctor, and the progress line."""

import io
import json

import pytest

from runhealth.diagnose import doctor, opening
from runhealth.storage.blocks import BlockSource, StepBlock
from runhealth.storage.importers import open_log


class ByRecords:
    """A source that knows no columns."""

    def __init__(self, source):
        self.records, self.describe = source.records, source.describe


@pytest.fixture
def path(tmp_path):
    rows = [{"step": step, "loss": 3 - step / 200, **({"lr": 0.1} if step % 3 else {})} for step in range(100)]
    rows += [{"step": step, "rank": 1, "loss": 2.5} for step in range(100, 120)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[50:]]))
    return str(path)


def test_doctor_counts_the_same_in_blocks(path):
    assert isinstance(open_log(path), BlockSource)
    assert doctor.examine(open_log(path)) == doctor.examine(ByRecords(open_log(path)))


def test_the_progress_line_passes_blocks_on_and_knows_lines(path):
    ticks = iter(range(1000))
    shown = io.StringIO()
    progress = opening.BlockProgress(open_log(path), shown, clock=lambda: next(ticks) * 0.6)
    passed, plain = list(progress.blocks()), list(open_log(path).blocks())
    assert [type(one) for one in passed] == [type(one) for one in plain]
    assert any(isinstance(one, StepBlock) for one in passed)
    assert progress.line_of(0, 7) == 8
    assert progress.line_of(0, 7_000) is None
    assert opening.Progress(ByRecords(open_log(path)), shown).line_of(0, 7) is None


def test_a_terminal_sees_how_far_the_blocks_are(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"step:{step}/99999 train_loss:2.5\n" for step in range(40_000)))
    ticks = iter(range(1000))
    shown = io.StringIO()
    progress = opening.BlockProgress(open_log(str(path)), shown, clock=lambda: next(ticks) * 1.5)
    assert sum(len(block) for block in progress.blocks()) == 40_000
    assert "reading: 32,768 records, step 32,767" in shown.getvalue()
    assert shown.getvalue().endswith("\r")
