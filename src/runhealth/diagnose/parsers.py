"""The command line's shape, in one place: the commands use it, and so does the completion."""

import argparse
from collections.abc import Callable, Mapping

from runhealth import __version__

FORMATS = ("text", "json", "markdown", "html", "sarif", "junit")
SEVERITIES = ("info", "warning", "error")
SHELLS = ("bash", "zsh", "fish")

_OVERVIEW = """\
other commands (each has --help):
  diagnose watch PATH|--run R         follow a live run or a growing log, fire a hook on findings
  diagnose import PATH --name R       put a log into the store as a run
  diagnose replay --run R             prove a cause: train the stretch again with one thing changed
  diagnose rollback plan --run R      where to go back to, what to skip and repair
  diagnose rollback apply --run R     hand the plan to the trainer
  diagnose explain [CODE]             what a code means and what to do
  diagnose doctor PATH|--run R        which signals are there, what each missing one would tell
  diagnose --completion bash          completion for bash, zsh or fish: eval "$(diagnose --completion bash)"

exit codes: 0 nothing at or above --fail-on, 1 findings, 2 usage, 3 not found or no usable data,
            4 readable in part, no finding, 70 internal error, 130 interrupted
"""


def main_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose",
        description="Say what went wrong with a training run, why, and what to do.",
        epilog=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="someone else's log file or folder, `-` for stdin; format is detected"
    )
    _add_run(parser)
    _add_map(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report there instead of stdout")
    parser.add_argument("--at", type=int, metavar="STEP", help="judge only the stretch around this step")
    parser.add_argument("--window", type=int, metavar="N", help="length of that stretch in steps (default: 500)")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt only")
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, default="warning", help="exit 1 from here on (default: warning)"
    )
    parser.add_argument("--completion", choices=SHELLS, help="print the completion script for this shell")
    parser.add_argument("--version", action="version", version=f"diagnose {__version__}")
    return parser


def watch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose watch",
        description="Follow a live run or a growing log; print findings as they come and change. What was told once is "
        "not told again, also not by the next call with the same hook.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a log file that grows")
    _add_run(parser)
    _add_map(parser)
    parser.add_argument(
        "--hook",
        metavar="CMD",
        help="shell command for each new or changed finding at or above --fail-on: the finding as JSON on its stdin, "
        "RUNHEALTH_RUN, RUNHEALTH_FINDING, RUNHEALTH_CODE, RUNHEALTH_KIND, RUNHEALTH_SEVERITY, RUNHEALTH_OUTCOME, "
        "RUNHEALTH_VERDICT, RUNHEALTH_STEP and RUNHEALTH_CHANGE (new or changed) in its environment",
    )
    parser.add_argument(
        "--rollback",
        choices=("dry-run", "ask", "auto"),
        help="act on what asks for a rollback: say what would be done, write the plan and name the command, or hand it "
        "to the supervisor where the cause is named and the guards allow (default: only report)",
    )
    parser.add_argument("--once", action="store_true", help="look at what is there now, then exit")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)"
    )
    parser.add_argument("--fail-on", choices=SEVERITIES, default="warning", help="default: warning")
    return parser


def replay_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose replay",
        description="Prove the cause of an incident: train its stretch again from the last good checkpoint, first as "
        "it was, then with one thing changed (three replays at most). The run itself is only read.",
    )
    _add_run(parser, required=True)
    parser.add_argument("--incident", metavar="ID", help="which incident (default: the worst one)")
    parser.add_argument("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the finding there instead of stdout")
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, default="warning", help="exit 1 from here on (default: warning)"
    )
    return parser


def rollback_plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose rollback plan",
        description="Choose checkpoint, repairs and samples to skip; write the plan to a file.",
    )
    _add_run(parser, required=True)
    parser.add_argument("--incident", metavar="ID", help="which incident (default: the worst one)")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: <run>/plans/<incident>.json")
    return parser


def rollback_apply_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose rollback apply", description="Check the plan again and hand it to the trainer."
    )
    _add_run(parser, required=True)
    parser.add_argument("plan", nargs="?", metavar="PLAN", help="plan file (default: the newest plan of the run)")
    parser.add_argument("--dry-run", action="store_true", help="check the preconditions, change nothing")
    return parser


def explain_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose explain", description="What a code or a suspect means, what it needs, and what to do."
    )
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="RH101, loss_spike or bad_shard; without it, a list of all"
    )
    return parser


def import_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose import",
        description="Put a log into the store as a run. Importing it again changes nothing; a log that has grown "
        "replaces its run.",
    )
    parser.add_argument("path", metavar="PATH", help="a log file or folder")
    parser.add_argument("--name", required=True, metavar="R", help="name of the run")
    _add_store(parser)
    _add_map(parser)
    return parser


def doctor_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diagnose doctor",
        description="Which signals are there, which are missing, what each would tell.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a log file or folder")
    _add_run(parser)
    _add_map(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")
    return parser


PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "": main_parser,
    "watch": watch_parser,
    "replay": replay_parser,
    "rollback plan": rollback_plan_parser,
    "rollback apply": rollback_apply_parser,
    "explain": explain_parser,
    "doctor": doctor_parser,
    "import": import_parser,
}


def _add_run(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--run", required=required, metavar="R", help="name, unique prefix, path, or `latest`")
    _add_store(parser)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="S", help="folder or URL of the runs (default: $RUNHEALTH_STORE, else ./runs)"
    )


def _add_map(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="SIGNAL=NAME",
        help="the log has this signal under that name, for example loss=train/ce; may be repeated",
    )
