"""Watching: what is told, once, and again when it changes; hooks that fail and hang."""

import json
import os
import threading
import time

import pytest

from runhealth.diagnose.cli import main
from runhealth.diagnose.told import Told, state_path
from runhealth.diagnose.watch import watch
from runhealth.storage.ranklog import RankLog
from runhealth.storage.records import SourceInfo
from runhealth.storage.store import Store

INFO = SourceInfo(name="made", source="made", format="runhealth")


class Growing:
    """Records in portions, one a poll."""

    def __init__(self, *portions):
        self._portions = list(portions)

    def poll(self):
        return self._portions.pop(0) if self._portions else []


def stop_after(looks):
    """A sleep that interrupts the watch after that many looks."""
    left = [looks]

    def sleep(_seconds):
        left[0] -= 1
        if left[0] <= 0:
            raise KeyboardInterrupt

    return sleep


@pytest.fixture
def told(tmp_path):
    return lambda: Told(str(tmp_path / "state" / "told.json"))


def look(records, told, hook=None, **more):
    return watch(Growing(records), INFO, told, hook=hook, once=True, interval_s=1.0, fail_on="warning", **more)


def test_the_hook_gets_the_finding_once(records_of, told, tmp_path, capfd):
    target = tmp_path / "hook.json"
    hook = (
        f'cat > {target}.$RUNHEALTH_CODE; echo "$RUNHEALTH_CODE $RUNHEALTH_VERDICT $RUNHEALTH_STEP $RUNHEALTH_CHANGE"'
    )
    records = records_of(cause="bad_shard", seed=150)
    assert look(records, told(), hook) == 1
    out, err = capfd.readouterr()
    assert "RH101" in out
    assert "RH101 bad_shard 300 new\n" in err  # what a hook says is not mixed into the findings
    got = tmp_path / "hook.json.RH101"
    assert json.loads(got.read_text())["verdict"] == "bad_shard"
    got.unlink()
    assert look(records, told(), hook) == 1  # it still stands
    assert capfd.readouterr() == ("", "")
    assert not got.exists()


def test_a_change_fires_again(records_of, told, tmp_path):
    target = tmp_path / "calls"
    hook = f'echo "$RUNHEALTH_FINDING $RUNHEALTH_OUTCOME $RUNHEALTH_CHANGE" >> {target}'
    records = records_of(cause="bad_shard", seed=150)
    early = [r for r in records if r.step <= 306]
    look(early, told(), hook)
    look(records, told(), hook)
    calls = [line.split() for line in target.read_text().splitlines()]
    mine = [call for call in calls if call[0] == calls[0][0]]
    assert [call[2] for call in mine] == ["new", "changed"]
    assert mine[-1][1] == "non_recovering"


def test_a_minor_finding_is_told_without_a_hook(records_of, told, tmp_path, capfd):
    target = tmp_path / "called"
    assert look(records_of(cause="benign", seed=150), told(), f"touch {target}") == 0
    assert "RH101" in capfd.readouterr().out
    assert not target.exists()


def test_a_failing_hook_is_reported_and_the_watch_goes_on(records_of, told, capfd):
    assert look(records_of(cause="bad_shard", seed=150), told(), "exit 3") == 1
    assert "exit code 3" in capfd.readouterr().err


def test_a_hanging_hook_is_ended_with_all_it_started(records_of, told, tmp_path, capfd):
    child = tmp_path / "pid"
    hook = f"sleep 300 & echo $! > {child}; wait"
    assert look(records_of(cause="bad_shard", seed=150), told(), hook, hook_timeout_s=1.0) == 1
    assert "was ended after 1 s" in capfd.readouterr().err
    assert gone(int(child.read_text()))


def gone(pid):
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_hanging_hook_does_not_stop_a_running_watch(records_of, told, tmp_path, capfd):
    records = records_of(cause="bad_shard", seed=150)
    first, rest = [r for r in records if r.step <= 330], [r for r in records if r.step > 330]
    started = tmp_path / "started"
    waited = threading.Event()
    looks = []

    def sleep(_seconds):
        looks.append(1)
        if len(looks) == 1:
            for _ in range(500):
                if started.exists():
                    waited.set()
                    break
                time.sleep(0.02)
        if len(looks) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(
            Growing(first, [], rest), INFO, told(),
            hook=f"touch {started}; sleep 300", once=False, interval_s=1.0, fail_on="warning", sleep=sleep,
        )  # fmt: skip
    assert waited.is_set()  # the hook was at work
    assert len(looks) == 4  # and so was the watch
    assert "RH101" in capfd.readouterr().out


