"""Megatron text: units, vanished fields, overflow lines, evaluations, checkpoints, torn lines."""

import pytest

from runhealth.storage.records import CheckpointStatus


def line(step: int, loss: str = "2.5E+00", **more: object) -> str:
    fields = {
        "consumed samples": step * 8,
        "elapsed time per iteration (ms)": 1500.0,
        "learning rate": "1.0E-04",
        "lm loss": loss,
        "loss scale": 1024.0,
        "grad norm": 1.25,
        "number of skipped iterations": 0,
        "number of nan iterations": 0,
    } | {name.replace("_", " "): value for name, value in more.items()}
    body = " | ".join(f"{name}: {value}" for name, value in fields.items() if value != "")
    return f" iteration {step:8d}/     100 | {body} |\n"


def test_names_and_units(read):
    got = read(line(10) + line(20, loss="2.4E+00"))
    assert got.info.format == "megatron"
    values = got.steps[0].values
    assert values["t_step_s"] == pytest.approx(1.5)
    assert (values["loss"], values["lr"], values["loss_scale"], values["grad_norm"]) == (2.5, 1e-4, 1024.0, 1.25)
    assert values["consumed_samples"] == 80
    assert isinstance(values["consumed_samples"], int)
    assert values["step_skipped"] == 0


def test_a_vanished_loss_field_leaves_a_record_without_loss(read):
    got = read(line(1) + line(2, loss="", grad_norm="nan") + line(3, loss="", number_of_skipped_iterations=1))
    assert [step for step, _ in got.series("loss")] == [1]
    assert [record.step for record in got.steps] == [1, 2, 3]
    assert got.steps[1].values["grad_norm"] != got.steps[1].values["grad_norm"]
    assert got.series("step_skipped") == [(1, 0), (2, 0), (3, 1)]


def test_overflow_lines_count_as_skips_of_the_iteration_after_them(read):
    got = read(
        line(1)
        + "[INFO] [stage_1_and_2.py:1644:step] [deepscale] OVERFLOW! Rank 0 Skipping step. "
        + "Attempted loss scale: 1024.0, reducing to 512.0\n"
        + line(2, loss_scale=512.0)
        + line(3, loss_scale=512.0)
    )
    assert got.series("step_skipped") == [(1, 0), (2, 1), (3, 0)]
    assert any("line 3 counts no skipped steps" in note for note in got.info.notes)


def test_timers_and_validation_belong_to_their_iteration_and_open_no_attempt(read):
    got = read(
        line(100)
        + "time (ms) | forward-compute: 100.5 | backward-compute: 200.0 | optimizer: 10.0 | batch-generator: 5.0\n"
        + " validation loss at iteration 100 | lm loss value: 2.6E+00 | lm loss PPL: 1.3E+01 | \n"
        + line(110)
    )
    assert got.keys() == [(0, 100, 0), (0, 110, 0)]
    first = got.steps[0].values
    assert first["t_forward_s"] == pytest.approx(0.1005)
    assert first["t_backward_s"] == pytest.approx(0.2)
    assert first["t_data_s"] == pytest.approx(0.005)
    assert (first["loss"], first["eval_loss"]) == (2.5, 2.6)
    assert "eval_loss" not in got.steps[1].values


def test_checkpoints_are_numbered_by_the_step_that_a_resume_continues_with(read):
    got = read(
        line(10)
        + "  successfully saved checkpoint from iteration      10 to /ckpt/run [ t 1/1, p 1/1 ]\n"
        + line(11)
        + line(12)
        + " successfully loaded checkpoint from /ckpt/run at iteration 10\n"
        + line(11)
    )
    saved, loaded = got.checkpoints
    assert (saved.status, saved.step, saved.path, saved.attempt) == (CheckpointStatus.SAVED, 11, "/ckpt/run", 0)
    assert (loaded.status, loaded.step, loaded.attempt) == (CheckpointStatus.LOADED, 11, 1)
    assert got.keys() == [(0, 10, 0), (0, 11, 0), (0, 12, 0), (1, 11, 0)]


def test_a_resume_that_repeats_no_step_is_an_attempt_all_the_same(read):
    got = read(line(10) + " successfully loaded checkpoint from /ckpt/run at iteration 10\n" + line(11))
    assert got.keys() == [(0, 10, 0), (1, 11, 0)]


def test_lines_torn_by_another_writer_are_rejected(read):
    torn = line(2).rstrip("|\n ")[:-30]
    got = read(line(1) + torn + line(3) + line(4)[:-60])
    assert [record.step for record in got.steps] == [1, 3]
    assert [rejected.line for rejected in got.info.rejected] == [2, 3]
    assert got.info.rows_read == got.info.rows_kept + got.info.rows_rejected


def test_rank_memory_is_an_event_and_makes_no_rank_that_then_falls_silent(read):
    got = read(line(1) + "[Rank 3] (after 1 iterations) memory (MB) | allocated: 2.0 | max allocated: 3.0\n" + line(2))
    assert got.keys() == [(0, 1, 0), (0, 2, 0)]
    (event,) = got.events
    assert (event.kind, event.step) == ("rank_memory", 1)
    assert event.data == {"allocated (MiB)": 2.0, "max allocated (MiB)": 3.0, "rank": 3, "line": 2}


def test_prefixes_of_launchers_are_taken_off_and_the_printing_rank_speaks_for_all(read):
    got = read("[default7]:" + line(1) + "[rank7]:" + line(2) + "12: " + line(3))
    assert got.keys() == [(0, 1, 0), (0, 2, 0), (0, 3, 0)]


def test_a_cancelled_job_ends_the_attempt_without_an_exception(read):
    got = read(line(1) + "slurmstepd: error: *** JOB 5 ON node CANCELLED AT 2024-01-01T00:00:00 ***\n")
    assert [event.kind for event in got.events] == ["attempt_end"]
