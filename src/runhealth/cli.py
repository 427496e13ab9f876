"""`runhealth`: plan, train, watch and keep runs. The diagnosis has a command of its own, `diagnose`.

Each command imports its room only when it is called: `runhealth store` works without torch, `runhealth train` without
Streamlit.
"""

import argparse
import sys
from collections.abc import Sequence

from runhealth import __version__
from runhealth.storage.errors import ConfigError, MissingExtraError, NoUsableDataError, RunhealthError, RunNotFoundError

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_NOT_FOUND, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def _train(args: argparse.Namespace) -> int:
    from runhealth.trainer.commands import run_train

    return run_train(args)


def _replay(args: argparse.Namespace) -> int:
    from runhealth.trainer.replay_command import run_replay

    return run_replay(args)


def _plan(args: argparse.Namespace) -> int:
    from runhealth.trainer.planner.commands import run_plan

    return run_plan(args)


def _demo(args: argparse.Namespace) -> int:
    from runhealth.trainer import demo

    return demo.main(args.store)


def _dashboard(args: argparse.Namespace) -> int:
    from runhealth.dashboard import launch

    return launch.main(args.run, args.store, args.port)


def _parser() -> argparse.ArgumentParser:
    from runhealth.storage.commands import (
        add_agent_arguments,
        add_compact_arguments,
        add_store_arguments,
        run_agent,
        run_compact,
        run_store,
    )
    from runhealth.trainer.commands import add_train_arguments
    from runhealth.trainer.planner.commands import add_plan_arguments
    from runhealth.trainer.replay_command import add_replay_arguments

    parser = argparse.ArgumentParser(
        prog="runhealth",
        description="Train, watch and keep runs. To find out what went wrong with one: diagnose --run NAME.",
    )
    parser.add_argument("--version", action="version", version=f"runhealth {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    store = argparse.ArgumentParser(add_help=False)
    store.add_argument("--store", help="folder or fsspec URL of the runs (default: $RUNHEALTH_STORE, else ./runs)")

    train = commands.add_parser("train", help="train, resume, or roll back a run under supervision")
    add_train_arguments(train)
    train.set_defaults(call=_train)

    replay = commands.add_parser("replay", help="play stretches of a run again, by orders of `diagnose replay`")
    add_replay_arguments(replay)
    replay.set_defaults(call=_replay)

    plan = commands.add_parser("plan", help="what fits into GPU memory, which layout, and why")
    add_plan_arguments(plan)
    plan.set_defaults(call=_plan)

    demo = commands.add_parser("demo", parents=[store], help="train, break, diagnose and heal a run (2-3 minutes)")
    demo.set_defaults(call=_demo)

    dashboard = commands.add_parser("dashboard", parents=[store], help="open the live page of a run")
    dashboard.add_argument("--run", help="name, unique prefix, path or `latest` (default: latest)")
    dashboard.add_argument("--port", type=int, help="port on 127.0.0.1 (default: 8501, or the next free one)")
    dashboard.set_defaults(call=_dashboard)

    keep = commands.add_parser("store", help="list, size, export, prune or push the runs of a store")
    add_store_arguments(keep)
    keep.set_defaults(call=run_store)

    compact = commands.add_parser("compact", help="bring run.duckdb up to date and the logs into parts")
    add_compact_arguments(compact)
    compact.set_defaults(call=run_compact)

    agent = commands.add_parser("agent", help="write one log for all ranks of a node, for jobs of hundreds of ranks")
    add_agent_arguments(agent)
    agent.set_defaults(call=run_agent)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 usage, 3 run not found, 130 interrupted."""
    args = _parser().parse_args(argv)
    try:
        return int(args.call(args))
    except (RunNotFoundError, NoUsableDataError) as error:
        print(f"runhealth: {error}", file=sys.stderr)
        return EXIT_NOT_FOUND
    except (ConfigError, MissingExtraError) as error:
        print(f"runhealth: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RunhealthError as error:
        print(f"runhealth: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
