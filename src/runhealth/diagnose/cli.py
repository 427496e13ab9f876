"""`diagnose`: what went wrong with a training run, and how to bring it back.

Everything heavy is imported when it is needed: `diagnose --help` answers at once.

Exit codes: 0 nothing at or above --fail-on · 1 findings at or above it · 2 usage · 3 run or file not found, or no
usable data · 4 readable in part, no finding · 70 internal error · 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from runhealth import __version__
from runhealth.storage.errors import AmbiguousRunError, NoUsableDataError, RunhealthError, RunNotFoundError

EXIT_OK, EXIT_FINDINGS, EXIT_USAGE, EXIT_NO_DATA, EXIT_PARTLY, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 70, 130
FORMATS = ("text", "json", "markdown")
SEVERITIES = ("info", "warning", "error")

_OVERVIEW = """\
other commands (each has --help):
  diagnose watch --run R              follow a live run, fire a hook on findings
  diagnose rollback plan --run R      where to go back to, what to skip and repair
  diagnose rollback apply --run R     hand the plan to the trainer
  diagnose explain CODE               what a code means and what to do
  diagnose doctor PATH|--run R        which signals are there, what each missing one would tell

exit codes: 0 nothing at or above --fail-on, 1 findings, 2 usage, 3 not found or no usable data,
            4 readable in part, no finding, 70 internal error, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Never raises, except SystemExit of argparse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return _broken_pipe()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (RunNotFoundError, AmbiguousRunError, NoUsableDataError) as error:
        return _fail(error, EXIT_NO_DATA)
    except FileNotFoundError as error:
        return _fail(error, EXIT_NO_DATA)
    except RunhealthError as error:
        return _fail(error, EXIT_NO_DATA)
    except Exception as error:  # noqa: BLE001 - the contract has an exit code for what nobody foresaw
        return _internal(error)


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "watch": _watch,
        "rollback": _rollback,
        "explain": _explain,
        "doctor": _doctor,
    }
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return _diagnose(arguments)


# -- diagnose ---------------------------------------------------------------------------------------------------------


def _diagnose(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="diagnose",
        description="Say what went wrong with a training run, why, and what to do.",
        epilog=_OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="someone else's log file or folder; format is detected"
    )
    _add_run(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report there instead of stdout")
    parser.add_argument("--at", type=int, metavar="STEP", help="judge only the stretch around this step")
    parser.add_argument("--window", type=int, metavar="N", help="length of that stretch in steps (default: 500)")
    parser.add_argument("--attempt", type=int, metavar="N", help="this attempt only")
    parser.add_argument(
        "--fail-on", choices=SEVERITIES, default="warning", help="exit 1 from here on (default: warning)"
    )
    parser.add_argument("--version", action="version", version=f"diagnose {__version__}")
    args = parser.parse_args(arguments)
    if bool(args.run) == bool(args.paths):
        parser.error("expected either --run NAME or a PATH")
    if args.window is not None and (args.at is None or args.window < 1):
        parser.error("--window needs --at, and at least 1 step")
    window = None
    if args.at is not None:
        half = (args.window or 500) // 2
        window = (args.at - half, args.at + half)
    if args.run:
        openers = [partial(_open_run, args.run, args.store)]
    else:
        openers = [partial(_open_path, path) for path in args.paths]
    return _report_all(openers, args, window)


def _report_all(
    openers: Sequence[Callable[[], object]], args: argparse.Namespace, window: tuple[int, int] | None
) -> int:
    from runhealth.diagnose.service import diagnose

    reports, codes = [], []
    for opener in openers:
        try:
            source = opener()
            try:
                report = diagnose(source, window=window, attempt=args.attempt)  # type: ignore[arg-type]
            finally:
                _close(source)
        except (RunhealthError, OSError) as error:
            if len(openers) == 1:
                raise
            codes.append(_fail(error, EXIT_NO_DATA))
            continue
        reports.append(report)
        codes.append(_exit_code(report, args.fail_on))
    if reports:
        _write(_render(reports, args.format, args.output), args.output)
    order = (EXIT_FINDINGS, EXIT_NO_DATA, EXIT_PARTLY, EXIT_OK)
    return next(code for code in order if code in codes)


def _render(reports: Sequence[object], form: str, output: str | None) -> str:
    import json
    import time

    from runhealth.diagnose.findings import Report
    from runhealth.diagnose.report import json as json_report
    from runhealth.diagnose.report import markdown, text
    from runhealth.diagnose.report.plain import Style, stdout_style

    typed = [report for report in reports if isinstance(report, Report)]
    if form == "json":
        if len(typed) == 1:
            return json_report.render(typed[0])
        return json.dumps([json_report.report_json(report) for report in typed], indent=2, allow_nan=False) + "\n"
    if form == "markdown":
        return "\n".join(markdown.render(report) for report in typed)
    style = Style(colour=False, unicode=True) if output else stdout_style()
    return "\n".join(text.render(report, style, now_ns=time.time_ns()) for report in typed)


def _exit_code(report: object, fail_on: str) -> int:
    from runhealth.diagnose.findings import Report, Severity

    assert isinstance(report, Report)
    if any(f.severity.level >= Severity(fail_on).level for f in report.findings):
        return EXIT_FINDINGS
    return EXIT_PARTLY if report.source.rows_rejected else EXIT_OK


# -- watch ------------------------------------------------------------------------------------------------------------


def _watch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="diagnose watch",
        description="Follow a live run; print findings as they come, change and end.",
    )
    _add_run(parser, required=True)
    parser.add_argument(
        "--hook",
        metavar="CMD",
        help="shell command for each new or changed finding at or above --fail-on: the finding as JSON on its stdin, "
        "RUNHEALTH_RUN, RUNHEALTH_FINDING, RUNHEALTH_CODE, RUNHEALTH_SEVERITY and RUNHEALTH_STEP in its environment",
    )
    parser.add_argument("--once", action="store_true", help="look at what is there now, then exit")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two looks (default: 2)"
    )
    parser.add_argument("--fail-on", choices=SEVERITIES, default="warning", help="default: warning")
    args = parser.parse_args(arguments)
    if not args.interval > 0:
        parser.error("--interval must be over 0")
    from runhealth.diagnose.watch import watch

    return watch(
        _open_run(args.run, args.store), hook=args.hook, once=args.once, interval_s=args.interval, fail_on=args.fail_on
    )


