"""One small log of each dialect, as the tools print it: the losses, the steps and further signals that are read."""

from pathlib import Path

import pytest

from runhealth.storage.importers import open_log
from runhealth.storage.records import StepRecord

FOLDER = Path(__file__).with_name("dialects")
FALLING = [2.0, 1.9, 1.8, 1.7, 1.6]
DIALECTS: dict[str, tuple[list[float], list[int] | None, set[str]]] = {
    "ansi": (FALLING, [0, 1, 2, 3, 4], set()),
    "axolotl": (FALLING, None, set()),
    "composer": ([1.9, 1.8, 1.7, 1.6, 1.5], [1, 2, 3, 4, 5], set()),
    "composer_tabs": (FALLING, [1, 2, 3, 4, 5], {"grad_norm", "lr"}),
    "csv_quoted_spaces": (FALLING, None, {"lr"}),
    "deepspeed_lines": (FALLING, [10, 20, 30, 40, 50], {"lr", "t_step_s"}),
    "detectron2_json": (FALLING, [19, 39, 59, 79, 99], set()),
    "detectron2_text": (FALLING, [19, 39, 59, 79, 99], {"lr", "t_data_s", "t_step_s"}),
    "diffusers_tqdm": (FALLING, [0, 10, 20, 30, 40], set()),
    "fairseq": ([12.0, 11.9, 11.8, 11.7, 11.6], [0, 100, 200, 300, 400], {"grad_norm", "loss_scale", "lr"}),
    "fairseq_simple": ([12.0, 11.9, 11.8, 11.7, 11.6], [0, 100, 200, 300, 400], {"grad_norm", "loss_scale", "lr"}),
    "gpt_neox": (FALLING, None, {"loss_scale", "lr", "t_step_s"}),
    "hf_console_prefixed": (FALLING, None, set()),
    "hf_console_str": (FALLING, [0, 1, 2, 3, 4], {"grad_norm", "lr"}),
    "hf_notebook": (FALLING, None, {"eval_loss"}),
    "hf_tqdm": (FALLING, None, set()),
    "imagenet_example": (FALLING, [0, 10, 20, 30, 40], set()),
    "jax_clu": (FALLING, [0, 20, 40, 60, 80], {"grad_norm", "lr"}),
    "jax_maxtext": (FALLING, [0, 1, 2, 3, 4], {"t_step_s"}),
    "karpathy_build": (FALLING, [0, 1, 2, 3, 4], {"grad_norm", "lr", "t_step_s"}),
    "keras_csv": (FALLING, [0, 1, 2, 3, 4], {"eval_loss", "lr"}),
    "keras_csv_semicolon": (FALLING, [0, 1, 2, 3, 4], set()),
    "keras_progress": (FALLING, None, set()),
    "keras3_progress": (FALLING, [100, 200, 300, 400, 500], {"eval_loss"}),
    "levanter_jsonl": (FALLING, None, {"lr"}),
    "lightning_csv": (FALLING, [49, 99, 149, 199, 249], {"eval_loss"}),
    "lightning_progress": (FALLING, [0, 20, 40, 60, 80], set()),
    "lightning_progress2": (FALLING, None, set()),
    "litgpt": (FALLING, None, set()),
    "markdown_table": (FALLING, None, set()),
    "megatron_ds_eq": (FALLING, None, {"grad_norm", "loss_scale", "lr", "t_step_s"}),
    "megatron_new": (FALLING, [1, 2, 3, 4, 5], {"consumed_samples", "grad_norm", "lr", "t_step_s"}),
    "mixed_pairs": (FALLING, [0, 10, 20, 30, 40], {"grad_norm", "lr"}),
    "mmcv_iter": (FALLING, [0, 50, 100, 150, 200], {"lr", "t_step_s"}),
    "mmengine": (FALLING, [0, 50, 100, 150, 200], {"grad_norm", "lr", "t_data_s", "t_step_s"}),
    "nemo": (FALLING, None, set()),
    "nemo2": (FALLING, [0, 1, 2, 3, 4], {"lr", "t_step_s"}),
    "olmo": (FALLING, [0, 1, 2, 3, 4], set()),
    "python_logging": (FALLING, [0, 1, 2, 3, 4], {"grad_norm", "lr"}),
    "pytorch_examples": (FALLING, None, set()),
    "rank_prefix": (FALLING, [0, 1, 2, 3, 4], set()),
    "speedrun_pct": (FALLING, [0, 1, 2, 3, 4], {"grad_norm", "t_step_s"}),
    "tf_estimator": (FALLING, [0, 100, 200, 300, 400], set()),
    "timm": (FALLING, [0, 50, 100, 150, 200], set()),
    "torchtune": (FALLING, [1, 2, 3, 4, 5], {"grad_norm", "lr"}),
    "torchtune_tqdm": (FALLING, None, set()),
    "trl_dict_jsonl_pretty": (FALLING, [0, 10, 20, 30, 40], set()),
    "ultralytics5_padded": (FALLING, [0, 1, 2, 3, 4], set()),
    "ultralytics8": (FALLING, [1, 2, 3, 4, 5], {"eval_loss", "lr"}),
    "unsloth_table_html": (FALLING, [0, 10, 20, 30, 40], set()),
    "verl_step": ([0.2, 0.19, 0.18, 0.17, 0.16], None, {"grad_norm", "lr", "t_step_s"}),
    "xla_time": (FALLING, [0, 100, 200, 300, 400], set()),
}


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_dialects(dialect):
    losses, numbers, signals = DIALECTS[dialect]
    log = open_log(str(FOLDER / f"{dialect}.txt"))
    records = [record for record in log.records() if isinstance(record, StepRecord)]
    assert [round(record.values["loss"], 4) for record in records if "loss" in record.values] == losses
    if numbers is not None:
        assert [record.step for record in records if "loss" in record.values] == numbers
    assert signals <= set(log.describe().signals)
    assert {record.attempt for record in records} == {0}


def test_every_dialect_has_its_expectation():
    assert {path.stem for path in FOLDER.iterdir()} == set(DIALECTS)
