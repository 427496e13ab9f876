"""The command `runhealth train`: its arguments and what it does. Importable without torch."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from runhealth.storage.errors import ConfigError, StoreError
from runhealth.trainer import recipes
from runhealth.trainer.config import FaultSpec, TrainConfig
from runhealth.trainer.fault import registry
from runhealth.trainer.processes import interrupted_by_sigterm

if TYPE_CHECKING:
    from runhealth.storage.store import RunInfo, Store

# The supervisor brings DuckDB along: the functions here import it, so that `runhealth --help` stays fast.


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a new run from a recipe, or resume a run from its newest verified checkpoint."
    parser.add_argument("--recipe", metavar="NAME", help=f"start a new run from a recipe: {', '.join(recipes.names())}")
    parser.add_argument("--run", metavar="R", help="resume this run; with --recipe, the name of the new run")
    parser.add_argument(
        "--from", dest="origin", metavar="R", help="begin a new run with the newest checkpoint of R, in any layout"
    )
    parser.add_argument("--store", metavar="S", help="where runs are kept (default: $RUNHEALTH_STORE, else ./runs)")
    parser.add_argument("--plan", metavar="FILE", help="go back by this rollback plan first (a run that has ended)")
    parser.add_argument(
        "--fault",
        metavar="NAME:KEY=VALUE,…",
        action="append",
        default=[],
        help=f"inject a fault into a new run, for drills: {', '.join(sorted(registry()))}. A bad shard is bad from"
        " its first sample on: bad_shard:step=150 begins at the start of the visit that covers step 150",
    )
    parser.add_argument("--steps", metavar="N", type=int, help="train up to this step (default: the recipe's)")
    parser.add_argument("--seed", metavar="N", type=int, help="seed of a new run (default: the recipe's)")
    parser.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=2,
        help="after failures without a new checkpoint in between (default: %(default)s)",
    )
    parser.add_argument(
        "--nodes", metavar="N", type=int, default=1, help="processes that hold the ranks (default: %(default)s)"
    )
    parser.add_argument(
        "--spares", metavar="N", type=int, default=0, help="that wait to replace a lost one (default: %(default)s)"
    )
    parser.add_argument(
        "--min-world",
        metavar="N",
        type=int,
        help="when restarts and spares are used up, go on without the lost ranks, with N at least (default: give up)",
    )


def run_train(arguments: argparse.Namespace) -> int:
    """0 done · 1 the ranks kept failing · 130 interrupted.

    Raises:
        MissingExtraError: torch is not installed.
        ConfigError, PlanError, StoreError, RunNotFoundError: said before anything starts.
    """
    with interrupted_by_sigterm():
        return _run_train(arguments)


def _run_train(arguments: argparse.Namespace) -> int:
    from runhealth.storage.store import Store
    from runhealth.trainer.progress import ProgressLine
    from runhealth.trainer.supervisor import Supervisor, require_torch

    require_torch()
    _check_numbers(arguments)
    store = Store(arguments.store)
    run = _new_run(store, arguments) if arguments.recipe else _old_run(store, arguments)
    line = ProgressLine(run.name)
    supervisor = Supervisor(
        store,
        run,
        stop_step=arguments.steps,
        max_restarts=arguments.max_restarts,
        nodes=arguments.nodes,
        spares=arguments.spares,
        min_world=arguments.min_world,
        on_progress=line,
    )
    try:
        return supervisor.supervise(arguments.plan)
    finally:
        line.close()


def _new_run(store: "Store", arguments: argparse.Namespace) -> "RunInfo":
    from runhealth.storage.store import check_run_name
    from runhealth.trainer.elastic import check_least
    from runhealth.trainer.origin import begin_with, newest_of
    from runhealth.trainer.supervisor import check_nodes, create, require_torch

    if arguments.run is not None:
        try:
            check_run_name(arguments.run)
        except StoreError as error:
            raise ConfigError(f"--run: {error}") from error
    config = recipes.load(arguments.recipe)
    changes: dict[str, object] = {}
    if arguments.fault:
        changes["faults"] = tuple(FaultSpec.parse(text) for text in arguments.fault)
    if arguments.steps is not None:
        changes["steps"] = arguments.steps
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    config = dataclasses.replace(config, **changes)  # type: ignore[arg-type]
    require_torch(config)
    check_faults(config)
    check_nodes(arguments.nodes, config)
    if arguments.min_world is not None:
        check_least(config, arguments.min_world)
    if arguments.fault:
        _check_fault_steps(config)
    taken = {run.name for run in store.runs()}
    name = arguments.run or _free_name(arguments.recipe, taken)
    if name in taken:
        raise ConfigError(f"run {name!r} exists in {store.root}; resume it with `runhealth train --run {name}`")
    origin = newest_of(store.resolve(arguments.origin), config) if arguments.origin else ""
    print(f"new run {name} in {store.root}", file=sys.stderr)
    run = create(store, name, config)
    if origin:
        begin_with(run, origin)
        print(f"it begins with {origin}", file=sys.stderr)
    return run


def _old_run(store: "Store", arguments: argparse.Namespace) -> "RunInfo":
    if arguments.run is None:
        raise ConfigError("expected --recipe NAME for a new run or --run R to resume one")
    for option, given in (("fault", arguments.fault), ("seed", arguments.seed), ("from", arguments.origin)):
        if given:
            raise ConfigError(f"--{option} belongs to a new run (--recipe); run {arguments.run!r} keeps its own")
    run = store.resolve(arguments.run)
    if run.bundled:
        raise ConfigError(f"run {run.name!r} is shipped with the package for reading; it cannot be trained on")
    return run


def _check_numbers(arguments: argparse.Namespace) -> None:
    for option, value, least in (
        ("--steps", arguments.steps, 1),
        ("--max-restarts", arguments.max_restarts, 0),
        ("--nodes", arguments.nodes, 1),
        ("--spares", arguments.spares, 0),
        ("--min-world", arguments.min_world, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option}: expected at least {least}, met {value}")


def _check_fault_steps(config: TrainConfig) -> None:
    """A fault that was asked for must happen. (A recipe's own may lie beyond a shorter --steps.)"""
    for spec in config.faults:
        step = spec.params.get("step")
        if isinstance(step, int) and not 0 <= step < config.steps:
            raise ConfigError(
                f"--fault {spec.name}: expected a step from 0 to {config.steps - 1}, as the run has {config.steps}"
                f" steps, met step {step}"
            )


def check_faults(config: TrainConfig) -> None:
    """Raises ConfigError for a fault or parameter that does not exist or does not fit the run."""
    from runhealth.trainer.data import BatchPlan
    from runhealth.trainer.fault import FaultContext
    from runhealth.trainer.fault import create as create_fault

    plan = BatchPlan(data=config.data, seed=config.seed, world=config.dp)
    for spec in config.faults:
        if spec.name == "router_collapse" and not config.model.experts:
            raise ConfigError("fault router_collapse: expected a model with a router (recipe experts), met one without")
        create_fault(spec, FaultContext(config=config, plan=plan, rank=0))


def _free_name(recipe: str, taken: set[str]) -> str:
    base = recipe.replace("_", "-")
    number = 1
    while (name := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return name