def test_a_live_watch_tells_each_change_once(records_of, told, capfd):
    records = records_of(cause="bad_shard", seed=150)
    portions = [p for n in range(0, 420, 20) for p in ([r for r in records if n <= r.step < n + 20], [])]
    with pytest.raises(KeyboardInterrupt):
        watch(
            Growing(*portions), INFO, told(),
            hook=None, once=False, interval_s=1.0, fail_on="warning", sleep=stop_after(30),
        )  # fmt: skip
    lines = [line for line in capfd.readouterr().out.splitlines() if "onset 300" in line]
    assert " new," in lines[0]
    assert all("has changed" in line for line in lines[1:])
    assert len(set(lines)) == len(lines)


def test_a_clock_that_goes_back_does_not_blind_the_watch(records_of, told, monkeypatch):
    """Whether the run is still at work is looked at anew, an hour earlier by the clock as it was before."""
    looks = []
    monkeypatch.setattr(
        "runhealth.diagnose.watch.beyond_records", lambda report, _engine, now: looks.append(now) or report
    )
    times = iter([10**19, 10**19, 10**19 - 3600 * 10**9, *[10**19 - 3600 * 10**9 + n * 10**9 for n in range(5)]])
    with pytest.raises(KeyboardInterrupt):
        watch(
            Growing(records_of(cause="benign", seed=150)),
            INFO,
            told(),
            hook=None,
            once=False,
            interval_s=1.0,
            fail_on="warning",
            sleep=stop_after(5),
            clock=lambda: next(times),
        )
    assert looks == [10**19 - 3600 * 10**9]


def test_every_line_ends_a_sentence_before_it_says_what_is_next(records_of, told, capfd):
    look(records_of(cause="bad_shard", seed=150), told())
    lines = [line for line in capfd.readouterr().out.splitlines() if " Next: " in line]
    assert lines
    assert all(line.split(" Next: ")[0].endswith((".", "…")) for line in lines)


def test_state_lies_beside_the_run_and_each_hook_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "run"
    folder.mkdir()
    mine, other = state_path(str(folder), "run", "a"), state_path(str(folder), "run", "b")
    assert mine != other
    assert mine.startswith(str(folder / "watch"))
    assert state_path(None, "log", "a").startswith(str(tmp_path / "state"))


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 9, "told": {"a": ["b"]}}', '{"version": 1, "told": 3}'])
def test_a_damaged_state_tells_anew(records_of, tmp_path, capfd, content):
    path = tmp_path / "told.json"
    path.write_text(content)
    assert look(records_of(cause="bad_shard", seed=150), Told(str(path))) == 1
    assert "RH101" in capfd.readouterr().out
    assert json.loads(path.read_text())["version"] == 1


def test_a_state_that_cannot_be_kept_is_reported_once(records_of, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    told = Told(str(tmp_path / "file" / "told.json"))
    assert look(records_of(cause="bad_shard", seed=150), told) == 1
    assert capfd.readouterr().err.count("cannot be kept") == 1


def test_watch_of_a_run_in_the_store(tmp_path, records_of, capfd):
    run = Store(str(tmp_path)).create_run("live", {})
    claim = Store(str(tmp_path)).claim_attempt(run, "launch")
    records = records_of(cause="bad_shard", seed=150)
    for rank in (0, 1):
        with RankLog.create(claim.path, rank) as log:
            log.append([r for r in records if r.rank == rank])
    assert main(["watch", "--run", "live", "--store", str(tmp_path), "--once"]) == 1
    assert "RH101" in capfd.readouterr().out
    assert main(["watch", "--run", "live", "--store", str(tmp_path), "--once"]) == 1
    assert capfd.readouterr().out == ""
    assert os.listdir(f"{run.path}/watch")  # noqa: PTH208
    assert main(["--run", "live", "--store", str(tmp_path)]) == 1  # the state is no part of the run


def test_watch_of_a_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "log.jsonl"
    rows = [
        {"step": s, "loss": 2.0 + 2.0 ** (1 - s / 40) + (4.0 if s >= 150 else 0.001 * ((s * 7919) % 13))}
        for s in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:140]))
    assert main(["watch", str(path), "--once"]) == 0
    assert capfd.readouterr().out == ""
    with path.open("a") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows[140:])
    assert main(["watch", str(path), "--once"]) == 1
    assert "onset 150" in capfd.readouterr().out
    assert main(["watch", str(path), "--once"]) == 1
    assert capfd.readouterr().out == ""
    assert main(["watch", str(tmp_path / "none.log"), "--once"]) == 3
