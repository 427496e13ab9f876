"""Recognising files, and refusing them with a reason."""

import pytest

from runhealth.storage.errors import ConfigError, NoUsableDataError, UnknownFormatError
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
    with pytest.raises(UnknownFormatError, match="folder"):
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
