"""Where a report goes: to stdout, or to a file that is complete or not there."""

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import TextIO, cast

from runhealth.storage.durable import write_whole


class OutputError(OSError):
    """The place that the user named, or stdout, cannot be written."""


def write_output(text: str, output: str | None) -> None:
    """Write to `output`, or to stdout if it is None. A reader of stdout that has gone is no error.

    A regular file is replaced in one step, with the permissions it had; a device, a pipe or a socket is written to.

    Raises:
        OutputError: says what cannot be written and why.
    """
    if output is None:
        if stdout() is None:
            raise OutputError("cannot write to stdout: it is closed")
        _write_stdout(text)
        return
    # A link stays a link: what it leads to is replaced.
    target = Path(os.path.realpath(output))
    try:
        if target.exists() and not target.is_file():
            with open(target, "w", encoding="utf-8") as special:
                special.write(text)
            return
        _replace(target, text)
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error


def _replace(target: Path, text: str) -> None:
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {target.parent}")
    write_whole(target, text.encode())


def stdout() -> TextIO | None:
    """None where the caller has closed it (`>&-`)."""
    return cast("TextIO | None", sys.stdout)


def flush_stdout() -> None:
    """What others, as argparse, have printed. Raises OutputError."""
    if stdout() is not None:
        _write_stdout("")


def say(line: str) -> None:
    """One line on stderr, if there is one: nowhere else can a failure be told."""
    stream = cast("TextIO | None", sys.stderr)
    if stream is not None:
        with contextlib.suppress(OSError):
            print(line, file=stream, flush=True)


def _write_stdout(text: str) -> None:
    try:
        try:
            sys.stdout.write(text)
        except UnicodeEncodeError:  # a stream that promised less than the text holds
            sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
        sys.stdout.flush()
    except BrokenPipeError:
        let_go_of_stdout()
    except OSError as error:
        let_go_of_stdout()
        raise OutputError(f"cannot write to stdout: {error.strerror or error}") from error


def let_go_of_stdout() -> None:
    """Nothing more can be said there, and the interpreter must not try at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
