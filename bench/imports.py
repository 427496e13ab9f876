"""How long a foreign log takes to a verdict, as a whole process, and how much of it is reading.

Generated logs: a million lines like nanoGPT's and like Megatron's, 200 MB of JSONL, and 40,000 steps. For each: wall
and CPU seconds and the peak resident memory of the whole (`diagnose PATH --format json`), of reading alone into
columns, and of reading alone into records. runmedic and losslint run on the same files, from an environment of their
own made for the bench by pip; if they cannot be installed, the output says so. Prints one JSON object as its last line:

    OMP_NUM_THREADS=1 python bench/imports.py [--scale 0.1] [--only nanogpt.log] [--alone] [--other "tool command"]
"""

import argparse
import json
import math
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DIAGNOSE = Path(sys.executable).with_name("diagnose")
READ = "import sys; from runhealth.storage.importers import open_log\nfor _ in open_log(sys.argv[1]).{}(): pass"
OTHERS = {"runmedic": ("diagnose",), "losslint": ("check",)}  # package and executable: its command for a path
INSTALL_TIMEOUT_S = 300
TIMEOUT_S = 900


def losses(seed: int) -> Iterator[float]:
    """A curve with noise and without incidents."""
    rng = random.Random(seed)
    step = 0
    while True:
        yield 3 + 7 * math.exp(-step / 20_000) + rng.gauss(0, 0.03)
        step += 1


def nanogpt(path: Path, lines: int) -> None:
    rng, curve, clock_ms = random.Random(1), losses(1), 0.0
    with path.open("w") as file:
        for step in range(lines):
            clock_ms += 101 + 5 * rng.random()
            file.write(
                f"step:{step}/{lines} train_loss:{next(curve):.4f} train_time:{clock_ms:.0f}ms "
                f"step_avg:{clock_ms / (step + 1):.2f}ms\n"
            )


def megatron(path: Path, lines: int) -> None:
    rng, curve = random.Random(2), losses(2)
    with path.open("w") as file:
        for step in range(1, lines + 1):
            file.write(
                f" iteration {step:8d}/ {lines:8d} | consumed samples: {step * 512:12d} | elapsed time per iteration "
                f"(ms): {1300 + 50 * rng.random():.1f} | learning rate: 3.000E-04 | global batch size:   512 | lm "
                f"loss: {next(curve):.6E} | loss scale: 1.0 | grad norm: {1 + 0.3 * rng.random():.3f} | number "
                "of skipped iterations:   0 | number of nan iterations:   0 |\n"
            )


def jsonl(path: Path, size_bytes: int) -> None:
    rng, curve, step, written = random.Random(3), losses(3), 0, 0
    with path.open("w") as file:
        while written < size_bytes:
            row = {
                "step": step,
                "loss": round(next(curve), 5),
                "grad_norm": round(1 + 0.3 * rng.random(), 4),
                "lr": 3e-4,
                "t_step_s": round(1.3 + 0.05 * rng.random(), 4),
                "tokens": 524_288,
            }
            written += file.write(json.dumps(row) + "\n")
            step += 1


def run(command: list[str]) -> dict[str, object]:
    """Wall and CPU seconds, peak resident memory and exit code of one process and its children."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        status, usage = wait(process, begin)
        code = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()[-200:]
    result: dict[str, object] = {
        "wall_s": round(time.perf_counter() - begin, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "exit": code,
    }
    return result if code in (0, 1, 4) else {**result, "said": said}


def wait(process: subprocess.Popen[bytes], begin: float) -> tuple[int, resource.struct_rusage]:
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return status, usage
        if time.perf_counter() - begin > TIMEOUT_S:
            process.kill()
        time.sleep(0.01)


def install(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The other tools' commands, and why those that are missing could not be installed."""
    commands: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        return commands, dict.fromkeys(OTHERS, str(error)[-200:])
    for package, arguments in OTHERS.items():
        pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", package]
        try:
            done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            failed[package] = f"pip took more than {INSTALL_TIMEOUT_S} s"
            continue
        if done.returncode:
            failed[package] = done.stderr.strip()[-200:]
        else:
            commands[package] = [str(folder / "bin" / package), *arguments]
    return commands, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the big files, as a share of the full one")
    parser.add_argument(
        "--other", action="append", default=[], metavar="CMD", help="another tool; it is given the path"
    )
    parser.add_argument("--only", help="one of the files")
    parser.add_argument("--alone", action="store_true", help="without the other tools")
    args = parser.parse_args()
    lines = max(100, int(1_000_000 * args.scale))
    files: dict[str, Callable[[Path], None]] = {
        "nanogpt_40k.log": lambda path: nanogpt(path, 40_000),
        "nanogpt.log": lambda path: nanogpt(path, lines),
        "megatron.log": lambda path: megatron(path, lines),
        "rows.jsonl": lambda path: jsonl(path, int(200_000_000 * args.scale)),
    }
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        others, failed = install(Path(folder, "others")) if not args.alone else ({}, {})
        others |= {command: shlex.split(command) for command in args.other}
        for name, write in files.items():
            if args.only not in (None, name):
                continue
            path = Path(folder, name)
            write(path)
            results[name] = {
                "mb": round(path.stat().st_size / 1e6, 1),
                "total": run([str(DIAGNOSE), str(path), "--format", "json"]),
                "read": run([sys.executable, "-c", READ.format("blocks"), str(path)]),
                "read_records": run([sys.executable, "-c", READ.format("records"), str(path)]),
                **{other: run([*command, str(path)]) for other, command in others.items()},
            }
            path.unlink()
            print(name, results[name], file=sys.stderr)
    result = {"bench": "imports", "scale": args.scale, "cpus": os.cpu_count(), "files": results}
    print(json.dumps({**result, **({"not_installed": failed} if failed else {})}))


if __name__ == "__main__":
    main()
