"""Any other console text with a step and a loss."""

import math

import pytest


def test_bars_overflow_lines_and_bare_times(read):
    got = read(
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 512.0\n"
        "step 1 | loss 5.5 | lr 1.0e-04 | 182.5 ms\n"
        "step 2 | loss 5.4 | lr 1.0e-04 | loss_scale 512.0 | 180.0 ms\n"
    )
    assert got.info.format == "text"
    assert got.steps[0].values == {
        "loss": 5.5, "lr": 1e-4, "t_step_s": pytest.approx(0.1825), "step_skipped": 1, "loss_scale": 512.0
    }  # fmt: skip
    assert "step_skipped" not in got.steps[1].values


@pytest.mark.parametrize(
    "template",
    [
        "2024-01-01 10:00:00 INFO Epoch 1 Step {step}/100 - train loss: {loss}, grad_norm: 1.25, lr: 1e-3\n",
        "[INFO] iter={step} loss={loss} grad_norm=1.25 lr=0.001\n",
        "steps: {step} loss: {loss} grad norm: 1.25 lr: [0.001] iter time (s): 0.5\n",
        "| epoch 001:  {step} / 100 loss={loss}, num_updates={step}, lr=0.001, gnorm=1.25, loss_scale=128\n",
        "step {step} loss {loss} lr 0.001 grad_norm 1.25\n",
        "Iteration [{step}/100]; Loss: {loss}; lr: 0.001; Grad_Norm: 1.25\n",
    ],
)
def test_spellings(read, template):
    got = read("".join(template.format(step=step, loss=loss) for step, loss in ((10, "2.5"), (20, "nan"), (30, "inf"))))
    loss = got.series("loss")
    assert [step for step, _ in loss] == [10, 20, 30]
    assert loss[0][1] == 2.5
    assert math.isnan(loss[1][1])
    assert loss[2][1] == math.inf
    assert got.series("grad_norm")[0] == (10, 1.25)
    assert got.series("lr")[0] == (10, 0.001)


def test_hugging_face_console_has_no_steps_but_a_bar_and_strings_are_numbers(read):
    got = read(
        " 10%|#  | 1/10 [00:01<00:09]\r{'loss': 2.5, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
        "{'loss': '2.25', 'grad_norm': 'nan', 'learning_rate': '5e-05', 'epoch': '0.2'}\n"
        "{'eval_loss': 2.0, 'eval_runtime': 3.0, 'epoch': 0.2}\n"
        "{'train_runtime': 5.0, 'train_loss': 99.0, 'epoch': 0.2}\n"
    )
    assert got.series("loss") == [(1, 2.5), (2, 2.25)]
    assert got.series("eval_loss") == [(2, 2.0)]
    assert math.isnan(got.steps[1].values["grad_norm"])
    assert any("no step in the lines" in note for note in got.info.notes)


def test_an_evaluation_of_a_step_is_merged_into_it(read):
    got = read("step 1 loss: 3.5\nstep 2 loss: 3.25\neval step 2 loss: 3.75\nstep 3 loss: 3.0\n")
    assert got.keys() == [(0, 1, 0), (0, 2, 0), (0, 3, 0)]
    assert got.series("eval_loss") == [(2, 3.75)]
    assert got.series("loss") == [(1, 3.5), (2, 3.25), (3, 3.0)]


def test_steps_with_thousands_separators(read):
    got = read("step 999/10,000 | loss 2.5 | 1,234 tok/s\nstep 1,000/10,000 | loss 2.4 | 12,345 tok/s\n")
    assert got.series("loss") == [(999, 2.5), (1000, 2.4)]


def test_lines_of_one_shape_read_alike_whatever_their_numbers(read):
    numbers = ["2.5", "nan", "-inf", "1e-3", "12", "0.000", "1,234.5", "NaN", "3.", "+4.5E+2"]
    got = read("".join(f"step {n} | loss: {number} | lr: 1e-4\n" for n, number in enumerate(numbers)))
    alone = [read(f"step {n} | loss: {number} | lr: 1e-4\n").steps[0].values for n, number in enumerate(numbers)]
    assert list(map(repr, (dict(record.values) for record in got.steps))) == list(map(repr, map(dict, alone)))


def test_the_pytorch_mnist_log_is_one_run_with_steps_over_all_epochs(read):
    lines = []
    for epoch in (1, 2, 3):
        lines += [
            f"Train Epoch: {epoch} [{at}/60000 ({at // 600}%)]\tLoss: {2.4 / epoch - at / 1e5:.6f}\n"
            for at in (0, 640, 59520)
        ]
        lines.append(f"\nTest set: Average loss: 0.0{epoch}00, Accuracy: 9800/10000 (98%)\n\n")
    got = read("".join(lines))
    assert [step for step, _ in got.series("loss")] == [0, 640, 59520, 60000, 60640, 119520, 120000, 120640, 179520]
    assert got.series("eval_loss") == [(59520, 0.01), (119520, 0.02), (179520, 0.03)]
    assert {record.attempt for record in got.steps} == {0}
    assert any("place in the epoch" in note for note in got.info.notes)


@pytest.mark.parametrize("name", ["Accuracy", "acc", "correct", "Top-5", "precision"])
def test_a_share_of_hits_is_no_step(read, name):
    got = read("".join(f"[{n}/100] loss {3 - n / 10:.1f}\nloss 0.5, {name}: 98/100 (98%)\n" for n in range(1, 6)))
    assert [record.step for record in got.steps] == [1, 2, 3, 4, 5]


def bar(step: int, total: int = 600) -> str:
    return f"\r  {step * 100 // total}%|###       | {step}/{total} [00:05<08:00,  2.05it/s]"


def test_the_progress_bar_gives_the_step_of_a_dictionary_without_one(read):
    text = "Map: 100%|####| 9/9 [00:01<00:00, 900 examples/s]\n" + bar(0)
    for step in range(10, 60, 10):
        text += bar(step) + f"\r          \r{{'loss': {step / 10}, 'epoch': 0.1}}\n" + bar(step)
        if step == 30:
            text += "\n" + bar(5, 8) + "\n{'eval_loss': 2.5, 'epoch': 0.1}\n" + bar(30)
    got = read(text)
    assert got.series("loss") == [(10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0), (50, 5.0)]
    assert got.series("eval_loss") == [(30, 2.5)]
    assert any("the count of the progress bar" in note for note in got.info.notes)


def test_a_progress_bar_that_goes_back_is_a_restart(read):
    text = bar(0)
    for step in [10, 20, 30, 40, 20, 30]:
        text += bar(step) + f"\r{{'loss': {step / 10}, 'epoch': 0.1}}\n"
    got = read(text)
    assert [(record.attempt, record.step) for record in got.steps] == [
        (0, 10),
        (0, 20),
        (0, 30),
        (0, 40),
        (1, 20),
        (1, 30),
    ]


def test_without_a_progress_bar_dictionaries_are_numbered(read):
    got = read("{'loss': 2.5, 'epoch': 0.1}\n{'loss': 2.4, 'epoch': 0.2}\n")
    assert got.series("loss") == [(0, 2.5), (1, 2.4)]
