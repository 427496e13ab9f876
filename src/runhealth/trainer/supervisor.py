"""Runs an attempt, watches it, and starts the next one: after a crash from the newest verified checkpoint, after a
rollback plan from the checkpoint that the plan names. Importable without torch: only the ranks load it.

Every restart is a new torchrun and a new attempt of the run. (Restarts inside one torchrun are not used: with gloo
they read the dead attempt's addresses unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set, and the checkpoint to go on
from has to be chosen between two attempts anyway.)
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from runhealth.storage.errors import ConfigError, MissingExtraError, PlanError, StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.records import CheckpointRecord, CheckpointStatus, EventKind, Record, RunEvent
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints, rollback
from runhealth.trainer.agent import SUPERVISOR_PID
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.data import data_folder, pack
from runhealth.trainer.failure import Failure, failure_of
from runhealth.trainer.journal import SUPERVISOR_RANK, Journal
from runhealth.trainer.launch import ENVIRONMENT, PROGRESS_PREFIX, LaunchSpec, RunState
from runhealth.trainer.processes import end_tree

POLL_S = 0.1
GRACE_S = 8.0
INTERRUPTED = 130
OUTPUT_TAIL_LINES = 40
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    attempt: int
    step: int
    stop_step: int
    loss: float


Listener = Callable[[Progress], None]


def require_torch() -> None:
    """Raises MissingExtraError with the install command, before anything is written."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("training needs torch, which is not installed: pip install 'runhealth[train]'")


