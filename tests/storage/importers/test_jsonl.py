"""JSON lines, JSON arrays, detectron2's metrics.json."""

import json
import math

import pytest

from runhealth.storage.importers import open_log


def jsonl(*rows: dict[str, object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_non_finite_strings_nesting_and_two_objects_on_a_line(read):
    got = read(
        '{"step": 0, "train": {"loss": 2.5, "grad_norm": "1.5"}, "tag": "x"}\n'
        '{"step": 1, "train": {"loss": NaN}}{"step": 2, "train": {"loss": Infinity}}\n'
        '{"step": 3, "train": {"loss": "nan"}, "ids": [1, 2]}\n'
    )
    loss = got.series("loss")
    assert [step for step, _ in loss] == [0, 1, 2, 3]
    assert math.isnan(loss[1][1])
    assert math.isnan(loss[3][1])
    assert loss[2][1] == math.inf
    assert got.series("grad_norm") == [(0, 1.5)]
    assert any("text or lists: tag, ids" in note for note in got.info.notes)


def test_what_cannot_be_read_is_rejected_with_its_line(read):
    got = read(
        jsonl({"step": 0, "loss": 2.0})
        + "<<<<<<< HEAD\n"
        + '{"step": 1, "lo\n'
        + "[1, 2]\n"
        + jsonl({"loss": 1.0}, {"step": 1.5, "loss": 1.0}, {"step": -1, "loss": 1.0}, {"step": 1, "loss": 1.9})
    )
    assert got.series("loss") == [(0, 2.0), (1, 1.9)]
    assert [rejected.line for rejected in got.info.rejected] == [2, 3, 4, 5, 6, 7]
    assert (got.info.rows_read, got.info.rows_kept, got.info.rows_rejected) == (8, 2, 6)


def test_numbered_attempts_keep_their_numbers(read):
    got = read(
        jsonl(
            {"attempt": 0, "step": 0, "loss": 3.0},
            {"attempt": 0, "step": 1, "loss": 2.9},
            {"attempt": 2, "step": 2, "loss": 2.8},
        )
    )
    assert got.keys() == [(0, 0, 0), (0, 1, 0), (2, 2, 0)]
    (event,) = got.events
    assert (event.kind, event.attempt, event.step) == ("attempt_start", 2, 2)
    assert "attempt 0 to 2" in event.message


def test_data_position_and_scaler_names(read):
    got = read(jsonl({"step": 0, "train/loss": 2.0, "data_index": 512.0, "grad_scale": 1024, "skipped": True}))
    values = got.steps[0].values
    assert values == {"loss": 2.0, "consumed_samples": 512, "loss_scale": 1024, "step_skipped": 1}
    assert isinstance(values["consumed_samples"], int)


def test_of_two_names_for_one_signal_the_better_one_wins_and_the_other_is_kept(read):
    got = read(jsonl({"step": 0, "train/loss": 3.0, "loss": 2.0}, {"step": 1, "train/loss": 3.5}))
    assert got.series("loss") == [(0, 2.0)]
    assert got.series("train/loss") == [(0, 3.0), (1, 3.5)]
    assert any("'train/loss' kept under its own name" in note for note in got.info.notes)


def test_a_mapping_of_the_user_wins_and_its_unit_is_applied(read):
    got = read(
        jsonl({"n": 5, "loss": 9.0, "train/ce_x": 2.0, "dur_ms": 500}),
        mapping={"step": "n", "loss": "train/ce_x", "t_step_s": "dur_ms"},
    )
    assert got.series("loss") == [(5, 2.0)]
    assert got.series("t_step_s") == [(5, 0.5)]
    assert got.series("loss_as_logged") == [(5, 9.0)]


def test_a_mapping_to_a_name_that_never_occurs_is_noted(read):
    got = read(jsonl({"step": 0, "loss": 1.0}), mapping={"grad_norm": "nope"})
    assert any("'nope'" in note and "never occurred" in note for note in got.info.notes)


def test_no_step_column_is_numbered_and_noted(read):
    got = read(jsonl({"loss": 3.0}, {"loss": 2.9}, {"loss": 2.8}))
    assert got.series("loss") == [(0, 3.0), (1, 2.9), (2, 2.8)]
    assert any("no step column" in note for note in got.info.notes)


def test_detectron2_names_and_its_rows_without_a_loss(read):
    got = read(
        jsonl(
            {"iteration": 19, "total_loss": 1.5, "loss_cls": 1.0, "time": 0.5, "data_time": 0.1, "lr": 0.01},
            {"iteration": 39, "total_loss": 1.4, "loss_cls": 0.9, "time": 0.5, "data_time": 0.1, "lr": 0.01},
            {"iteration": 48, "eta_seconds": 9.0},
            {"iteration": 47, "total_loss": 1.3, "time": 0.5, "lr": 0.01},
            {"iteration": 19, "total_loss": 1.45, "time": 0.5, "lr": 0.01},
        )
    )
    assert got.info.format == "detectron2"
    assert got.series("loss") == [(19, 1.5), (39, 1.4), (47, 1.3), (19, 1.45)]
    assert got.series("t_step_s")[0] == (19, 0.5)
    assert got.series("t_data_s")[0] == (19, 0.1)
    assert got.keys() == [(0, 19, 0), (0, 39, 0), (0, 47, 0), (0, 48, 0), (1, 19, 0)]


def test_an_array_of_objects(read):
    got = read('[\n {"step": 1, "loss": 2.0},\n {"step": 2, "loss": NaN},\n {"step": 3, "loss": "bad"}\n]\n')
    assert [record.step for record in got.steps] == [1, 2, 3]
    assert "loss" not in got.steps[2].values


def test_time_stamps(read):
    got = read(jsonl({"step": 0, "loss": 1.0, "_timestamp": 1700000000.5},
                     {"step": 1, "loss": 1.0, "_timestamp": "2023-11-14T22:13:21Z"}))  # fmt: skip
    assert got.steps[0].ts_ns == 1_700_000_000_500_000_000
    assert got.steps[1].ts_ns == 1_700_000_001_000_000_000


def test_reading_twice_gives_the_same(tmp_path):
    path = tmp_path / "twice.jsonl"
    path.write_text(jsonl(*({"step": step, "loss": 2.0} for step in (0, 1, 2, 1, 2))))
    log = open_log(str(path))
    first, info = list(log.records()), log.describe()
    assert list(log.records()) == first
    assert log.describe() == info


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_hostile_lines_are_rejected(read, deep):
    got = read(jsonl({"step": 0, "loss": 1.0}) + deep + "\n" + jsonl({"step": 1, "loss": 1.0}))
    assert got.series("loss") == [(0, 1.0), (1, 1.0)]
    assert got.info.rejected[0].line == 2
