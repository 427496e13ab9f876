"""Tables: per-rank rows, Lightning, Keras, AlgoPerf, exported charts."""

import math

import pytest

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers import open_log


def test_per_rank_rows_with_units_are_ordered_by_step_and_rank(read):
    got = read(
        "step,rank,loss,step_ms,compute_ms,collective_wait_ms\n0,1,3.0,95,90,4\n0,0,3.0,95,91,3\n1,0,2.9,94,90,3\n1,1,2.9,94,90,3\n"
    )
    assert got.keys() == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert got.steps[0].values == {
        "loss": 3.0,
        "t_step_s": pytest.approx(0.095),
        "t_forward_s": pytest.approx(0.091),
        "t_wait_s": pytest.approx(0.003),
    }


def test_a_lagging_rank_is_no_restart(read):
    rows = [f"{step},0,1.0" for step in range(20)]
    for step in range(20):
        rows.insert(2 * step + 3 if 2 * step + 3 < len(rows) else len(rows), f"{step},1,1.0")
    got = read("step,rank,loss\n" + "\n".join(rows) + "\n")
    assert {record.attempt for record in got.steps} == {0}
    assert got.keys() == sorted((0, step, rank) for step in range(20) for rank in (0, 1))


def test_compute_and_wait_add_up_to_the_step_time(read):
    got = read("step,rank,loss,compute_ms,collective_wait_ms\n0,0,3.0,90,10\n1,0,3.0,90,1410\n")
    assert got.series("t_step_s") == [(0, pytest.approx(0.1)), (1, pytest.approx(1.5))]
    assert any("compute plus wait" in note for note in got.info.notes)


def test_lightning_rows_of_one_step_are_merged_and_empty_cells_are_absent(read):
    got = read("epoch,lr-AdamW,step,train_loss,val_loss\n0,0.001,0,,\n0,,0,2.5,\n0,,1,nan,\n0,,1,,2.75\n1,,2,2.3,\n")
    assert got.info.format == "lightning_csv"
    assert got.keys() == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert got.steps[0].values == {"epoch": 0, "lr": 0.001, "loss": 2.5}
    assert math.isnan(got.steps[1].values["loss"])
    assert got.series("eval_loss") == [(1, 2.75)]


def test_keras_counts_by_epoch(read):
    got = read("epoch,accuracy,loss,val_accuracy,val_loss\n0,0.5,2.5,0.4,2.6\n1,0.6,,0.5,inf\n")
    assert got.series("loss") == [(0, 2.5)]
    assert got.series("eval_loss") == [(0, 2.6), (1, math.inf)]
    assert any("epoch is used as the step" in note for note in got.info.notes)


def test_algoperf_takes_the_step_loss_and_not_that_of_the_evaluation(read):
    got = read(
        "global_step,grad_norm,loss,train/loss,validation/loss,accumulated_submission_time,score\n"
        "0,1.5,0.75,,,,\n1,,,0.5,0.25,10.0,10.0\n100,1.25,0.5,,,,\n200,,,,,,\n"
    )
    assert got.info.format == "algoperf"
    assert got.series("loss") == [(0, 0.75), (100, 0.5)]
    assert got.series("eval_loss") == [(1, 0.25)]
    assert got.series("train/loss") == [(1, 0.5)]
    assert got.series("t_step_s") == []


def test_torn_rows_stray_quotes_and_repeated_headers(read):
    got = read('step,loss\n0,2.5\n1,"2.4\n2\n3,2.2\nstep,loss\n4,2.1\n')
    assert got.series("loss") == [(0, 2.5), (1, 2.4), (3, 2.2), (4, 2.1)]
    assert [rejected.line for rejected in got.info.rejected] == [4]
    assert any("header comes again on line 6" in note for note in got.info.notes)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_byte_order_mark_and_windows_line_ends(read, delimiter):
    text = (
        "\ufeff" + "\r\n".join(delimiter.join(row) for row in (("step", "loss"), ("0", "2.5"), ("1", "2.4"))) + "\r\n"
    )
    assert read(text).series("loss") == [(0, 2.5), (1, 2.4)]


def test_exported_chart(read):
    got = read('"Step","happy-run - train/loss","happy-run - train/loss__MIN"\n"1","2.5","2.0"\n"2","2.25","2.0"\n')
    assert got.series("loss") == [(1, 2.5), (2, 2.25)]


def test_processes_without_a_rank_column_do_not_become_attempts(read):
    got = read("step,loss\n" + "".join(f"{step},{2 + rank / 10}\n" for step in range(5) for rank in range(3)))
    assert {record.attempt for record in got.steps} == {0}
    assert got.info.rows_rejected == 10
    assert any("several processes" in note for note in got.info.notes)


def test_a_repeated_last_step_after_single_steps_is_an_attempt(read):
    got = read("step,loss\n0,2.5\n1,2.4\n2,2.3\n3,2.2\n3,2.25\n4,2.15\n")
    assert got.keys() == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 3, 0), (1, 4, 0)]


def test_decimal_commas_between_semicolons(read):
    got = read("step;loss;lr\n0;2,5;0,001\n1;2,4375;1,0E-03\n2;2;0,001\n")
    assert got.series("loss") == [(0, 2.5), (1, 2.4375), (2, 2.0)]
    assert got.series("lr") == [(0, 1e-3), (1, 1e-3), (2, 1e-3)]
    assert any("decimal commas" in note for note in got.info.notes)


def test_unknown_columns_are_named_with_the_options_that_map_them(read):
    german = "Schritt;Verlust;lr\n" + "".join(f"{n};{n},25;0,0003\n" for n in range(9))
    with pytest.raises(NoUsableDataError, match=r"columns: Schritt, Verlust, lr\.") as refused:
        read(german, "de.csv")
    assert "--map step=NAME --map loss=NAME" in str(refused.value)
    got = read(german, "de.csv", {"step": "Schritt", "loss": "Verlust"})
    assert got.series("loss") == [(n, n + 0.25) for n in range(9)]
    with pytest.raises(NoUsableDataError, match="--map loss=NAME"):
        read("step,cost\n1,2\n2,3\n3,4\n", "c.csv")


@pytest.mark.parametrize("way", ["records", "blocks"])
def test_a_column_that_stays_empty_is_told_with_its_line(tmp_path, way):
    path = tmp_path / "log.csv"
    rows = [f"{step},{'' if step >= 40 else 2.5},{1.5 if step % 2 else ''},0.1" for step in range(80)]
    path.write_text("\n".join(["step,loss,grad_norm,lr", *rows, ""]))
    log = open_log(str(path))
    for _ in getattr(log, way)():
        pass
    assert [note for note in log.describe().notes if "empty" in note] == [
        "the cells of loss are empty from line 42 to the end (40 rows): many programs leave a cell empty for NaN"
    ]
