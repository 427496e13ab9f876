"""The commands of the fault bench."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.faults.plan import RunPlan, runs


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runhealth" / "faults"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description="small training runs with labelled faults, and what is made of them"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is not in the cache, diagnose it, store the results")
    run.add_argument("--seed", type=int, action="append", help="only this base seed (may be given several times)")
    run.add_argument("--limit", type=int, help="at most so many runs")
    run.add_argument("--split", choices=("tuning", "report"), help="only this split")
    run.add_argument("--kind", action="append", help="only this kind, and twins (may be given several times)")
    run.add_argument("--cache", type=Path, default=default_cache(), help="telemetry is kept here (%(default)s)")
    run.add_argument("--out", type=Path, help="where results go; the committed ones are only written by a whole split")
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    run.add_argument("--train-only", action="store_true", help="make telemetry and diagnose nothing")
    report = commands.add_parser("report", help="print the figures of the stored results")
    report.add_argument("--json", action="store_true")
    report.add_argument("--results", type=Path, help="where the results are (default: the committed ones)")
    report.add_argument("--page", action="store_true", help="also write docs/bench.md and its pictures")
    commands.add_parser("real", help="hold the simulated ranks against the real trainer")
    heal = commands.add_parser("heal", help="roll back the runs of a split that have a true loss spike; store the end")
    heal.add_argument("--split", choices=("tuning", "report"), default="report", help="default: %(default)s")
    heal.add_argument("--limit", type=int, help="at most so many runs; results are printed, not stored")
    heal.add_argument(
        "--cache", type=Path, default=default_cache(), help="where `run` left the telemetry (%(default)s)"
    )
    heal.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    args = parser.parse_args(argv)
    if args.command == "heal":
        return _heal(args)
    if args.command == "real":
        from bench.faults import real

        return real.main()
    return _run(args) if args.command == "run" else _report(args)


# --------------------------------------------------------------------------------------------------------------- run


def _run(args: argparse.Namespace) -> int:
    plans = [
        plan
        for plan in runs(args.seed)
        if (args.split is None or plan.split == args.split) and (args.kind is None or plan.kind in ("", *args.kind))
    ][: args.limit]
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers inherit it
    bases = list(dict.fromkeys((plan.scene.seed, plan.scene.precision) for plan in plans))
    _in_pool(args.jobs, "base", _base, [(args.cache, *base) for base in bases])
    _in_pool(args.jobs, "run", _fork, [(args.cache, plan) for plan in plans])
    if args.train_only:
        return 0
    # in processes of their own: the workers above have torch, which the diagnosis must not need
    from bench.faults import results

    engine = results.engine_hash()
    found = _in_pool(args.jobs, "diagnosis", _examine, [(args.cache, plan.name, engine) for plan in plans])
    return _store(args, plans, found)


def _store(args: argparse.Namespace, plans: Sequence[RunPlan], found: Iterable[dict[str, Any]]) -> int:
    from bench.faults import results

    whole = args.seed is None and args.limit is None and args.kind is None
    if args.out is None and not whole:
        print("a part of the bench: the committed results stay as they are (give --out to keep these)", file=sys.stderr)
        return 0
    split_of = {plan.name: plan.split for plan in plans}
    everything = list(found)
    for split in results.SPLITS:
        part = [result for result in everything if split_of[result["name"]] == split]
        if part:
            results.write(split, part, args.out or results.FOLDER)
    return 0


def _heal(args: argparse.Namespace) -> int:
    from bench.faults import results

    stored = {result["name"]: result for result in results.read(args.split)}
    plans = [
        plan
        for plan in runs()
        if (known := stored.get(plan.name)) is not None
        and (not plan.kind or known["truth"]["cause"] == "benign" or known["spike"] is not None)
    ][: args.limit]
    os.environ["OMP_NUM_THREADS"] = "1"
    by_base: dict[tuple[int, str], list[tuple[RunPlan, bool]]] = {}
    for plan in plans:
        is_fault = bool(plan.kind) and stored[plan.name]["truth"]["cause"] != "benign"
        by_base.setdefault((plan.scene.seed, plan.scene.precision), []).append((plan, is_fault))
    found = _in_pool(args.jobs, "base", _heal_base, [(args.cache, group) for group in by_base.values()])
    healed = [result for part in found for result in part]
    from bench.faults import heal_score

    if args.limit is None:
        results.write_healed(args.split, healed)
    else:
        print("\n".join(json.dumps(result) for result in healed))
    print(json.dumps(heal_score.summary(healed), indent=1))
    return 0


def _heal_base(cache: Path, plans: Sequence[tuple[RunPlan, bool]]) -> list[dict[str, Any]]:
    """All runs of one base, each with whether it has a fault. Healthy ones are only watched for needless rollbacks."""
    from bench.faults import corpus, heal, make
    from bench.faults.heal_score import POLICIES

    make.single_threaded()
    loaded = corpus.load(cache)
    checkpoints = heal.states_of(loaded, plans[0][0])
    return [
        heal.heal(cache, loaded, plan, policy, checkpoints, spiky=is_fault)
        for plan, is_fault in plans
        for policy in (POLICIES if is_fault else POLICIES[-1:])
    ]


def _in_pool(jobs: int, what: str, call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Results in the order of the tasks. The first error ends it all."""
    found: list[Any] = [None] * len(tasks)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(call, *task): at for at, task in enumerate(tasks)}
        for done, future in enumerate(as_completed(futures), start=1):
            found[futures[future]] = future.result()
            if done % 20 == 0 or done == len(tasks):
                print(f"{what} {done}/{len(tasks)}", file=sys.stderr, flush=True)
    return found


def _base(cache: Path, seed: int, precision: str) -> None:
    from bench.faults import corpus, make

    make.single_threaded()
    make.base(cache, corpus.load(cache), seed, precision)


def _fork(cache: Path, plan: RunPlan) -> None:
    from bench.faults import corpus, make

    make.single_threaded()
    make.fork(cache, corpus.load(cache), plan)


def _examine(cache: Path, name: str, engine: str) -> dict[str, Any]:
    """Kept in the cache under the hash of the engine."""
    from bench.faults import examine

    kept = cache / "results" / engine[:16] / f"{name}.json"
    if kept.exists():
        stored: dict[str, Any] = json.loads(kept.read_text())
        return stored
    result = examine.examine(cache, name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(result))
    temporary.replace(kept)
    return result


# ------------------------------------------------------------------------------------------------------------ report


def _report(args: argparse.Namespace) -> int:
    from bench.faults import page, results, score

    folder = args.results or results.FOLDER
    stored = {split: results.read(split, folder) for split in results.SPLITS}
    if not stored["report"] and not stored["tuning"]:
        print(f"{folder}: expected results, met none; make them with `python -m bench.faults run`", file=sys.stderr)
        return 3
    figures = {split: score.summary(found) for split, found in stored.items() if found}
    about = results.about(folder)
    main_split = "report" if "report" in figures else "tuning"
    if args.json:
        top = {key: figures[main_split][key] for key in score.KEYS}
        print(json.dumps({**top, "split": main_split, "about": about, **figures}, indent=1))
    else:
        print(page.text(figures, about))
    if args.page:
        page.write(figures, about)
    return 0
