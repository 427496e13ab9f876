"""The command: exit codes, streams, bad input, start-up, rollback from end to end short of training."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runhealth.diagnose import apply as applying
from runhealth.diagnose import port, rollback_cli
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
        ["explain"],
        ["explain", "RH999"],
        ["doctor"],
        ["--run", "a", "--at", "5", "--window", "0"],
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


def test_an_internal_error_exits_70(monkeypatch, store, capsys):
    def explode(*_args, **_kwargs):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("runhealth.diagnose.service.diagnose", explode)
    assert main(["--run", "clean", "--store", store]) == 70
    assert "this is a bug" in capsys.readouterr().err


def test_interrupted_exits_130(monkeypatch, store):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("runhealth.diagnose.service.diagnose", interrupt)
    assert main(["--run", "clean", "--store", store]) == 130


def test_a_reader_that_goes_away_is_no_error(store):
    command = f"{sys.executable} -m runhealth.diagnose.cli --run spiked --store {store} --format json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("{")


def test_a_latin_1_terminal_gets_ascii(store):
    done = run_cli("--run", "spiked", "--store", store, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 1
    assert done.stdout.isascii()


def test_output_goes_to_a_file(store, tmp_path, capsys):
    target = tmp_path / "report.md"
    assert main(["--run", "spiked", "--store", store, "--format", "markdown", "-o", str(target)]) == 1
    assert capsys.readouterr().out == ""
    assert "bad_shard" in target.read_text().replace("\\", "")


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


def test_explain_and_doctor(store, log, capsys):
    assert main(["explain", "rh101"]) == 0
    assert "loss_spike" in capsys.readouterr().out
    assert main(["doctor", log(healthy_rows())]) == 0
    out = capsys.readouterr().out
    assert "bad_shard: cannot look" in out
    assert "grad_norm: bursts of gradient" in out
    assert main(["doctor", "--run", "spiked", "--store", store]) == 0
    assert "layer.overflow_count" in capsys.readouterr().out


def test_watch_once_fires_the_hook(store, tmp_path, capsys):
    target = tmp_path / "hook.json"
    hook = f"cat > {target}; test $RUNHEALTH_CODE = RH101"
    assert main(["watch", "--run", "spiked", "--store", store, "--once", "--hook", hook]) == 1
    out, err = capsys.readouterr()
    assert "RH101 new" in out
    assert err == ""
    assert json.loads(target.read_text())["verdict"] == "bad_shard"
    assert main(["watch", "--run", "spiked", "--store", store, "--once", "--hook", "exit 3"]) == 1
    assert "exit code 3" in capsys.readouterr().err


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
