"""`diagnose`: what went wrong with a training run, and how to bring it back.

Everything heavy is imported when it is needed: `diagnose --help` answers at once.

Exit codes: 0 nothing at or above --fail-on · 1 findings at or above it · 2 usage · 3 run or file not found, or no
usable data · 4 readable in part, no finding · 70 internal error · 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runhealth.diagnose import parsers
from runhealth.diagnose.report.output import OutputError, flush_stdout, let_go_of_stdout, say, write_output
from runhealth.storage.errors import ConfigError, RunhealthError

if TYPE_CHECKING:
    from runhealth.diagnose.findings import Report
    from runhealth.storage.source import RecordSource

EXIT_OK, EXIT_FINDINGS, EXIT_USAGE, EXIT_NO_DATA, EXIT_PARTLY, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 70, 130
TRACEBACK_FILE = "RUNHEALTH_TRACEBACK"  # environment: where the traceback of an internal error goes


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Never raises, except SystemExit of argparse."""
    try:
        return _guarded(argv)
    except SystemExit as error:  # argparse: --help and --version print, and ignore that they could not
        try:
            if error.code == 0:
                write_output("", None)
        except OutputError as unwritable:
            return _fail(unwritable, EXIT_USAGE)
        raise


def _guarded(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        flush_stdout()
        return code
    except BrokenPipeError:
        let_go_of_stdout()
        return EXIT_OK
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except OutputError as error:
        return _fail(error, EXIT_USAGE)
    except (RunhealthError, FileNotFoundError) as error:
        return _fail(error, EXIT_NO_DATA)
    except Exception as error:  # noqa: BLE001 - the contract has an exit code for what nobody foresaw
        return _internal(error)


def _dispatch(arguments: list[str]) -> int:
    from runhealth.diagnose import completion

    if arguments[:1] == [completion.CALLBACK]:
        found = completion.candidates(arguments[1:])
        write_output("".join(f"{word}\n" for word in found), None)
        return EXIT_OK
    commands: dict[str, Callable[[list[str]], int]] = {
        "watch": _watch,
        "replay": _replay,
        "rollback": _rollback,
        "explain": _explain,
        "doctor": _doctor,
        "import": _import,
    }
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return _diagnose(arguments)


# -- diagnose ---------------------------------------------------------------------------------------------------------


def _diagnose(arguments: list[str]) -> int:
    parser = parsers.main_parser()
    args = parser.parse_args(arguments)
    if args.completion:
        from runhealth.diagnose.completion import script

        write_output(script(args.completion), None)
        return EXIT_OK
    if bool(args.run) == bool(args.paths):
        parser.error("expected either --run NAME or a PATH")
    if args.window is not None and (args.at is None or args.window < 1):
        parser.error("--window needs --at, and at least 1 step")
    window = None
    if args.at is not None:
        half = (args.window or 500) // 2
        # No run has negative steps: a stretch around one is empty, however long it is.
        window = (max(0, args.at - half), args.at + half) if args.at >= 0 else (args.at - half, min(-1, args.at + half))
    mapping = _mapping(parser, args)
    from runhealth.diagnose import opening

    if args.run:
        openers = [partial(opening.open_run, args.run, args.store)]
    else:
        openers = [partial(opening.open_path, path, mapping) for path in args.paths]
    return _report_all(openers, args, window)


def _report_all(
    openers: Sequence[Callable[[], "RecordSource"]], args: argparse.Namespace, window: tuple[int, int] | None
) -> int:
    from runhealth.diagnose.opening import close, with_progress
    from runhealth.diagnose.report.forms import render
    from runhealth.diagnose.service import diagnose
    from runhealth.diagnose.stretch import Stretch, check_enough

    reports, codes = [], []
    for opener in openers:
        try:
            source = opener()
            try:
                judged = Stretch(with_progress(source), window=window, attempt=args.attempt)
                report = replace(diagnose(judged, window=window, attempt=args.attempt), window=window)
                check_enough(report, judged)
            finally:
                close(source)
        except (RunhealthError, OSError) as error:
            if len(openers) == 1:
                raise
            codes.append(_fail(error, EXIT_NO_DATA))
            continue
        reports.append(report)
        codes.append(_exit_code(report, args.fail_on))
    if reports:
        several = len(openers) > 1
        write_output(render(reports, args.format, several=several, to_file=args.output is not None), args.output)
    order = (EXIT_FINDINGS, EXIT_NO_DATA, EXIT_PARTLY, EXIT_OK)
    return next(code for code in order if code in codes)


def _exit_code(report: "Report", fail_on: str) -> int:
    from runhealth.diagnose.findings import Severity

    if any(f.severity.level >= Severity(fail_on).level for f in report.findings):
        return EXIT_FINDINGS
    return EXIT_PARTLY if report.source.rows_rejected else EXIT_OK


# -- watch ------------------------------------------------------------------------------------------------------------


def _watch(arguments: list[str]) -> int:
    parser = parsers.watch_parser()
    args = parser.parse_args(arguments)
    if bool(args.run) == bool(args.path):
        parser.error("expected either --run NAME or a PATH")
    if not args.interval > 0:
        parser.error("--interval must be over 0")
    mapping = _mapping(parser, args)
    from runhealth.diagnose import opening
    from runhealth.diagnose.auto_rollback import AutoRollback, Mode
    from runhealth.diagnose.told import Told, state_path
    from runhealth.diagnose.watch import identity_of, watch

    if args.run:
        followed = opening.follow_run(args.run, args.store)
    else:
        followed = opening.follow_path(args.path, mapping, once=args.once)
    if args.rollback and followed.folder is None:
        opening.close(followed.source)
        parser.error("--rollback is for a run of the store that can be written, not for a log")
    rollback = AutoRollback(Mode(args.rollback), followed.info.name, str(followed.folder)) if args.rollback else None
    told = Told(state_path(followed.folder, identity_of(followed.info.source), args.hook))
    try:
        return watch(
            followed.source,
            followed.info,
            told,
            hook=args.hook,
            once=args.once,
            interval_s=args.interval,
            fail_on=args.fail_on,
            rollback=rollback,
        )
    finally:
        opening.close(followed.source)


# -- replay -----------------------------------------------------------------------------------------------------------


def _replay(arguments: list[str]) -> int:
    args = parsers.replay_parser().parse_args(arguments)
    from runhealth.diagnose.replay_cli import replay

    return _exit_code(replay(args), args.fail_on)


# -- rollback ---------------------------------------------------------------------------------------------------------


def _rollback(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="diagnose rollback", description="Plan a rollback, or apply a plan.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan|apply")
    for name, made in (("plan", parsers.rollback_plan_parser()), ("apply", parsers.rollback_apply_parser())):
        commands.add_parser(name, parents=[made], add_help=False, description=made.description, help=made.description)
    args = parser.parse_args(arguments)
    from runhealth.diagnose import rollback_cli
    from runhealth.diagnose.opening import open_run

    if args.command == "plan":
        return rollback_cli.plan(open_run(args.run, args.store), args.incident, args.output, args.store)
    return rollback_cli.apply(args.run, args.store, args.plan, dry_run=args.dry_run)


# -- explain, doctor --------------------------------------------------------------------------------------------------


def _explain(arguments: list[str]) -> int:
    parser = parsers.explain_parser()
    args = parser.parse_args(arguments)
    from runhealth.diagnose.explain import explain, nearest, overview

    if args.code is None:
        write_output(overview(), None)
        return EXIT_OK
    found = explain(args.code)
    if found is None:
        near = nearest(args.code)
        hint = f"; did you mean {', '.join(near)}?" if near else "; `diagnose explain` lists all"
        parser.error(f"no code, kind or suspect {args.code!r}{hint}")
    write_output(found, None)
    return EXIT_OK


def _doctor(arguments: list[str]) -> int:
    parser = parsers.doctor_parser()
    args = parser.parse_args(arguments)
    if bool(args.run) == bool(args.path):
        parser.error("expected either --run NAME or a PATH")
    mapping = _mapping(parser, args)
    from runhealth.diagnose import doctor, opening
    from runhealth.diagnose.report.plain import stdout_style

    source = opening.open_run(args.run, args.store) if args.run else opening.open_path(args.path, mapping)
    try:
        seen = doctor.examine(opening.with_progress(source))
    finally:
        opening.close(source)
    write_output(doctor.render_json(seen) if args.format == "json" else doctor.render(seen, stdout_style()), None)
    return EXIT_OK


def _import(arguments: list[str]) -> int:
    parser = parsers.import_parser()
    args = parser.parse_args(arguments)
    mapping = _mapping(parser, args)
    from runhealth.diagnose.report.plain import safe
    from runhealth.diagnose.report.words import word
    from runhealth.storage.importers.into_store import import_log
    from runhealth.storage.store import Store

    try:
        run = import_log(args.path, args.name, Store(args.store), mapping)
    except ConfigError as error:
        parser.error(safe(str(error)))
    store = f" --store {word(args.store)}" if args.store else ""
    write_output(f"{safe(run.path)}\nnext: diagnose --run {word(run.name)}{store}\n", None)
    return EXIT_OK


# -- common -----------------------------------------------------------------------------------------------------------


def _mapping(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    if not args.map:
        return {}
    if getattr(args, "run", None):
        parser.error("--map is for a PATH: a run of the store has its names already")
    from runhealth.diagnose.opening import parse_mapping

    try:
        return parse_mapping(args.map)
    except ConfigError as error:
        parser.error(str(error))


def _fail(error: BaseException, code: int) -> int:
    from runhealth.diagnose.report.plain import safe

    say(f"diagnose: {safe(str(error))}")
    return code


def _internal(error: BaseException) -> int:
    """One line; the traceback goes to a file if the user named one."""
    import traceback

    from runhealth.diagnose.report.plain import safe

    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    what = safe(f"{type(error).__name__}: {error}"[:200])
    target = os.environ.get(TRACEBACK_FILE)
    how = f"run again with {TRACEBACK_FILE}=FILE and report this line with that file"
    if target:
        how = f"report this line with the traceback in {safe(target)}"
        try:
            write_output("".join(traceback.format_exception(error)), target)
        except OutputError as unwritable:
            how = f"the traceback is lost: {safe(str(unwritable))}"
    say(f"diagnose: internal error, a bug of ours: {what}{where}; {how}")
    return EXIT_INTERNAL


if __name__ == "__main__":
    raise SystemExit(main())
