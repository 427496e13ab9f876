"""The line of every step is found again, however steps and lines rise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runhealth.storage.importers import open_log
from runhealth.storage.importers.linemap import LineMap

RISES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.tuples(st.booleans(), RISES), max_size=5))
def test_every_line_is_found(parts):
    known, lines, step, line = {}, LineMap(), 0, 0
    for together, rises in parts:
        steps, places = [], []
        for more, further in rises:
            step, line = step + more, line + further
            known[step] = line
            steps.append(step)
            places.append(line)
        if together:
            lines.extend(0, np.array(steps), np.array(places))
        else:
            for one, place in zip(steps, places, strict=True):
                lines.add(0, one, place)
    assert {one: lines.find(0, one) for one in range(step + 5)} == {one: known.get(one) for one in range(step + 5)}
    assert lines.find(1, 1) is None


@pytest.mark.parametrize("way", ["records", "blocks"])
def test_lines_of_a_log(tmp_path, way):
    path = tmp_path / "log"
    text = "".join(f"step:{step}/99 train_loss:{step / 7:.4f}\n" + "x\n" * (step % 20 == 0) for step in range(50))
    path.write_text("# head\n" + text + "step:20/99 train_loss:1.5\n")
    log = open_log(str(path))
    assert log.line_of(0, 5) is None
    for _ in getattr(log, way)():
        pass
    read = path.read_text().split("\n")
    for step in range(50):
        found = log.line_of(0, step)
        assert found is not None
        assert read[found - 1].startswith(f"step:{step}/")
    assert log.line_of(0, 50) is None
    assert read[log.line_of(1, 20) - 1] == "step:20/99 train_loss:1.5"
