"""The command `runhealth replay`: orders in, telemetry of replayed stretches out. Importable without torch.

It is the other end of `diagnose.port`: one JSON order a line on stdin, one JSON answer a line on stdout, until stdin
ends. Torch is loaded once for all orders. The run is read only: a replay writes into
`<run>/replays/<incident>/<name>/`, which has the shape of a run's folder.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runhealth.diagnose.plans import ReplayOrder
from runhealth.storage.errors import CheckpointError, ConfigError, RunhealthError, StoreError
from runhealth.storage.jsontext import parse_json
from runhealth.trainer import checkpoints
from runhealth.trainer.attempt import Attempt, Output
from runhealth.trainer.data import MANIFEST as DATA_MANIFEST
from runhealth.trainer.data import data_folder
from runhealth.trainer.folders import join
from runhealth.trainer.launch import LaunchSpec
from runhealth.trainer.nodes import Nodes, environment_for
from runhealth.trainer.processes import die_with_parent

if TYPE_CHECKING:
    from runhealth.storage.store import RunInfo

FOLDER = "replays"
POLL_S = 0.05
GRACE_S = 5.0
_OURS = ("RUNHEALTH_AGENT", "RUNHEALTH_ATTEMPT", "RUNHEALTH_DRILL")  # meant for training, not for its replay


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train stretches of a run once more, each with one thing changed: JSON orders on stdin, answers on stdout. "
        "`diagnose replay` calls it."
    )
    parser.add_argument("--run", required=True, metavar="R", help="name, unique prefix or path of the run")
    parser.add_argument("--store", metavar="S", help="where runs are kept (default: $RUNHEALTH_STORE, else ./runs)")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process does")


def run_replay(arguments: argparse.Namespace) -> int:
    """Serve orders until stdin ends. What cannot be done is an answer `{"error": …}`, not an exit."""
    from runhealth.storage.store import Store
    from runhealth.trainer.supervisor import require_torch

    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    require_torch()
    run = Store(arguments.store).resolve(arguments.run)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stage = Stage(run)
    try:
        for line in sys.stdin:
            try:
                order = ReplayOrder.from_json(parse_json(line))
                answer: dict[str, object] = {"path": stage.play(order)}
            except (RunhealthError, ValueError) as error:
                answer = {"error": str(error)}
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()
    finally:
        stage.close()
    return 0


class Stage:
    """Where the stretches of one run are played again, one after the other, with processes that stay."""

    def __init__(self, run: "RunInfo") -> None:
        self.run = run
        self._output = Output(None, _say)
        self._nodes: Nodes | None = None

    def play(self, order: ReplayOrder) -> str:
        """Returns the folder of the replay's telemetry.

        Raises:
            ConfigError: the run, attempt or checkpoint is not one that can be played again.
            CheckpointError: the checkpoint fails verification.
            StoreError: the telemetry cannot be written, or the ranks failed.
        """
        spec = self._spec(order)
        launch = Path(spec.run_path) / "launch.json"
        try:
            spec.write(launch)
            output = open(launch.with_suffix(".log"), "wb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoreError(f"{launch}: cannot be written: {error.strerror}") from error
        if self._nodes is None:
            environment = {key: value for key, value in os.environ.items() if key not in _OURS}
            self._nodes = Nodes(count=1, spares=0, environment=environment_for(environment), on_line=self._output.line)
        config = spec.config
        with output:
            self._output.begin(output)
            attempt = Attempt(self._nodes, launch, config.world, config.timeout_s, _say)
            try:
                attempt.start()
                while not attempt.over:
                    attempt.look(POLL_S)
                if attempt.failed:
                    failure = attempt.post_mortem()
                    raise StoreError(
                        f"the ranks of the replay failed: {failure.message}; see {launch.with_suffix('.log')}"
                    )
            except KeyboardInterrupt:
                attempt.stop(GRACE_S)
                raise
            finally:
                self._output.end()
        return spec.run_path

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.close(GRACE_S)

    def _spec(self, order: ReplayOrder) -> LaunchSpec:
        """The launch of the order's attempt, turned into one of a replay; its folder is made anew."""
        run_path = str(Path(self.run.path).resolve())
        spec = self._launch(order, run_path)
        store_root = str(Path(run_path).parent)
        base = checkpoints.base_of(spec.config.checkpoint.target, self.run.name, run_path)
        found = self._checkpoint(order.checkpoint, spec, base)
        before = self._checkpoint(order.before, spec, base) if order.before else ""
        data_path = data_folder(store_root, spec.config.data)
        if not (Path(data_path) / DATA_MANIFEST).is_file():
            raise ConfigError(
                f"{data_path}: expected the run's training data, met none; a replay packs"
                " nothing: bring this folder along from the store in which the run was trained"
            )
        home = Path(run_path) / FOLDER / order.incident
        from runhealth.storage.store import Store, check_run_name

        for name in (order.incident, order.name):
            check_run_name(name)
        _make_room(home / order.name, Path(run_path))
        store = Store(str(home))
        made = store.create_run(order.name, spec.config.to_json())
        claimed = store.claim_attempt(made, "replay")
        return replace(
            spec,
            run=order.name,
            store=store.root,
            run_path=made.path,
            data_path=data_path,
            attempt=claimed.attempt,
            stop_step=order.stop_step,
            checkpoint=found,
            rollback=spec.rollback and order.resumes,
            needed=(),
            superseded=(),
            failed_ns=0,
            replay=replace(order, before=before),
        )

    def _launch(self, order: ReplayOrder, run_path: str) -> LaunchSpec:
        path = Path(run_path) / "launch" / f"a{order.attempt:03d}.json"
        try:
            return LaunchSpec.read(str(path))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path}: missing; attempt {order.attempt} of run {self.run.name!r} was not started by `runhealth"
                " train`, so there is nothing to play again"
            ) from error
        except KeyError as error:
            raise ConfigError(f"{path}: expected the launch of an attempt, met none of its field {error}") from error
        except (OSError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{path}: expected the launch of an attempt, met {error}") from error

    def _checkpoint(self, path: str, spec: LaunchSpec, base: str) -> str:
        """The whole path or URL of a checkpoint of the run, or of the one that the attempt itself began with."""
        plain = re.fullmatch(rf"{checkpoints.FOLDER}/[A-Za-z0-9_.-]+", path) and not path.endswith(("/.", "/.."))
        if not plain and path != spec.checkpoint:
            raise ConfigError(f"expected a checkpoint of run {self.run.name!r}, met {path!r}")
        whole = join(base, path)
        try:
            checkpoints.verify(whole)
        except CheckpointError as error:
            raise CheckpointError(f"nothing is replayed from a checkpoint that fails verification: {error}") from error
        return whole


def _make_room(folder: Path, run: Path) -> None:
    """Remove what an earlier replay left there, which must lie in the run: a folder that came from somewhere may hold a
    link to anything. Raises ConfigError, StoreError."""
    if folder.is_symlink() or not folder.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{folder}: expected a folder of the run, met a link to {folder.resolve()}; remove it first")
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}: an earlier replay cannot be removed: {error.strerror}") from error


def _say(line: str) -> None:
    print(f"replay: {line}", file=sys.stderr, flush=True)
