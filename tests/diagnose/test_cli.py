"""The command: exit codes, streams, bad input, start-up, rollback from end to end short of training."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runhealth.diagnose import apply as applying
from runhealth.diagnose import opening, port, rollback_cli
from runhealth.diagnose.cli import main
from runhealth.diagnose.plans import RollbackPlan
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.store import Store


def write_run(root, name, records, launch="launch"):
    """Records into rank logs of a store, as the monitor would."""
    store = Store(str(root))
    run = store.create_run(name, {})
    by_rank = {}
    for record in records:
        by_rank.setdefault(record.rank, []).append(record)
    claim = store.claim_attempt(run, launch)
    for rank, mine in sorted(by_rank.items()):
        with RankLog.create(claim.path, rank) as log:
            for start in range(0, len(mine), 500):
                log.append(mine[start : start + 500])
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory, records_of):
    root = tmp_path_factory.mktemp("store")
    write_run(root, "spiked", records_of(cause="bad_shard", seed=150))
    write_run(root, "clean", records_of(seed=150))
    return str(root)


@pytest.fixture
def log(tmp_path):
    def make(rows, name="log.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" if not isinstance(row, str) else row for row in rows))
        return str(path)

    return make


def healthy_rows(count=200):
    return [{"step": s, "loss": 2.0 + 2.0 ** (1 - s / 40) + 0.001 * ((s * 7919) % 13)} for s in range(count)]


def run_cli(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "runhealth.diagnose.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **kwargs,
    )


def test_findings_exit_1_and_stdout_holds_only_the_report(store, capsys):
    assert main(["--run", "spiked", "--store", store, "--format", "json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    finding = report["findings"][0]
    assert (finding["kind"], finding["verdict"], finding["onset_step"], finding["ranks"]) == (
        "loss_spike",
        "bad_shard",
        300,
        [1],
    )
    assert report["run"]["name"] == "spiked"
    assert report["run"]["format"] == "runhealth"


def test_every_query_recomputes_its_value(store):
    from runhealth.diagnose.service import diagnose

    checked = 0
    with RunReader.open("spiked", store) as reader:
        for finding in diagnose(reader).findings:
            for suspect in finding.suspects:
                for evidence in suspect.evidence:
                    if evidence.query:
                        (value,) = reader.sql(evidence.query).row(0)
                        assert value == pytest.approx(evidence.value, rel=1e-5), evidence.claim
                        checked += 1
    assert checked >= 6


@pytest.mark.parametrize("cause", ["fp_overflow", "clip_breach", "lr_change", "optimizer_state", "benign"])
def test_queries_of_the_other_causes(tmp_path, records_of, cause):
    from runhealth.diagnose.service import diagnose

    write_run(tmp_path, "r", records_of(cause=cause, seed=151))
    queries = 0
    with RunReader.open("r", str(tmp_path)) as reader:
        for finding in diagnose(reader).findings:
            for suspect in finding.suspects:
                for evidence in suspect.evidence:
                    if evidence.query:
                        (value,) = reader.sql(evidence.query).row(0)
                        assert value == pytest.approx(evidence.value, rel=1e-5), (evidence.claim, evidence.query)
                        queries += 1
    assert queries >= 3


def test_a_clean_run_exits_0_and_fail_on_moves_the_bar(store, log, capsys):
    assert main(["--run", "clean", "--store", store]) == 0
    assert "nothing at warning or above" in capsys.readouterr().out
    rows = healthy_rows()
    rows[150]["loss"] *= 1.5
    path = log(rows)
    assert main([path]) == 0
    assert main([path, "--fail-on", "info"]) == 1
    assert main(["--run", "spiked", "--store", store, "--fail-on", "error"]) == 1
    assert main(["--run", "spiked", "--store", store, "--at", "150", "--window", "100"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--run", "a", "b.log"],
        ["--run", "a", "--window", "5"],
        ["--format", "yaml", "x"],
        ["--nonsense"],
        ["rollback"],
        ["rollback", "plan"],
        ["watch"],
        ["explain", "RH999"],
        ["watch", "--run", "a", "b.log"],
        ["import", "b.log"],
        ["--run", "a", "--map", "loss=ce"],
        ["b.log", "--map", "loss"],
        ["b.log", "--map", "los=ce"],
        ["b.log", "--map", "loss=a", "--map", "loss=b"],
        ["doctor"],
        ["--run", "a", "--at", "5", "--window", "0"],
        ["--run", "a", "--at", "5", "--window", "-3"],
        ["--run", "a", "--window", "10"],
    ],
)
def test_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err


def test_unknown_run_exits_3_with_the_nearest_names(store, capsys):
    assert main(["--run", "spikd", "--store", store]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "spiked" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("content", ["", "nothing to see here\n", "\x00\x01\x02" * 100, '{"step": 1}\n{"step": 2}\n'])
def test_no_usable_data_exits_3(log, capsys, content):
    path = log([content], "odd.log")
    assert main([path]) == 3
    assert "odd.log" in capsys.readouterr().err
    assert main(["/nowhere/at/all.log"]) == 3


def test_readable_in_part_exits_4(log):
    rows = healthy_rows()
    rows[20] = '{"step": 20, "loss": 2.0, \n'
    assert main([log(rows)]) == 4


def test_several_files_take_the_worst_exit_code(log, capsys):
    good = log(healthy_rows())
    assert main([good, "/nowhere/at/all.log"]) == 3
    capsys.readouterr()
    assert main([good, good, "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main([good, "/nowhere/at/all.log", "--format", "json"]) == 3
    assert isinstance(json.loads(capsys.readouterr().out), list)


def broken_plugin(folder):
    """An installed package whose suspect is none: what the user has installed breaks the command."""
    info = folder / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[runhealth.suspects]\nbroken = broken_suspect:NOTHING\n")
    (folder / "broken_suspect.py").write_text("NOTHING = 3\n")
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_an_internal_error_exits_70_with_one_line(store, tmp_path):
    environment = broken_plugin(tmp_path)
    done = run_cli("--run", "clean", "--store", store, env=environment)
    assert done.returncode == 70
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "internal error" in line
    assert "expected SUSPECT to be a Suspect" in line
    assert "RUNHEALTH_TRACEBACK=FILE" in line
    kept = tmp_path / "trace.txt"
    done = run_cli("--run", "clean", "--store", store, env={**environment, "RUNHEALTH_TRACEBACK": str(kept)})
    assert done.returncode == 70
    assert str(kept) in done.stderr
    assert "Traceback" in kept.read_text()


def test_interrupted_exits_130(store):
    command = [sys.executable, "-m", "runhealth.diagnose.cli", "watch", "--run", "spiked", "--store", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert "RH101" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert err == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error(store):
    command = f"{sys.executable} -m runhealth.diagnose.cli --run spiked --store {store} --format json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("{")
    assert done.returncode == 1  # what was found is not lost with the reader


def test_a_latin_1_terminal_gets_ascii(store):
    done = run_cli("--run", "spiked", "--store", store, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 1
    assert done.stdout.isascii()


def test_output_goes_to_a_file(store, tmp_path, capsys):
    target = tmp_path / "report.md"
    assert main(["--run", "spiked", "--store", store, "--format", "markdown", "-o", str(target)]) == 1
    assert capsys.readouterr().out == ""
    assert "bad_shard" in target.read_text().replace("\\", "")


def test_output_replaces_a_file_at_once_and_never_a_device_or_a_link(store, tmp_path, capsys):
    target, link = tmp_path / "report.txt", tmp_path / "link.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    assert main(["--run", "clean", "--store", store, "-o", str(link)]) == 0
    assert "nothing at warning" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "report.txt"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert main(["--run", "clean", "--store", store, "-o", str(pipe)]) == 0
    assert "nothing at warning" in reader.communicate(timeout=60)[0]
    assert pipe.is_fifo()
    capsys.readouterr()


def test_an_output_that_cannot_be_written_exits_2_and_says_why(store, tmp_path, capsys):
    assert main(["--run", "clean", "--store", store, "-o", str(tmp_path / "none" / "r.txt")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["--run", "clean", "--store", store, "-o", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_full_stdout_exits_2(store):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "runhealth.diagnose.cli", "--run", "clean", "--store", store],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert "cannot write to stdout" in done.stderr


def test_a_mapping_names_the_loss_of_a_log(log, capsys):
    rows = [{"step": row["step"], "train/ce": row["loss"], "aux_loss": 9.0} for row in healthy_rows()]
    rows[150]["train/ce"] = float("nan")
    path = log(rows)
    main([path, "--map", "loss=train/ce", "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert "loss" in report["run"]["signals"]
    assert any(f["kind"] == "non_finite" and f["onset_step"] == 150 for f in report["findings"])
    with pytest.raises(SystemExit):
        main([path, "--map", "train/ce=loss"])
    assert "did you mean loss=train/ce?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([path, "--map", "grad_nrm=x"])
    assert "grad_norm" in capsys.readouterr().err


def test_import_makes_a_run_and_twice_is_once(log, tmp_path, capsys):
    rows = healthy_rows()
    for row in rows[150:]:
        row["loss"] += 3.0
    path, root = log(rows), str(tmp_path / "runs")
    assert main(["import", path, "--name", "theirs", "--store", root]) == 0
    database = tmp_path / "runs" / "theirs" / "run.duckdb"
    before = database.stat().st_mtime_ns
    assert main(["import", path, "--name", "theirs", "--store", root]) == 0
    assert database.stat().st_mtime_ns == before
    capsys.readouterr()
    assert main(["--run", "theirs", "--store", root, "--format", "json"]) == 1
    imported = json.loads(capsys.readouterr().out)["findings"]
    main([path, "--format", "json"])
    read = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["kind"], f["onset_step"]) for f in imported] == [(f["kind"], f["onset_step"]) for f in read]
    other = log(healthy_rows(), "other.jsonl")
    with pytest.raises(SystemExit) as stop:
        main(["import", other, "--name", "theirs", "--store", root])
    assert stop.value.code == 2
    assert main(["import", "/nowhere/at/all.log", "--name", "n", "--store", root]) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_shows_on_a_terminal_after_a_second(monkeypatch, list_source, records_of):
    source = list_source(records_of(seed=150) * 4)
    ticks = iter(range(10_000))
    shown = Terminal()
    progress = opening.Progress(source, shown, clock=lambda: next(ticks) * 0.6)
    assert sum(1 for _ in progress.records()) == len(list(source.records()))
    assert "records, step" in shown.getvalue()
    assert shown.getvalue().endswith("\r")  # nothing of it stays
    quick = Terminal()
    list(opening.Progress(source, quick, clock=lambda: 0.0).records())
    assert quick.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert opening.with_progress(source) is source
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(opening.with_progress(source), opening.Progress)


def test_help_and_a_diagnosis_import_no_torch_and_help_nothing_heavy(store):
    code = (
        "import sys; from runhealth.diagnose.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'duckdb', 'polars', 'torch'} & set(sys.modules)\n"
        f"main(['--run', 'spiked', '--store', {store!r}, '--format', 'json', '-o', '/dev/null'])\n"
        "print(heavy, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().splitlines()[-1] == "set() False"


def test_a_run_folder_is_a_path_too(store, capsys):
    assert main([f"{store}/spiked", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["run"]["format"] == "runhealth"


def test_explain(capsys):
    assert main(["explain", "rh101"]) == 0
    assert "loss_spike" in capsys.readouterr().out
    assert main(["explain", "fp-overflow"]) == 0
    out = capsys.readouterr().out
    assert "RH107 fp_overflow" in out
    assert "suspect fp_overflow" in out
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("RH602", "checkpoint_slow", "bad_shard"))
    with pytest.raises(SystemExit):
        main(["explain", "bad_shad"])
    assert "did you mean bad_shard" in capsys.readouterr().err


def test_doctor_says_how_completely_each_signal_is_there(store, log, tmp_path, capsys):
    rows = healthy_rows()
    for row in rows[::4]:
        row["grad_norm"] = 1.0
    assert main(["doctor", log(rows), "--format", "json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert {s["signal"]: s["share_of_steps"] for s in seen["signals"]} == {"loss": 1.0, "grad_norm": 0.25}
    assert {"signal": "lr", "would_tell": "a schedule that jumped, or was not restored"} in seen["missing"]
    looks = {s["suspect"]: s["can_look"] for s in seen["suspects"]}
    assert (looks["bad_shard"], looks["benign"]) == (False, True)
    assert next(k for k in seen["kinds"] if k["kind"] == "loss_scale_collapse")["needs"] == "loss_scale"
    assert main(["doctor", "--run", "spiked", "--store", store, "--format", "json"]) == 0
    signals = {s["signal"]: s for s in json.loads(capsys.readouterr().out)["signals"]}
    assert signals["grad_norm"]["ranks"] == [0]
    assert signals["grad_norm_rank"]["ranks"] == [0, 1]
    assert signals["layer.amax"]["share_of_steps"] == pytest.approx(0.1, abs=0.01)
    assert main(["doctor", "--run", "spiked", "--store", store]) == 0
    out = capsys.readouterr().out
    assert "all ranks" in out
    assert "loss_scale_collapse: needs loss_scale" in out
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["doctor", str(empty)]) == 3


# -- rollback ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rolled(tmp_path, records_of):
    run = write_run(tmp_path, "spiked", records_of(cause="bad_shard", seed=152))
    folder = tmp_path / "spiked" / "checkpoints" / "step-00000250"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")
    return run, str(tmp_path)


def test_plan_is_written_and_printed(rolled, capsys):
    run, root = rolled
    assert main(["rollback", "plan", "--run", "spiked", "--store", root]) == 0
    out = capsys.readouterr().out
    assert "checkpoint 250" in out
    assert "shard 0007" in out
    plan = applying.read_plan(f"{run.path}/plans/a0-s300.json")
    assert plan.run == "spiked"
    assert plan.skip


def test_a_shipped_run_gets_no_plan_written_into_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", "plan", "--run", "40k-spike"]) == 0
    out = capsys.readouterr().out
    assert "checkpoint 40,000" in out
    assert "written" not in out
    with RunReader.open("40k-spike") as reader:
        assert reader.info.bundled
        assert not (Path(reader.info.path) / "plans").exists()


def test_no_plan_says_why(tmp_path, records_of, capsys):
    write_run(tmp_path, "clean", records_of(seed=152))
    assert main(["rollback", "plan", "--run", "clean", "--store", str(tmp_path)]) == 3
    assert "nothing was found" in capsys.readouterr().err


def test_apply_hands_the_plan_to_a_child_when_nobody_supervises(rolled, monkeypatch, capsys):
    run, root = rolled
    main(["rollback", "plan", "--run", "spiked", "--store", root])
    calls = []
    monkeypatch.setattr(rollback_cli, "resume_with_plan", lambda *args: calls.append(args) or 7)
    assert main(["rollback", "apply", "--run", "spiked", "--store", root, "--dry-run"]) == 0
    assert calls == []
    assert main(["rollback", "apply", "--run", "spiked", "--store", root]) == 7
    dropped = f"{run.path}/plans/a0-s300.apply.json"
    assert calls == [("spiked", root, dropped)]
    assert RollbackPlan.loads(Path(dropped).read_text()).checkpoint_step == 250
    assert port.train_command(*calls[0])[1:4] == ["-m", "runhealth.cli", "train"]
    capsys.readouterr()


def test_apply_leaves_it_to_a_live_supervisor(rolled, capsys):
    run, root = rolled
    main(["rollback", "plan", "--run", "spiked", "--store", root])
    code = (
        "import fcntl, json, os, sys, time\n"
        "lock = open(sys.argv[1] + '/supervisor.lock', 'a'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "json.dump({'pid': os.getpid()}, open(sys.argv[1] + '/supervisor.json', 'w'))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, run.path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        assert applying.live_supervisor(run.path) == holder.pid
        assert main(["rollback", "apply", "--run", "spiked", "--store", root]) == 0
        assert "takes it from here" in capsys.readouterr().out
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    deadline = time.monotonic() + 10
    while applying.live_supervisor(run.path) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert applying.live_supervisor(run.path) is None


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda plan: {**plan, "run": "another"}, "made for 'another'"),
        (lambda plan: {**plan, "checkpoint_path": "checkpoints/step-1"}, "not a folder of the run"),
        (lambda plan: {**plan, "checkpoint_path": "../../etc"}, "not a folder of the run"),
    ],
)
def test_apply_refuses_a_plan_that_does_not_hold(rolled, capsys, damage, why):
    run, root = rolled
    main(["rollback", "plan", "--run", "spiked", "--store", root])
    path = f"{run.path}/plans/a0-s300.json"
    plan = damage(json.loads(Path(path).read_text()))
    applying.write_atomically(path, json.dumps(plan))
    assert main(["rollback", "apply", "--run", "spiked", "--store", root, path]) == 1
    out, err = capsys.readouterr()
    assert why in out
    assert "not applied" in err
    assert not Path(f"{run.path}/plans/a0-s300.apply.json").exists()


def test_apply_refuses_what_has_failed_before_and_a_missing_manifest(rolled, capsys):
    run, root = rolled
    main(["rollback", "plan", "--run", "spiked", "--store", root])
    plan = Path(f"{run.path}/plans/a0-s300.json").read_text()
    applying.write_atomically(f"{run.path}/plans/a0-s300.failed.json", plan)
    assert main(["rollback", "apply", "--run", "spiked", "--store", root]) == 1
    assert "failed plan" in capsys.readouterr().out
    Path(f"{run.path}/plans/a0-s300.failed.json").unlink()
    Path(f"{run.path}/checkpoints/step-00000250/MANIFEST.json").unlink()
    assert main(["rollback", "apply", "--run", "spiked", "--store", root, "--dry-run"]) == 1
    assert "MANIFEST.json is missing" in capsys.readouterr().out


def test_apply_without_a_plan_or_with_a_bad_one_exits_3(rolled, tmp_path, capsys):
    _, root = rolled
    assert main(["rollback", "apply", "--run", "spiked", "--store", root]) == 3
    assert "diagnose rollback plan" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text('{"schema_version": 1}')
    assert main(["rollback", "apply", "--run", "spiked", "--store", root, str(bad)]) == 3
    with pytest.raises(applying.PlanError):
        applying.plan_path(root, "../x")
