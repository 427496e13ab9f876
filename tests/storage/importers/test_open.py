"""Recognising files, and refusing them with a reason."""

import pytest

from runhealth.storage.errors import ConfigError, NoUsableDataError
from runhealth.storage.importers import open_log, registry
from runhealth.storage.importers.registry import importers

MEGATRON = (
    " iteration 1/ 9 | lm loss: 2.5E+00 | grad norm: 1.0 |\n iteration 2/ 9 | lm loss: 2.4E+00 | grad norm: 1.0 |\n"
)


@pytest.mark.parametrize("name", ["trainer_state.json", "metrics.csv", "events.out.tfevents.1", "x.jsonl", "log"])
def test_the_name_of_a_file_does_not_decide(read, name):
    assert read(MEGATRON, name=name).info.format == "megatron"


def test_measurements_far_below_the_start_are_found(read):
    chatter = "x = 1  # a long source listing\n" * 80_000
    got = read(chatter + MEGATRON)
    assert got.series("loss") == [(1, 2.5), (2, 2.4)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (bytes(range(256)) * 40, "binary"),
        (b"hello\nthere is nothing here\n", "no named number"),
        (b" train  E: 0  I: 53  R: 11.0  S: 0.0\n train  E: 1  I: 97  R: 5.3  S: 0.0\n", "E, I, R, S"),
    ],
)
def test_files_without_data_are_refused_with_what_was_met(tmp_path, content, said):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(NoUsableDataError, match=said):
        open_log(str(path))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(NoUsableDataError, match="No such file"):
        open_log(str(tmp_path / "nope"))
    with pytest.raises(NoUsableDataError, match="folder"):
        open_log(str(tmp_path))


def test_a_table_without_any_usable_signal_is_refused_and_names_its_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("step,reward\n0,1.0\n1,2.0\n")
    with pytest.raises(NoUsableDataError, match="reward"):
        list(open_log(str(path)).records())
    assert len(list(open_log(str(path), mapping={"loss": "reward"}).records())) == 2


def test_every_importer_has_a_valid_name_and_is_found():
    assert {"csv", "hf_trainer_state", "jsonl", "megatron", "nanogpt", "text", "tfevents", "torchtitan"} <= set(
        importers()
    )
    for name, importer in importers().items():
        assert importer.name == name
        assert importer.sniff("trainer_state.json", b"") == 0.0


@pytest.mark.parametrize(
    "bad", [None, object(), type("X", (), {"name": "Upper Case"})(), type("X", (), {"name": "ok"})()]
)
def test_invalid_importers_are_refused_when_loaded(bad):
    with pytest.raises(ConfigError, match=r"importers/thing\.py"):
        registry._validated("thing", bad, {})


@pytest.mark.parametrize(
    ("content", "mapping"),
    [
        ("t,objective_x\n0,2.5\n1,2.4\n", {"step": "t", "loss": "objective_x"}),
        ("[step 0] obj=2.5 x=1\n[step 1] obj=2.4 x=1\n", {"loss": "obj"}),
        ('{"n": 0, "a": {"b": 2.5}}\n{"n": 1, "a": {"b": 2.4}}\n', {"step": "n", "loss": "a/b"}),
        ("steps:   0%|  | 0/9 [00:10<10:00,  1.5it/s, avr_loss=2.5]\nsteps:   1%|  | 1/9 [00:10<10:00, avr_loss=2.4]\n",
         {"loss": "avr_loss"}),
    ],
)  # fmt: skip
def test_a_mapping_reads_what_no_importer_knows(read, content, mapping):
    with pytest.raises(NoUsableDataError, match="--map"):
        read(content)
    assert read(content, mapping=mapping).series("loss") == [(0, 2.5), (1, 2.4)]


def test_a_mapping_to_no_signal_is_refused(read):
    with pytest.raises(ConfigError, match="lossy"):
        read("step,loss\n0,1\n", mapping={"lossy": "loss"})


def test_conflict_markers_are_rejected_with_their_lines(read):
    got = read("step,loss\n0,2.0\n<<<<<<< HEAD\n1,1.9\n=======\n1,1.8\n>>>>>>> branch\n2,1.7\n")
    assert [(one.line) for one in got.info.rejected] == [3, 5, 6, 7]
    assert got.series("loss") == [(0, 2.0), (1, 1.9), (2, 1.7)]


def test_lightning_rows_of_one_step_are_one_record(read):
    rows = "".join(f"{e},,{e * 100 + s},{2 - e / 10},,\n" for e in range(3) for s in (49, 99)) + "2,,299,,1.7,1.9\n"
    got = read("epoch,lr-AdamW,step,train_loss_step,train_loss_epoch,val_loss\n" + rows)
    assert got.keys() == [(0, step, 0) for step in (49, 99, 149, 199, 249, 299)]
    assert got.steps[-1].values["eval_loss"] == 1.9
