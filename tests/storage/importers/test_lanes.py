"""Two runs in one log, at steps of their own, are told apart from restarts."""


def line(step: int, loss: float) -> str:
    return f"step {step} loss {loss}\n"


def test_the_run_that_the_log_begins_with_is_kept(read):
    text = "".join(line(step, 3.0) for step in range(100, 105))
    text += "".join(line(step + 105, 3.0) + line(step, 5.0) for step in range(40))
    got = read(text)
    assert got.keys() == [(0, step, 0) for step in range(100, 145)]
    assert {value for _, value in got.series("loss")} == {3.0}
    assert (got.info.rows_read, got.info.rows_kept, got.info.rows_rejected) == (85, 45, 40)
    assert [one.line for one in got.info.rejected[:2]] == [7, 9]
    assert "step 0 of a second run" in got.info.rejected[0].why
    assert any("40 rows belong to a second run" in note for note in got.info.notes)


def test_a_restart_is_a_restart_wherever_it_ends(read):
    for rows in (1, 3, 8, 30):
        got = read("".join(line(step, 3.0) for step in [*range(50), *range(20, 20 + rows)]))
        assert [record.attempt for record in got.steps] == [0] * 50 + [1] * rows
        assert got.info.rows_rejected == 0


def test_a_job_that_fails_again_and_again_is_several_attempts(read):
    got = read("".join(line(step, 3.0) for step in [*range(10), *range(7, 12), *range(7, 12), 7, 8, *range(7, 20)]))
    assert sorted({record.attempt for record in got.steps}) == [0, 1, 2, 3, 4]


def test_what_stands_between_the_rows_keeps_its_place(read):
    text = "".join(line(step, 3.0) for step in range(20)) + line(10, 3.0) + "validation loss 2.0\n" + line(11, 3.0)
    text += "step 11 val_loss 2.5\n" + line(12, 3.0)
    got = read(text)
    assert got.series("eval_loss") == [(11, 2.5)]
    assert got.keys()[-3:] == [(1, 10, 0), (1, 11, 0), (1, 12, 0)]
