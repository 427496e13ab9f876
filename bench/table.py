"""Run the benches that the README quotes and print its table.

    python bench/table.py

Each row names the command that prints its number. Minutes on two cores.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
Row = tuple[str, list[str], Callable[[dict[str, Any]], str]]

ROWS: list[Row] = [
    (
        "monitor: step CPU time with it over without, a step of 0.2 s",
        ["bench/overhead.py"],
        lambda r: f"{r['ratio']:.3f}",
    ),
    (
        "rank log: one append of 200 scalars; bytes a point, compacted",
        ["bench/telemetry_cost.py"],
        lambda r: f"{r['us_p50']:.0f} us; {r['compacted_bytes_per_point']:.1f}",
    ),
    (
        "a step is visible in another process after (p50, p99)",
        ["bench/freshness.py"],
        lambda r: f"{r['p50_ms']:.0f} ms, {r['p99_ms']:.0f} ms",
    ),
    (
        "15 kills -9 of writers, publishers and readers: acknowledged, lost, doubled",
        ["bench/crash.py", "--kills", "15"],
        lambda r: f"{r['acked']:,}, {r['lost']}, {r['duplicated']}",
    ),
]


def measure(arguments: list[str]) -> dict[str, Any]:
    """The JSON object on the last line of a bench."""
    done = subprocess.run(
        [sys.executable, str(BENCH.parent / arguments[0]), *arguments[1:]], capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def timed(arguments: list[str]) -> float:
    """The best of three wall times of a diagnose command, in seconds."""
    code = "from runhealth.diagnose.cli import main; raise SystemExit(main())"
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    print("| what | measured | command |\n|---|---|---|")
    for what, arguments, shown in ROWS:
        print(f"| {what} | {shown(measure(arguments))} | `python {' '.join(arguments)}` |", flush=True)
    for command in (["--run", "40k-spike"], ["--help"]):
        line = f"`time diagnose {' '.join(command)}`"
        print(f"| the command as a whole, best of three | {timed(command):.2f} s | {line} |", flush=True)


if __name__ == "__main__":
    main()
