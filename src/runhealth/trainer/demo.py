"""`runhealth demo`: a run goes wrong, is diagnosed, goes back, and heals; beside it the same run without the fault."""

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runhealth.storage.errors import ConfigError, RunhealthError, StoreError
from runhealth.storage.reader import RunReader
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import recipes
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.data import BatchPlan, data_folder, describe, pack
from runhealth.trainer.fault import FaultContext, FaultLabel
from runhealth.trainer.fault import create as create_fault
from runhealth.trainer.processes import interrupt_group, interrupted_by_sigterm
from runhealth.trainer.progress import ProgressLine
from runhealth.trainer.supervisor import INTERRUPTED, Supervisor, create, require_torch

HEALTHY, SPIKE = "demo-healthy", "demo-spike"
FAULT = FaultSpec(name="bad_shard", params={"step": 330, "rank": 1, "mode": "noise"})
STOPPED_AT = 370  # an operator stops the faulty run here, some forty steps after the loss went up
WINDOW_STEPS = 50
CLOSE_NATS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses in nats, means over ranks and steps; `eval` is the last held-out loss."""

    before: float
    spike: float
    healed: float
    healthy: float
    healed_eval: float
    healthy_eval: float


class _Interrupted(Exception):
    pass


def main(store_root: str | None = None) -> int:
    """Returns 0, 1 if something did not go as it should, or 130 after Ctrl-C.

    Raises:
        MissingExtraError: torch is not installed.
    """
    require_torch()
    store = Store(store_root)
    config = recipes.load("demo")
    try:
        with interrupted_by_sigterm():
            return _demo(store, config)
    except _Interrupted:
        print("\ninterrupted; nothing is left running", file=sys.stderr)
        return INTERRUPTED


def _demo(store: Store, config: TrainConfig) -> int:
    label = fault_label(config)
    for name in (HEALTHY, SPIKE):
        _remove(store, name)

    _heading("1  Data", "the Python standard library's own source files, packed into shards")
    manifest = pack(data_folder(store.root, config.data), config.data)
    summary = describe(manifest)
    print(f"   {summary['shards']} shards, {int(str(summary['bytes'])) / 1e6:.1f} MB, each with its xxh3 hash")

    _heading("2  Train", f"a small transformer on {config.world} data-parallel ranks, without a fault: {HEALTHY}")
    _train(store, create(store, HEALTHY, config), config.steps)

    shard, ranks = ", ".join(label.shards), ", ".join(map(str, label.ranks))
    _heading(
        "3  The same run with a fault",
        f"shard {shard} arrives corrupted on rank {ranks} at step {label.onset_step}: {SPIKE}",
    )
    faulty = dataclasses.replace(config, faults=(FAULT,))
    _train(store, create(store, SPIKE, faulty), STOPPED_AT)

    _heading("4  What went wrong?", "")
    _diagnose(store, ["--run", SPIKE], allowed=(0, 1))

    _heading("5  Go back and skip the bad samples", "")
    _diagnose(store, ["rollback", "plan", "--run", SPIKE], allowed=(0,))
    _diagnose(store, ["rollback", "apply", "--run", SPIKE], allowed=(0,))

    _heading("6  Result", "")
    outcome = measure(store, label, config)
    print(table(outcome))
    _farewell(store)
    return 0 if _is_healed(outcome) else 1


def fault_label(config: TrainConfig) -> FaultLabel:
    plan = BatchPlan(data=config.data, seed=config.seed, world=config.world)
    return create_fault(FAULT, FaultContext(config=config, plan=plan, rank=0)).label()


def measure(store: Store, label: FaultLabel, config: TrainConfig) -> Outcome:
    """Read both runs back; of a step that was trained twice the last attempt counts, except at the spike."""
    last = range(config.steps - WINDOW_STEPS, config.steps)
    with RunReader.open(SPIKE, store.root) as run:
        first = _losses(run, "min")
        healed = _losses(run, "max")
        healed_eval = _last_eval(run)
    with RunReader.open(HEALTHY, store.root) as run:
        healthy = _losses(run, "max")
        healthy_eval = _last_eval(run)
    assert label.last_step is not None
    return Outcome(
        before=_mean(first, range(label.onset_step - WINDOW_STEPS, label.onset_step)),
        spike=max(first[step] for step in range(label.onset_step, label.last_step + 1)),
        healed=_mean(healed, last),
        healthy=_mean(healthy, last),
        healed_eval=healed_eval,
        healthy_eval=healthy_eval,
    )


def table(outcome: Outcome) -> str:
    rows = (
        ("before the fault", outcome.before, None),
        ("at the spike (worst step)", outcome.spike, None),
        (f"after healing (last {WINDOW_STEPS} steps)", outcome.healed, outcome.healed_eval),
        (f"never had the fault (last {WINDOW_STEPS} steps)", outcome.healthy, outcome.healthy_eval),
    )
    lines = [f"   {'':<38}{'train loss':>12}{'held-out':>12}"]
    lines += [
        f"   {name:<38}{train:>12.3f}{'' if held_out is None else f'{held_out:.3f}':>12}"
        for name, train, held_out in rows
    ]
    gap, held_out_gap = outcome.healed - outcome.healthy, outcome.healed_eval - outcome.healthy_eval
    word = "healed" if _is_healed(outcome) else "NOT healed"
    lines.append(
        f"   {word}: {gap:+.3f} nats in training and {held_out_gap:+.3f} held-out against the run without the fault"
        f" (bar: {CLOSE_NATS})"
    )
    return "\n".join(lines)


def _is_healed(outcome: Outcome) -> bool:
    gaps = (outcome.healed - outcome.healthy, outcome.healed_eval - outcome.healthy_eval)
    return all(abs(gap) <= CLOSE_NATS for gap in gaps)


def _losses(run: RunReader, which: str) -> dict[int, float]:
    """Mean loss over the ranks by step, of the first (`min`) or last (`max`) attempt that trained it."""
    frame = run.sql(
        f"SELECT step, avg(loss) AS loss FROM steps AS s WHERE loss IS NOT NULL AND attempt ="
        f" (SELECT {which}(attempt) FROM steps AS t WHERE t.step = s.step AND t.loss IS NOT NULL)"
        f" GROUP BY step ORDER BY step"
    )
    return dict(zip(frame["step"].to_list(), frame["loss"].to_list(), strict=True))


def _last_eval(run: RunReader) -> float:
    frame = run.sql("SELECT eval_loss FROM steps WHERE eval_loss IS NOT NULL ORDER BY step DESC, attempt DESC LIMIT 1")
    return float(frame["eval_loss"][0])


def _mean(losses: dict[int, float], steps: range) -> float:
    return sum(losses[step] for step in steps) / len(steps)


def _train(store: Store, run: RunInfo, stop_step: int) -> None:
    line = ProgressLine(run.name)
    try:
        code = Supervisor(store, run, stop_step=stop_step, on_progress=line).supervise()
    finally:
        line.close()
    if code == INTERRUPTED:
        raise _Interrupted
    if code:
        raise RunhealthError(f"training {run.name} failed; see {run.path}/launch/")


def _diagnose(store: Store, arguments: list[str], allowed: tuple[int, ...]) -> None:
    """Run the real command as a user would and show what it prints. Ctrl-C reaches the child too; it is waited for."""
    shown = shlex.join(["diagnose", *arguments])
    print(f"   $ {shown}\n", flush=True)
    command = [sys.executable, "-m", "runhealth.diagnose.cli", *arguments]
    terminated = False

    def on_terminate(*_signal: object) -> None:
        nonlocal terminated
        terminated = True
        interrupt_group(child.pid)

    child = subprocess.Popen(command, env={**os.environ, "RUNHEALTH_STORE": store.root})
    previous = signal.signal(signal.SIGTERM, on_terminate)
    try:
        while True:
            try:
                code = child.wait()
                break
            except KeyboardInterrupt:
                terminated = True
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(flush=True)
    if terminated or code == INTERRUPTED:
        raise _Interrupted
    if code not in allowed:
        raise RunhealthError(f"`{shown}` ended with exit code {code}")


def _remove(store: Store, name: str) -> None:
    """The demo replaces its own two runs, and nothing else."""
    folder = Path(store.root) / name
    if not folder.exists():
        return
    if not (folder / "run.json").is_file():
        raise StoreError(f"{folder}: expected a run of an earlier demo, met another folder; move it or use --store")
    lock = folder / "supervisor.lock"
    if lock.exists():
        with open(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = json.loads((folder / "supervisor.json").read_text()).get("pid")
                raise ConfigError(f"{name} is being trained by process {pid}; stop it first") from error
    shutil.rmtree(folder)


def _heading(title: str, text: str) -> None:
    print(f"\n{title}{': ' if text else ''}{text}", flush=True)


def _farewell(store: Store) -> None:
    default = Path(store.root) == Path("runs").absolute()
    option = "" if default else f" --store {shlex.quote(store.root)}"
    # a newcomer comes from `make demo` and has not activated the environment
    prefix = "" if shutil.which("diagnose") else shlex.quote(os.path.relpath(Path(sys.executable).parent)) + "/"
    print(
        f"\n   watch it            {prefix}runhealth dashboard --run {SPIKE}{option}"
        f"\n   the post-mortem     {prefix}diagnose --run {SPIKE}{option}"
        f"\n   a spike at 40k      {prefix}diagnose --run 40k-spike"
    )
