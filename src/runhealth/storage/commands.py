"""`runhealth store …`, `compact` and `agent`: arguments and calls; what they do is in the modules they import."""

import argparse
import os
import signal
import sys
import threading
import time

from runhealth.storage.errors import ConfigError


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `runhealth store`. The parser has `--store` of its own or none."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "--store",
            default=argparse.SUPPRESS,
            help="folder or URL of the runs (default: $RUNHEALTH_STORE, else ./runs)",
        )
        return action

    add("list", "list the runs of the store")
    size = add("size", "show what each run, or one run, takes of the disk")
    size.add_argument("run", nargs="?", metavar="RUN")
    export = add("export", "write the tables of a run as Parquet or CSV files")
    export.add_argument("run", metavar="RUN")
    export.add_argument("folder", metavar="FOLDER")
    export.add_argument("--format", choices=("parquet", "csv"), default="parquet")
    push = add("push", "publish a run and copy it to a store on object storage")
    push.add_argument("run", metavar="RUN")
    push.add_argument("url", metavar="URL", help="store to copy to, such as s3://bucket/runs")
    prune = add("prune", "thin a finished run: raw rows stay around events, checkpoints and non-finite values only")
    prune.add_argument("run", metavar="RUN")
    prune.add_argument("--every", type=int, default=100, metavar="STEPS", help="steps that one thinned row stands for")
    prune.add_argument("--around", type=int, default=500, metavar="STEPS", help="steps kept raw on both sides")
    prune.add_argument(
        "--keep", action="append", default=[], metavar="FIRST:LAST", help="steps to keep raw, such as an incident's"
    )


def add_compact_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `runhealth compact`."""
    parser.add_argument("run", metavar="RUN", help="name, unique prefix, path or `latest`")
    parser.add_argument(
        "--store", default=argparse.SUPPRESS, help="folder of the runs (default: $RUNHEALTH_STORE, else ./runs)"
    )


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `runhealth agent`."""
    parser.add_argument("run", metavar="RUN", help="the run's name, as the ranks of this node give it to their monitor")
    parser.add_argument("--socket", required=True, metavar="PATH", help="Unix socket to listen on")
    parser.add_argument("--node", type=int, metavar="N", help="number of this node (default: $GROUP_RANK, else 0)")
    parser.add_argument("--fsync", choices=("background", "step"), default="background", help="when to flush to disk")
    parser.add_argument(
        "--store", default=argparse.SUPPRESS, help="folder of the runs (default: $RUNHEALTH_STORE, else ./runs)"
    )


def run_agent(args: argparse.Namespace) -> int:
    """Write one log for the ranks of this node until SIGTERM or SIGINT. Raises RunhealthError."""
    from runhealth.storage.agent import Agent, NodeLog
    from runhealth.storage.places import is_remote
    from runhealth.storage.store import Store, check_run_name

    check_run_name(args.run)
    root = Store(getattr(args, "store", None)).root
    node = args.node if args.node is not None else int(os.environ.get("GROUP_RANK", "0"))
    if is_remote(root) or node < 0:
        raise ConfigError(f"expected a local store and a node from 0 on, met {root} and {node}")

    def open_log(attempt: int) -> NodeLog:
        return NodeLog.open_next(f"{root}/{args.run}/log/a{attempt:03d}", node, fsync=args.fsync)

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    agent = Agent(open_log, args.socket)
    try:
        print(f"node {node} of run {args.run}: listening on {args.socket}", flush=True)
        agent.serve(stop)
    finally:
        agent.close()
    return 0


def run_store(args: argparse.Namespace) -> int:
    """Do what `runhealth store` was asked for; returns the exit code. Raises RunhealthError."""
    return _ACTIONS[args.action](args)


def run_compact(args: argparse.Namespace) -> int:
    """Bring run.duckdb up to date and make a part of all its rows. Raises RunhealthError."""
    from runhealth.storage.publish import Publisher
    from runhealth.storage.store import Store

    run = Store(getattr(args, "store", None)).resolve(args.run)
    result = Publisher(run.path).publish(wait_s=10.0, seal=True)
    print(f"{result.path}: {result.parts} parts, {result.retired} rank log segments removed")
    for one in result.rejected:
        print(one.why, file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    from runhealth.storage.store import Store

    store = Store(getattr(args, "store", None))
    runs = store.runs()
    for run in runs:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_ns / 1e9)) if run.created_ns else "-"
        print(f"{run.name:<32} {created:<17} {run.path}{'  ' + run.problem if run.problem else ''}")
    if not runs:
        print(f"no runs in {store.root}", file=sys.stderr)
    return 0


def _size(args: argparse.Namespace) -> int:
    from runhealth.storage.store import Store
    from runhealth.storage.usage import usage

    store = Store(getattr(args, "store", None))
    runs = [store.resolve(args.run)] if args.run else [run for run in store.runs() if not run.bundled]
    print(f"{'run':<32} {'logs':>9} {'parts':>9} {'database':>9} {'ckpts':>9} {'all':>9}   MB")
    for run in runs:
        used = usage(run)
        cells = (used.log_bytes, used.parts_bytes, used.database_bytes, used.checkpoint_bytes, used.total_bytes)
        print(f"{run.name:<32} " + " ".join(f"{cell / 1e6:9.1f}" for cell in cells))
    return 0


def _export(args: argparse.Namespace) -> int:
    from runhealth.storage.export import export
    from runhealth.storage.store import Store

    for one in export(Store(getattr(args, "store", None)).resolve(args.run), args.folder, args.format):
        print(f"{one.file}: {one.rows} rows")
    return 0


def _push(args: argparse.Namespace) -> int:
    from runhealth.storage.publish import Publisher
    from runhealth.storage.push import push
    from runhealth.storage.store import Store

    run = Store(getattr(args, "store", None)).resolve(args.run)
    Publisher(run.path).publish(wait_s=10.0)
    result = push(run.path, args.url)
    print(f"{result.url}: {result.files} files, {result.size_bytes / 1e6:.1f} MB uploaded")
    return 0


def _prune(args: argparse.Namespace) -> int:
    from runhealth.storage.prune import parse_span, prune
    from runhealth.storage.store import Store

    run = Store(getattr(args, "store", None)).resolve(args.run)
    result = prune(run, every=args.every, around=args.around, keep=[parse_span(text) for text in args.keep])
    print(f"{run.path}: {result.rows_before} rows before, {result.rows_after} after")
    return 0


_ACTIONS = {"list": _list, "size": _size, "export": _export, "push": _push, "prune": _prune}