class Supervisor:
    """One run, from now until `stop_step`. Use `supervise`; a second supervisor on the same run gets a ConfigError."""

    def __init__(
        self,
        store: Store,
        run: RunInfo,
        *,
        stop_step: int | None = None,
        max_restarts: int = 2,
        on_progress: Listener | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.run = run
        self.run_path = run.path
        self.config = TrainConfig.from_json(run.config, where=f"{run.path}/run.json: config")
        self.stop_step = self.config.steps if stop_step is None else stop_step
        for name, value, least in (("steps", self.stop_step, 1), ("max-restarts", max_restarts, 0)):
            if value < least:
                raise ConfigError(f"--{name}: expected at least {least}, met {value}")
        self.state = RunState.read(run.path)
        self._store = store
        self._max_restarts = max_restarts
        self._on_progress = on_progress
        self._say = say
        self._interrupted = False
        self._failure: Failure | None = None  # of the last attempt
        self._data_path = data_folder(store.root, self.config.data)
        self._events: list[tuple[str, str, dict[str, Any]]] = []  # for the log of the next attempt
        self._failed_checkpoints: list[tuple[checkpoints.CheckpointInfo, str]] = []
        self._unloadable: list[str] = []  # checkpoints that pass verification, but no rank could load
        self._journal = Journal(run.path, lambda line: say(f"{run.name}: {line}"))

    def supervise(self, plan_file: str | None = None) -> int:
        """Train to the end. Returns 0, 1 if the ranks kept failing, or 130 after Ctrl-C or SIGTERM.

        Raises:
            ConfigError: another supervisor has the run.
            PlanError: the plan of `plan_file` does not fit the run.
        """
        require_torch()
        with open(Path(self.run_path) / "supervisor.lock", "a") as lock:
            self._take(lock)
            previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                start, is_rollback = self._first_start(plan_file)
                if checkpoints.step_of(start) >= self.stop_step:
                    self._say(f"{self.run.name}: {start} is the end already; nothing to train (--steps goes further)")
                    return 0
                pack(self._data_path, self.config.data)
                return self._attempts(start, is_rollback)
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                self._write_status("ended", None)

    def _attempts(self, checkpoint: str, is_rollback: bool) -> int:
        stop_publishing = threading.Event()
        publisher = Publisher(self.run_path)
        thread = threading.Thread(target=publisher.run_forever, args=(stop_publishing,), name="publisher", daemon=True)
        thread.start()
        try:
            restarts = 0
            while True:
                self._failure = None
                ended, reason = self._one_attempt(checkpoint, is_rollback)
                if ended in (0, INTERRUPTED):
                    return ended
                if reason is not None:  # a plan was applied
                    checkpoint, is_rollback = reason, True
                    continue
                if self._cannot_load(checkpoint):  # not a restart: it ends with the last checkpoint
                    checkpoint = self._newest()
                    self._say(f"{self.run.name}: falling back to {checkpoint or 'the beginning'}")
                    continue
                restarts += 1
                if restarts > self._max_restarts:
                    self._say(f"{self.run.name}: the ranks failed {restarts} times; giving up")
                    return 1
                checkpoint, is_rollback = self._newest(), False
                self._say(f"{self.run.name}: restart {restarts} from {checkpoint or 'the beginning'}")
        finally:
            stop_publishing.set()
            thread.join()
            try:
                publisher.publish()
            except StoreError as error:
                self._say(f"{self.run.name}: {error}")

    def _one_attempt(self, checkpoint: str, is_rollback: bool) -> tuple[int, str | None]:
        """Run one torchrun. Returns its exit code, and the checkpoint to go back to if a plan ended it."""
        claimed = self._store.claim_attempt(self.run, uuid.uuid4().hex)
        spec = LaunchSpec(
            run=self.run.name,
            store=self._store.root,
            run_path=self.run_path,
            data_path=self._data_path,
            attempt=claimed.attempt,
            config=self.config,
            stop_step=self.stop_step,
            checkpoint=checkpoint,
            rollback=is_rollback,
            skips=self.state.skips,
            repairs=self.state.repairs,
            needed=tuple(path for _, path in self.state.applied),
            superseded=self.state.superseded,
        )
        launch = Path(self.run_path) / "launch" / f"a{claimed.attempt:03d}.json"
        try:
            spec.write(launch)
            output_file = open(launch.with_suffix(".log"), "wb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoreError(f"{launch}: cannot be written, so no attempt can start: {error.strerror}") from error
        self._journal.begin(claimed.path)
        try:
            self._flush(claimed.attempt)
            with output_file as output:
                agent = self._start(launch, claimed.attempt)
                self._write_status("running", agent.pid, claimed.attempt)
                tail: deque[str] = deque(maxlen=OUTPUT_TAIL_LINES)
                reader = threading.Thread(target=self._read, args=(agent, output, tail), daemon=True)
                reader.start()
                try:
                    target = self._watch(agent)
                finally:
                    if agent.poll() is None:
                        end_tree(agent.pid, GRACE_S)
                    code = agent.wait()
                    reader.join(timeout=GRACE_S)
            if self._interrupted:
                return INTERRUPTED, None
            if target is not None:
                # the ranks may have saved once more between the check of the plan and their end
                step = next(i.step for i in checkpoints.committed(self.run_path) if i.path == target)
                self.state = rollback.leave_behind(self.state, self.run_path, step)
                self.state.write(self.run_path)
                return -1, target
            if code != 0:
                self._report_failure(launch, claimed.attempt, code, tail)
            return code, None
        finally:
            self._journal.end()

    def _watch(self, agent: "subprocess.Popen[str]") -> str | None:
        """Wait until torchrun ends, a signal arrives (None), or a valid plan asks to go back (its checkpoint)."""
        while agent.poll() is None and not self._interrupted:
            for path in rollback.pending(self.run_path):
                target = self._apply_pending(path)
                if target is not None:
                    return target
            self._journal.retry()
            time.sleep(POLL_S)
        return None

    def _apply_pending(self, path: Path) -> str | None:
        try:
            checked = self._check(str(path))
        except PlanError as error:
            rollback.conclude(path, rollback.FAILED, str(error))
            self._say(f"{self.run.name}: plan refused: {error}")
            return None
        self._accept(checked)
        rollback.conclude(path, rollback.APPLIED)
        return checked.checkpoint

    def _first_start(self, plan_file: str | None) -> tuple[str, bool]:
        """Where to begin: the plan's checkpoint, else the newest one that passes verification, else nothing."""
        if plan_file is None:
            return self._newest(), False
        path = Path(plan_file)
        try:
            checked = self._check(plan_file)
        except PlanError as error:
            if path.name.endswith(rollback.PENDING):
                rollback.conclude(path, rollback.FAILED, str(error))
            raise
        self._accept(checked)
        if path.name.endswith(rollback.PENDING):
            rollback.conclude(path, rollback.APPLIED)
        else:
            folder = Path(self.run_path) / "plans"
            folder.mkdir(exist_ok=True)
            (folder / f"{checked.plan.incident}{rollback.APPLIED}").write_text(checked.plan.dumps())
        return checked.checkpoint, True

    def _check(self, path: str) -> rollback.Rollback:
        plan = rollback.read_plan(path)
        return rollback.check(plan, run=self.run.name, run_path=self.run_path, config=self.config, state=self.state)

    def _accept(self, checked: rollback.Rollback) -> None:
        self.state = checked.state
        self.state.write(self.run_path)
        self._events.append((EventKind.ROLLBACK, rollback.describe(checked), checked.plan.to_json()))
        self._say(f"{self.run.name}: rollback: {rollback.describe(checked)}")

    def _newest(self) -> str:
        info, failed = checkpoints.newest_verified(self.run_path, (*self.state.superseded, *self._unloadable))
        for bad, reason in failed:
            self._say(f"{self.run.name}: not resumed from {bad.path}: {reason}")
        self._failed_checkpoints.extend(failed)
        return info.path if info else ""

    def _cannot_load(self, checkpoint: str) -> bool:
        """Whether the attempt failed because its checkpoint, verified as it was, could not be loaded."""
        if self._failure is None or not checkpoint or self._failure.checkpoint != checkpoint:
            return False
        self._unloadable.append(checkpoint)
        match = [info for info in checkpoints.committed(self.run_path) if info.path == checkpoint]
        self._failed_checkpoints.extend((info, self._failure.message) for info in match)
        self._say(f"{self.run.name}: {checkpoint} passes verification but cannot be loaded: {self._failure.message}")
        return True

    def _start(self, launch: Path, attempt: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "runhealth.trainer.agent", "--standalone"]
        command += [f"--nproc-per-node={self.config.world}", "--max-restarts=0", "--monitor-interval=0.1"]
        command += ["--local-addr=127.0.0.1"]  # a host name that does not resolve would keep the ranks apart
        command += ["--shutdown-timeout=5", "-m", "runhealth.trainer.worker"]
        environment = {
            **os.environ,
            ENVIRONMENT: str(launch),
            SUPERVISOR_PID: str(os.getpid()),
            "RUNHEALTH_ATTEMPT": str(attempt),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",  # more makes busy ranks spin against each other
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK),
        }
        # a session of its own: Ctrl-C reaches the supervisor only, which then ends the tree in order
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _read(self, agent: "subprocess.Popen[str]", output: IO[bytes], tail: "deque[str]") -> None:
        """What the ranks print: progress goes to the listener, all else into the attempt's log file."""
        assert agent.stdout is not None
        with agent.stdout:
            for line in agent.stdout:
                if line.startswith(PROGRESS_PREFIX):
                    self._progress(line.removeprefix(PROGRESS_PREFIX))
                else:
                    tail.append(line)
                    with contextlib.suppress(OSError):  # a full disk: the pipe is read on, or the ranks would block
                        output.write(line.encode())

    def _progress(self, text: str) -> None:
        if self._on_progress is None:
            return
        try:
            raw = json.loads(text)
            progress = Progress(attempt=raw["attempt"], step=raw["step"], stop_step=raw["stop"], loss=raw["loss"])
        except (ValueError, KeyError, TypeError):
            return
        self._on_progress(progress)

    def _flush(self, attempt: int) -> None:
        """Write what happened between the attempts into the log of the new one."""
        now = time.time_ns()
        key = {"attempt": attempt, "step": 0, "rank": SUPERVISOR_RANK, "ts_ns": now}
        records: list[Record] = [
            RunEvent(**{**key, "step": int(data.get("checkpoint_step", 0))}, kind=kind, message=message, data=data)
            for kind, message, data in self._events
        ]
        records += [
            CheckpointRecord(
                **{**key, "step": info.step}, path=info.path, status=CheckpointStatus.FAILED, reason=reason
            )
            for info, reason in self._failed_checkpoints
        ]
        self._events, self._failed_checkpoints = [], []
        if records:
            self._journal.append(records)

    def _report_failure(self, launch: Path, attempt: int, code: int, tail: "deque[str]") -> None:
        text = "".join(tail)
        self._failure = failure = failure_of(launch, code, text, self.config.world)
        lines = f"; all that was printed: {launch.with_suffix('.log')}"
        if not failure.ranks and text.strip():
            lines = f"; its last lines were\n{text}"
        self._say(f"{self.run.name}: attempt {attempt} ended with exit code {code}: {failure.message}{lines}")
        event = RunEvent(
            attempt=attempt,
            step=0,
            rank=SUPERVISOR_RANK,
            ts_ns=time.time_ns(),
            kind=EventKind.EXCEPTION,
            message=failure.message,
            data={"exit_code": code, "output": text[-4000:], "ranks": list(failure.ranks)},
        )
        self._journal.append([event])

    def _take(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run {self.run.name!r} is already being trained by {self._owner()}; stop it first, or hand it a plan"
                f" with `diagnose rollback apply`"
            ) from error

    def _owner(self) -> str:
        try:
            return f"process {json.loads((Path(self.run_path) / 'supervisor.json').read_text())['pid']}"
        except (OSError, ValueError, KeyError):
            return "another supervisor"

    def _write_status(self, status: str, agent_pid: int | None, attempt: int | None = None) -> None:
        self._journal.status(
            {
                "pid": os.getpid(),
                "agent_pid": agent_pid,
                "attempt": attempt,
                "status": status,
                "updated_ns": time.time_ns(),
            }
        )

    def _on_signal(self, *_signal: object) -> None:
        self._interrupted = True


def create(store: Store, name: str, config: TrainConfig) -> RunInfo:
    """Create a run for a config. Raises ConfigError if one of this name exists with another config."""
    run = store.create_run(name, config.to_json())
    if TrainConfig.from_json(run.config, where=f"{run.path}/run.json: config") != config:
        raise ConfigError(
            f"run {name!r} exists in {store.root} with another configuration; resume it with `runhealth train --run"
            f" {name}`, or choose another name"
        )
    return run
