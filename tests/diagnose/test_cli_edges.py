"""The command at its edges: empty stretches, pipes, closed streams, folders, logs of a few lines."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from runhealth.diagnose.cli import main
from runhealth.diagnose.spool import SpooledLog
from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.store import Store

CLI = [sys.executable, "-m", "runhealth.diagnose.cli"]


def rows(count=200, spike=None):
    lines = []
    for step in range(count):
        loss = 2.0 + 2.0 ** (1 - step / 40) + 0.001 * ((step * 7919) % 13)
        lines.append(json.dumps({"step": step, "loss": float("nan") if step == spike else loss}) + "\n")
    return "".join(lines)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(rows())
    return str(path)


def shell(script, *arguments):
    """The command as "$@" of a shell, which closes and redirects as users do."""
    return subprocess.run(
        ["bash", "-c", script, "bash", *CLI, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("stretch", "said"),
    [
        (["--at", "999999"], "no step there (999,749 to 1,000,249); the run has steps 0-199"),
        (["--at", "-5", "--window", "10"], "the run has steps 0-199"),
        (["--attempt", "99"], "no attempt 99 there; the run has attempt 0 only"),
        (["--attempt", "0", "--at", "900", "--window", "10"], "attempt 0 has steps 0-199"),
    ],
)
def test_an_empty_stretch_is_no_all_clear(log, capsys, stretch, said):
    assert main([log, *stretch]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_the_judged_stretch_is_told(log, capsys):
    for form in ("text", "markdown", "html"):
        assert main([log, "--at", "100", "--window", "20", "--format", form]) == 0
        assert "judged: steps 90-110" in capsys.readouterr().out
    main([log, "--at", "4", "--window", "20", "--format", "json"])
    assert json.loads(capsys.readouterr().out)["run"]["window"] == [0, 14]
    main([log])
    assert "judged:" not in capsys.readouterr().out


def test_a_short_stretch_of_a_long_run_is_judged(log):
    assert main([log, "--at", "100", "--window", "2"]) == 0


@pytest.mark.parametrize(("count", "code"), [(1, 3), (4, 3), (5, 0)])
def test_a_handful_of_steps_is_no_all_clear(tmp_path, capsys, count, code):
    path = tmp_path / "few.csv"
    path.write_text("step,loss\n" + "".join(f"{n},2.0{n}\n" for n in range(count)))
    assert main([str(path)]) == code
    assert ("too few to judge" in capsys.readouterr().err) == (code == 3)


def test_what_a_short_log_does_tell_is_told(tmp_path, capsys):
    path = tmp_path / "short.log"
    path.write_text("step 1 | loss 3.0\nstep 2 | loss 2.9\nTraceback (most recent call last):\nValueError: no\n")
    assert main([str(path), "--format", "json"]) == 1
    assert [f["kind"] for f in json.loads(capsys.readouterr().out)["findings"]] == ["crash"]


@pytest.mark.parametrize(
    "script",
    ['cat "$LOG" | "$@" -', 'cat "$LOG" | "$@" /dev/stdin', '"$@" - <"$LOG"', '"$@" <(cat "$LOG")'],
)
def test_a_log_comes_through_a_pipe_and_leaves_nothing_behind(tmp_path, monkeypatch, script):
    path = tmp_path / "nan.jsonl"
    path.write_text(rows(spike=150))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("LOG", str(path))
    done = shell(script.replace('"$@"', '"$@" --format json'))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert [f["onset_step"] for f in report["findings"] if f["kind"] == "non_finite"] == [150]
    assert str(scratch) not in done.stdout
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("script", ['"$@" "$LOG"', 'cat "$LOG" | "$@" -'])
def test_sarif_names_the_line_of_the_onset(tmp_path, monkeypatch, script):
    path = tmp_path / "nan.csv"
    lines = [f"{n},{'nan' if n >= 150 else 2.5 - n / 1000}" for n in range(200)]
    path.write_text("\n".join(["step,loss", *lines, ""]))
    monkeypatch.setenv("LOG", str(path))
    done = shell(script.replace('"$@"', '"$@" --format sarif'))
    results = json.loads(done.stdout)["runs"][0]["results"]
    (place,) = (r["locations"][0]["physicalLocation"] for r in results if r["properties"]["kind"] == "non_finite")
    assert place["region"]["startLine"] == 152


def test_an_error_about_a_pipe_names_the_pipe():
    done = shell('echo nothing here | "$@" -')
    assert done.returncode == 3
    assert done.stderr.startswith("diagnose: stdin: no line with a step and a loss")
    assert shell('"$@" - <&-').returncode == 3
    assert shell('"$@" - </dev/null').stderr == "diagnose: stdin is empty\n"


def test_a_named_pipe_with_a_late_writer_is_read_and_one_without_is_told(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(NoUsableDataError, match="no process writes to"):
        SpooledLog(str(pipe), {}, wait_s=0.05)
    writer = threading.Timer(0.2, pipe.write_text, [rows()])
    writer.start()
    spooled = SpooledLog(str(pipe), {}, wait_s=20.0)
    writer.join()
    assert sum(1 for _ in spooled.records()) == 200
    assert (spooled.describe().name, spooled.describe().source) == ("pipe", str(pipe))
    spooled.close()


def test_what_reads_a_log_again_and_again_refuses_a_pipe_and_does_not_block(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    for command in (["watch", pipe], ["import", pipe, "--name", "x", "--store", str(tmp_path)], ["watch", "-"]):
        done = subprocess.run([*CLI, *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3
        assert "is a pipe" in done.stderr
    assert main(["/dev/zero"]) == 3


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('"$@" "$LOG" >&-', "it is closed"),
        ('"$@" --help >/dev/full', "No space left"),
        ('"$@" --version >/dev/full', "No space left"),
        ('"$@" "$LOG" --format json >/dev/full', "No space left"),
    ],
)
def test_a_stdout_that_cannot_be_written_exits_2_with_one_line(log, monkeypatch, script, said):
    monkeypatch.setenv("LOG", log)
    done = shell(script)
    assert done.returncode == 2
    assert done.stderr.startswith("diagnose: cannot write to stdout: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_closed_streams_that_are_not_needed_do_no_harm(log, tmp_path, monkeypatch):
    monkeypatch.setenv("LOG", log)
    monkeypatch.setenv("OUT", str(tmp_path / "out.txt"))
    assert shell('"$@" "$LOG" -o "$OUT" >&-').returncode == 0
    assert "nothing" in (tmp_path / "out.txt").read_text()
    assert shell('"$@" "$LOG" 2>&-').returncode == 0
    gone = shell('"$@" /nowhere.log 2>&-')
    assert (gone.returncode, gone.stdout) == (3, "")


def test_a_folder_of_one_run_of_several_and_a_store(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(rows())
    assert main([str(tmp_path)]) == 0
    (tmp_path / "b.jsonl").write_text(rows(50))
    capsys.readouterr()
    for command in ([], ["doctor"]):
        assert main([*command, str(tmp_path)]) == 3
        err = capsys.readouterr().err
        assert "holds 2 runs" in err
        assert "a.jsonl" in err
        assert "b.jsonl" in err
    root = tmp_path / "store"
    for name in ("one", "two"):
        Store(str(root)).create_run(name, {})
    assert main([str(root)]) == 3
    assert f"is a store of 2 runs: one, two; expected one: --run one --store {root}" in capsys.readouterr().err


def test_a_failure_with_a_known_cause_is_no_crash_beside_it(tmp_path, capsys):
    steps = "".join(f"step {n} | loss {3 - n / 100:.2f}\n" for n in range(40))
    ends = {
        "out_of_memory": 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n",
        "hang": "[rank1]:[E1129 10:15:02 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds\n",
        "crash": 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nValueError: no\n',
    }
    for kind, end in ends.items():
        path = tmp_path / f"{kind}.log"
        path.write_text(steps + end)
        assert main([str(path), "--format", "json"]) == 1
        assert [f["kind"] for f in json.loads(capsys.readouterr().out)["findings"]] == [kind]


def test_a_column_of_nan_is_no_evidence(tmp_path, capsys):
    path = tmp_path / "nan.csv"
    path.write_text("step,loss,grad_norm,lr\n" + "".join(f"{n},nan,nan,nan\n" for n in range(60)))
    assert main([str(path), "--format", "json"]) == 1
    out = capsys.readouterr().out
    assert "kept to its course" not in out
    (finding,) = json.loads(out)["findings"]
    assert {s["suspect"]: s["status"] for s in finding["suspects"]}["lr_change"] == "not_observed"


def test_watch_follows_a_log_that_grows(tmp_path):
    path = tmp_path / "live.jsonl"
    path.write_text(rows(100))
    watching = subprocess.Popen(
        [*CLI, "watch", str(path), "--interval", "0.05"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"},
    )
    end = threading.Timer(60, watching.kill)
    end.start()
    try:
        assert watching.stdout is not None
        with path.open("a") as log:
            log.write("".join(rows(160, spike=140).splitlines(keepends=True)[100:]))
        said = watching.stdout.readline()  # blocks until something is told
        assert "onset 140" in said
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130
    finally:
        end.cancel()
        watching.kill()
        watching.wait()
        watching.stdout.close()