# -- rollback ---------------------------------------------------------------------------------------------------------


def _rollback(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="diagnose rollback", description="Plan a rollback, or apply a plan.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan|apply")
    plan = commands.add_parser("plan", help="choose checkpoint, repairs and samples to skip; write the plan to a file")
    _add_run(plan, required=True)
    plan.add_argument("--incident", metavar="ID", help="which incident (default: the worst one)")
    plan.add_argument("-o", "--output", metavar="FILE", help="default: <run>/plans/<incident>.json")
    apply = commands.add_parser("apply", help="check the plan again and hand it to the trainer")
    _add_run(apply, required=True)
    apply.add_argument("plan", nargs="?", metavar="PLAN", help="plan file (default: the newest plan of the run)")
    apply.add_argument("--dry-run", action="store_true", help="check the preconditions, change nothing")
    args = parser.parse_args(arguments)
    from runhealth.diagnose import rollback_cli

    if args.command == "plan":
        return rollback_cli.plan(_open_run(args.run, args.store), args.incident, args.output)
    return rollback_cli.apply(args.run, args.store, args.plan, dry_run=args.dry_run)


# -- explain, doctor --------------------------------------------------------------------------------------------------


def _explain(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="diagnose explain", description="What a code means and what to do.")
    parser.add_argument("code", metavar="CODE", help="a code such as RH101, or a kind such as loss_spike")
    args = parser.parse_args(arguments)
    import difflib

    from runhealth.diagnose.codes import CODES, KINDS
    from runhealth.diagnose.explain import explain

    found = explain(args.code)
    if found is None:
        near = difflib.get_close_matches(args.code.lower(), [*CODES, *(k.lower() for k in KINDS)], n=3, cutoff=0.4)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        parser.error(f"no code or kind {args.code!r}{hint}")
    sys.stdout.write(found)
    return EXIT_OK


def _doctor(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="diagnose doctor",
        description="Which signals are there, which are missing, what each would tell.",
    )
    parser.add_argument("path", nargs="?", metavar="PATH", help="a log file or folder")
    _add_run(parser)
    args = parser.parse_args(arguments)
    if bool(args.run) == bool(args.path):
        parser.error("expected either --run NAME or a PATH")
    from runhealth.diagnose.doctor import render
    from runhealth.diagnose.engine import Engine
    from runhealth.diagnose.report.plain import stdout_style

    source = _open_run(args.run, args.store) if args.run else _open_path(args.path)
    try:
        engine = Engine(suspects=())
        for record in source.records():  # type: ignore[attr-defined]
            engine.feed_quietly(record)
        engine.finish()
        sys.stdout.write(render(source.describe(), engine.signals, stdout_style()))  # type: ignore[attr-defined]
    finally:
        _close(source)
    return EXIT_OK


# -- common -----------------------------------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--run", required=required, metavar="R", help="name, unique prefix, path, or `latest`")
    parser.add_argument(
        "--store", metavar="S", help="folder or URL of the runs (default: $RUNHEALTH_STORE, else ./runs)"
    )


def _open_run(run: str, store: str | None) -> object:
    from runhealth.storage.reader import RunReader

    return RunReader.open(run, store)


def _open_path(path: str) -> object:
    if (Path(path) / "run.json").is_file():
        return _open_run(str(Path(path).absolute()), None)
    from runhealth.storage.importers import open_log

    return open_log(path)


def _close(source: object) -> None:
    close = getattr(source, "close", None)
    if callable(close):
        close()


def _write(text: str, output: str | None) -> None:
    if output is None:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # a stream that promised less than the text holds
            sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
        return
    from runhealth.diagnose.apply import write_atomically

    write_atomically(output, text)


def _fail(error: BaseException, code: int) -> int:
    from runhealth.diagnose.report.plain import safe

    print(f"diagnose: {safe(str(error))}", file=sys.stderr)
    return code


def _internal(error: BaseException) -> int:
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    print("diagnose: this is a bug; please report it with the lines above", file=sys.stderr)
    return EXIT_INTERNAL


def _broken_pipe() -> int:
    """The reader of our output has gone: nothing more can be said, and the interpreter must not try at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
