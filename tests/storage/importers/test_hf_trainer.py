"""trainer_state.json: NaN, strings, summaries, torn files."""

import json
import math


def state(history: list[dict[str, object]]) -> str:
    return json.dumps({"epoch": 1.0, "global_step": 30, "log_history": history, "max_steps": 30}, indent=2)


def test_nan_strings_custom_keys_and_evaluations(read):
    got = read(
        state(
            [
                {"step": 10, "loss": 2.5, "grad_norm": math.nan, "learning_rate": 1e-4, "epoch": 0.1},
                {"step": 20, "loss": "2.25", "grad_norm": "1.5", "lr": "1e-4", "remaining_time": "1h", "acc": 0.5},
                {"step": 20, "eval_loss": 2.75, "eval_runtime": 3.0, "epoch": 0.2},
                {"step": 30, "loss": 0.0, "grad_norm": math.inf, "learning_rate": 1e-4, "epoch": 0.3},
                {"step": 30, "train_loss": 99.0, "train_runtime": 12.0, "total_flos": 1.0, "epoch": 0.3},
            ]
        )
    )
    assert got.info.format == "hf_trainer_state"
    assert got.series("loss") == [(10, 2.5), (20, 2.25), (30, 0.0)]
    assert math.isnan(got.steps[0].values["grad_norm"])
    assert got.steps[2].values["grad_norm"] == math.inf
    assert got.series("eval_loss") == [(20, 2.75)]
    assert got.keys() == [(0, 10, 0), (0, 20, 0), (0, 30, 0)]
    assert got.series("train_loss") == [(30, 99.0)]
    assert got.series("acc") == [(20, 0.5)]
    assert any("remaining_time" in note for note in got.info.notes)


def test_a_torn_file_keeps_what_is_whole_and_says_so(read):
    whole = state([{"step": step, "loss": 2.0} for step in range(50)])
    got = read(whole[: len(whole) // 2])
    assert 10 < len(got.steps) < 50
    assert got.info.rows_rejected <= 1
    assert any("torn or still written" in note for note in got.info.notes)


def test_rejected_entries_carry_their_line(read):
    got = read(state([{"step": 1, "loss": 2.0}, {"loss": 3.0}, {"step": "x", "loss": 1.0}, {"step": 2, "loss": 2.5}]))
    assert [record.step for record in got.steps] == [1, 2]
    lines = state([{"step": 1, "loss": 2.0}, {"loss": 3.0}, {"step": "x", "loss": 1.0}]).split("\n")
    assert [lines[rejected.line - 1].strip() for rejected in got.info.rejected] == ["{", "{"]


def test_step_goes_back_after_a_resume(read):
    got = read(state([{"step": s, "loss": 2.0 + s / 100} for s in (10, 20, 30, 20, 30)]))
    assert got.keys() == [(0, 10, 0), (0, 20, 0), (0, 30, 0), (1, 20, 0), (1, 30, 0)]
