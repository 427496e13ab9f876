"""Runs an attempt, watches it, and starts the next one: after a crash from the newest verified checkpoint, after a
rollback plan from the checkpoint that the plan names. Importable without torch: only the ranks load it.

Every restart is a new attempt of the run with new processes. They are forked by agents that stay (`nodes`), so a
restart pays for no import, and a lost node gives way to a spare.
"""

import importlib.util
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runhealth.storage.errors import CheckpointError, ConfigError, MissingExtraError, PlanError, StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.records import EventKind
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints, elastic, rollback
from runhealth.trainer.attempt import STOPPED_SLACK_S, Attempt, Listener, Output
from runhealth.trainer.config import TrainConfig
from runhealth.trainer.data import data_folder, pack
from runhealth.trainer.failure import Failure
from runhealth.trainer.journal import Journal, failed_record
from runhealth.trainer.launch import LaunchSpec, RunState, write_json
from runhealth.trainer.lock import owned
from runhealth.trainer.nodes import Nodes, environment_for
from runhealth.trainer.restarts import RestartPolicy

POLL_S = 0.1
GRACE_S = 8.0
INTERRUPTED = 130


def require_torch(config: TrainConfig | None = None) -> None:
    """Raises MissingExtraError with the install command, before anything is written. With a config: also for what its
    number format needs."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("training needs torch, which is not installed: pip install 'runhealth[train]'")
    if config is not None and config.model.precision == "fp8_torchao" and importlib.util.find_spec("torchao") is None:
        raise MissingExtraError(
            "precision fp8_torchao needs torchao, which is not installed: pip install --no-deps torchao"
        )


def check_nodes(nodes: int, config: TrainConfig) -> None:
    """Raises ConfigError for more nodes than ranks."""
    if nodes > config.world:
        raise ConfigError(f"--nodes: expected at most one a rank, {config.world}, met {nodes}")


class Supervisor:
    """One run, from now until `stop_step`. Use `supervise`; a second supervisor on the same run gets a ConfigError.

    `min_world`: when ranks were lost again and again and no spare is there, go on with fewer, down to so many; None:
    the run ends then. The next supervisor begins with all ranks again.
    """

    def __init__(
        self,
        store: Store,
        run: RunInfo,
        *,
        stop_step: int | None = None,
        max_restarts: int = 2,
        nodes: int = 1,
        spares: int = 0,
        min_world: int | None = None,
        on_progress: Listener | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.run = run
        self.run_path = run.path
        self.config = TrainConfig.from_json(run.config, where=f"{run.path}/run.json: config")
        self.stop_step = self.config.steps if stop_step is None else stop_step
        for name, value, least in (
            ("steps", self.stop_step, 1),
            ("max-restarts", max_restarts, 0),
            ("nodes", nodes, 1),
            ("spares", spares, 0),
            ("min-world", self.config.world if min_world is None else min_world, 1),
        ):
            if value < least:
                raise ConfigError(f"--{name}: expected at least {least}, met {value}")
        check_nodes(nodes, self.config)
        if min_world is not None:
            elastic.check_least(self.config, min_world)
        self.state = RunState.read(run.path)
        self._base = checkpoints.base_of(self.config.checkpoint.target, run.name, run.path)
        self._failed_ns = 0  # when the last failure was found
        self._store = store
        self._max_restarts = max_restarts
        self._policy = RestartPolicy(max_restarts)
        self._current = self.config  # of the attempt: with fewer ranks once the world has shrunk
        self._min_world = min_world
        self._counts = (nodes, spares)
        self._say = say
        self._output = Output(on_progress, self._tell)
        self._interrupted = False
        self._failure: Failure | None = None  # of the last attempt
        self._data_path = data_folder(store.root, self.config.data)
        self._events: list[tuple[str, str, dict[str, Any]]] = []  # for the log of the next attempt
        self._failed_checkpoints: list[tuple[checkpoints.CheckpointInfo, str]] = []
        self._set_aside: set[Path] = set()  # plans that the disk did not let us apply or conclude
        self._unloadable: list[str] = []  # checkpoints that pass verification, but no rank could load
        self._journal = Journal(run.path, self._tell)

    def supervise(self, plan_file: str | None = None) -> int:
        """Train to the end. Returns 0, 1 if the ranks kept failing, or 130 after Ctrl-C or SIGTERM.

        Raises:
            ConfigError: another supervisor has the run.
            PlanError: the plan of `plan_file` does not fit the run.
        """
        require_torch(self.config)
        with owned(self.run.name, self.run_path):
            previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                start, is_rollback = self._first_start(plan_file)
                self._grow_back(start)
                if checkpoints.step_of(start) >= self.stop_step:
                    self._tell(f"{start} is the end already; nothing to train (--steps goes further)")
                    return 0
                pack(self._data_path, self.config.data)
                return self._attempts(start, is_rollback)
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                self._write_status("ended")

    def _attempts(self, checkpoint: str, is_rollback: bool) -> int:
        stop_publishing = threading.Event()
        publisher = Publisher(self.run_path)
        thread = threading.Thread(target=publisher.run_forever, args=(stop_publishing,), name="publisher", daemon=True)
        thread.start()
        count, spares = self._counts
        nodes = Nodes(
            count=count,
            spares=spares,
            environment=environment_for(os.environ),
            on_line=self._output.line,
            lost_after_s=self.config.timeout_s + STOPPED_SLACK_S,
        )
        try:
            while True:
                self._failure = None
                ended, reason = self._one_attempt(nodes, checkpoint, is_rollback)
                if ended in (0, INTERRUPTED):
                    return ended
                if reason is not None:  # a plan was applied
                    checkpoint, is_rollback = reason, True
                    continue
                if self._cannot_load(checkpoint):  # not a restart: it ends with the last checkpoint
                    checkpoint = self._newest()
                    self._tell(f"falling back to {checkpoint or 'the beginning'}")
                    continue
                checkpoint, is_rollback = self._newest(), False
                why = self._policy.give_up(self._failure, checkpoints.step_of(checkpoint)) if self._failure else ""
                if why:
                    changed = self._change_nodes(nodes, checkpoint)
                    self._tell(f"{why}; {changed or 'giving up'}")
                    if not changed:
                        return 1
                    continue
                self._tell(f"restart {self._policy.failures} from {checkpoint or 'the beginning'}")
        finally:
            nodes.close(GRACE_S)
            stop_publishing.set()
            thread.join()
            try:
                publisher.publish()
            except StoreError as error:
                self._tell(str(error))

    def _grow_back(self, checkpoint: str) -> None:
        """Whoever starts a run whose world had shrunk says that all ranks are there again."""
        before, now = self.state.world, self.config.world
        if not before:
            return
        facts = {"checkpoint_step": checkpoints.step_of(checkpoint), **_worlds(before, now)}
        self._events.append(("world_changed", f"the world grows back from {before} to {now} ranks", facts))
        self.state = replace(self.state, world=0)
        self.state.write(self.run_path)

    def _change_nodes(self, nodes: Nodes, checkpoint: str) -> str:
        """The restarts are used up. Where that is the fault of a rank, and not of code or data: take a spare in its
        node's place, else go on without it. Returns what was done; an empty text if nothing could be."""
        failure = self._failure
        if failure is None or failure.kind not in ("hang", "dead_rank") or not failure.ranks:
            return ""
        where = {"checkpoint_step": checkpoints.step_of(checkpoint), "ranks": list(failure.ranks)}
        swapped = nodes.swap(failure.ranks)
        if swapped:
            message = f"node {', '.join(swapped)} gives way to a spare"
            self._events.append(("node_left", message, {**where, "nodes": swapped}))
        elif self._min_world is None:
            return ""
        else:
            before, room = self._current, nodes.leave_out(failure.ranks)
            found = elastic.shrink(before, room, self._min_world, failure.ranks)
            if found is None:
                return ""
            self._current = found.config
            message = elastic.describe(before, found.config)
            if found.dropped:
                message += f"; gone with a rank: {', '.join(found.dropped)}"
            self._events.append(("world_changed", message, {**where, **_worlds(before.world, found.config.world)}))
            self.state = replace(self.state, world=found.config.world)
            self.state.write(self.run_path)
        self._policy = RestartPolicy(self._max_restarts)
        return f"{message}; on from {checkpoint or 'the beginning'}"

    def _one_attempt(self, nodes: Nodes, checkpoint: str, is_rollback: bool) -> tuple[int, str | None]:
        """Run the ranks once. Returns their exit code, and the checkpoint to go back to if a plan ended them."""
        claimed = self._store.claim_attempt(self.run, uuid.uuid4().hex)
        spec = LaunchSpec(
            run=self.run.name,
            store=self._store.root,
            run_path=self.run_path,
            data_path=self._data_path,
            attempt=claimed.attempt,
            config=self._current,
            stop_step=self.stop_step,
            checkpoint=checkpoint,
            rollback=is_rollback,
            skips=self.state.skips,
            repairs=self.state.repairs,
            needed=tuple(path for _, path in self.state.applied),
            superseded=self.state.superseded,
            failed_ns=self._failed_ns,
        )
        self._failed_ns = 0
        launch = Path(self.run_path) / "launch" / f"a{claimed.attempt:03d}.json"
        try:
            spec.write(launch)
            output_file = open(launch.with_suffix(".log"), "wb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoreError(f"{launch}: cannot be written, so no attempt can start: {error.strerror}") from error
        self._journal.begin(claimed.path)
        try:
            self._flush(claimed.attempt)
            if self.state.returning:  # from here on the attempt itself tells where it began
                self.state = replace(self.state, returning="")
                self.state.write(self.run_path)
            with output_file as output:
                self._output.begin(output)
                attempt = Attempt(nodes, launch, self._current.world, self.config.timeout_s, self._tell)
                for name in attempt.start():
                    self._tell(f"node {name} takes the place of a lost one")
                    self._journal.event(
                        claimed.attempt, 0, "node_replaced", f"node {name} takes the place of a lost one", {}
                    )
                target = self._watch(attempt, nodes, claimed.attempt)
                if attempt.failed:
                    self._report_failure(launch, claimed.attempt, attempt)
                elif not attempt.over:
                    attempt.stop(GRACE_S)
                self._output.end()
            if self._interrupted:
                return INTERRUPTED, None
            if target is not None:
                # the ranks may have saved once more between the check of the plan and their end
                step = next(i.step for i in checkpoints.committed(self._base) if i.path == target)
                self.state = rollback.leave_behind(self.state, self._base, step)
                self.state.write(self.run_path)
                return -1, target
            return attempt.code, None
        finally:
            self._output.end()
            self._journal.end()

    def _watch(self, attempt: Attempt, nodes: Nodes, number: int) -> str | None:
        """Wait until the ranks end or fail, a signal arrives (None), or a valid plan asks to go back (its
        checkpoint)."""
        suspended: set[int] = set()
        while not attempt.over and not self._interrupted:
            if attempt.look(POLL_S):
                self._write_status("running", nodes, number)
            if suspended != attempt.stopped.keys():
                suspended = set(attempt.stopped)
                ranks = sorted(suspended)
                message = f"ranks suspended: {', '.join(map(str, ranks)) or 'none any more'}"
                self._journal.event(number, 0, "rank_suspended", message, {"ranks": ranks})
            for path in rollback.pending(self.run_path):
                target = self._apply_pending(path)
                if target is not None:
                    return target
            self._journal.retry()
        return None

    def _apply_pending(self, path: Path) -> str | None:
        if path in self._set_aside:
            return None
        try:
            checked = self._check(str(path))
            self._accept(checked)
        except PlanError as error:
            self._tell(f"plan refused: {error}")
            self._conclude(path, rollback.FAILED, str(error))
            return None
        except StoreError as error:
            self._set_aside.add(path)
            self._tell(f"plan {path.name} is set aside, training goes on: {error}")
            return None
        self._conclude(path, rollback.APPLIED)
        return checked.checkpoint

    def _conclude(self, path: Path, suffix: str, reason: str = "") -> None:
        """A plan whose file cannot be renamed (a full disk) is not looked at again by this supervisor."""
        try:
            rollback.conclude(path, suffix, reason)
        except StoreError as error:
            self._set_aside.add(path)
            self._tell(str(error))

    def _first_start(self, plan_file: str | None) -> tuple[str, bool]:
        """Where to begin: the plan's checkpoint, else the newest one that passes verification, else nothing."""
        returning = self._unfinished()
        if plan_file is None:
            return (returning, True) if returning else (self._newest(), False)
        path = Path(plan_file)
        try:
            checked = self._check(plan_file)
        except PlanError as error:
            if path.name.endswith(rollback.PENDING):
                self._conclude(path, rollback.FAILED, str(error))
            raise
        self._accept(checked)
        if path.name.endswith(rollback.PENDING):
            self._conclude(path, rollback.APPLIED)
        else:
            kept = Path(self.run_path) / "plans" / f"{checked.plan.incident}{rollback.APPLIED}"
            try:
                write_json(kept, checked.plan.to_json())
            except OSError as error:
                self._tell(f"{kept}: the plan is applied, but cannot be kept: {error.strerror}")
        return checked.checkpoint, True

    def _unfinished(self) -> str:
        """The checkpoint of a rollback that an earlier supervisor accepted and did not live to make."""
        if not self.state.returning:
            return ""
        try:
            self.state, message, facts = rollback.unfinished(self.run_path, self._base, self.state)
        except CheckpointError as error:
            self._tell(f"the rollback that was accepted cannot be made: {error}")
            self.state = replace(self.state, returning="")
        else:
            self._events.append((EventKind.ROLLBACK, message, facts))
            self._tell(f"rollback: {message}")
        self.state.write(self.run_path)
        return self.state.returning

    def _check(self, path: str) -> rollback.Rollback:
        plan = rollback.read_plan(path)
        return rollback.check(plan, run=self.run.name, run_path=self.run_path, config=self.config, state=self.state)

    def _accept(self, checked: rollback.Rollback) -> None:
        checked.state.write(self.run_path)
        self.state = checked.state
        self._events.append((EventKind.ROLLBACK, rollback.describe(checked), checked.plan.to_json()))
        self._tell(f"rollback: {rollback.describe(checked)}")

    def _newest(self) -> str:
        """The checkpoint to go on from, between two attempts; empty for none."""
        for path in checkpoints.sweep(self._base):
            self._tell(f"{path}: a save that did not finish; removed")
        info, failed = checkpoints.newest_verified(self._base, (*self.state.superseded, *self._unloadable))
        for bad, reason in failed:
            self._tell(f"not resumed from {bad.path}: {reason}")
        self._failed_checkpoints.extend(failed)
        return info.path if info else self.state.origin

    def _cannot_load(self, checkpoint: str) -> bool:
        """Whether the attempt failed because its checkpoint, verified as it was, could not be loaded."""
        if self._failure is None or not checkpoint or self._failure.checkpoint != checkpoint:
            return False
        if checkpoint == self.state.origin:
            return False  # nothing lies before it: to begin with nothing instead is not for us to decide
        self._unloadable.append(checkpoint)
        match = [info for info in checkpoints.committed(self._base) if info.path == checkpoint]
        self._failed_checkpoints.extend((info, self._failure.message) for info in match)
        self._tell(f"{checkpoint} passes verification but cannot be loaded: {self._failure.message}")
        return True

    def _flush(self, attempt: int) -> None:
        """Write what happened between the attempts into the log of the new one."""
        for kind, message, data in self._events:
            self._journal.event(attempt, int(data.get("checkpoint_step", 0)), kind, message, data)
        self._journal.append(
            [failed_record(attempt, info.step, info.path, reason) for info, reason in self._failed_checkpoints]
        )
        self._events, self._failed_checkpoints = [], []

    def _report_failure(self, launch: Path, number: int, attempt: Attempt) -> None:
        self._failure = failure = attempt.post_mortem()
        self._failed_ns = attempt.detected_ns
        text = "".join(self._output.tail)
        lines = f"; all that was printed: {launch.with_suffix('.log')}"
        if not failure.ranks and text.strip():
            lines = f"; its last lines were\n{text}"
        self._tell(f"attempt {number} ended with exit code {attempt.code}: {failure.message}{lines}")
        data = attempt.facts(failure, text)
        step = max(0, failure.step)
        self._journal.event(number, step, EventKind.EXCEPTION, failure.message, data)
        if failure.kind in ("hang", "dead_rank"):
            self._journal.event(number, step, failure.kind, failure.message, {"ranks": list(failure.ranks)})

    def _tell(self, line: str) -> None:
        self._say(f"{self.run.name}: {line}")

    def _write_status(self, status: str, nodes: Nodes | None = None, attempt: int | None = None) -> None:
        self._journal.status(
            {
                "pid": os.getpid(),
                "agents": nodes.agent_pids if nodes else {},
                "ranks": nodes.pids if nodes else {},
                "attempt": attempt,
                "status": status,
                "updated_ns": time.time_ns(),
            }
        )

    def _on_signal(self, *_signal: object) -> None:
        self._interrupted = True


def _worlds(before: int, now: int) -> dict[str, int]:
    return {"world_before": before, "world": now}


def create(store: Store, name: str, config: TrainConfig) -> RunInfo:
    """Create a run for a config. Raises ConfigError if one of this name exists with another config."""
    run = store.create_run(name, config.to_json())
    if TrainConfig.from_json(run.config, where=f"{run.path}/run.json: config") != config:
        raise ConfigError(
            f"run {name!r} exists in {store.root} with another configuration; resume it with `runhealth train --run"
            f" {name}`, or choose another name"
        )
    return run
