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
    (
        "a log of 1,000,000 lines to its verdict: CPU time, peak memory",
        ["bench/imports.py", "--only", "nanogpt.log", "--alone"],
        lambda r: "{cpu_s:.1f} s, {peak_mib} MiB".format_map(r["files"]["nanogpt.log"]["total"]),
    ),
    (
        "post-mortem of 40,000 steps on 8 ranks, in a new process: CPU time",
        ["bench/engine.py", "--only", "post_mortem_40k"],
        lambda r: f"{r['post_mortem_40k_s']:.1f} s",
    ),
    (
        "one step of 10,000 ranks through the engine: CPU time",
        ["bench/engine.py", "--only", "ranks"],
        lambda r: f"{r['ranks_step_s']['10000']:.2f} s",
    ),
    (
        "a rank killed, a rank hung (time-out 5 s): until it is named; until steps go on; weights as undisturbed",
        ["bench/failures.py"],
        lambda r: (
            "; ".join(
                f"{r['failures'][m]['name_s']:.1f}, {r['failures'][m]['resume_s']:.1f} s" for m in ("kill", "hang")
            )
            + f"; {'yes' if r['weights_equal'] else 'NO'}"
        ),
    ),
    (
        "damage to a checkpoint: cases; refused with the file named, the older generation loads",
        ["bench/checkpoints.py"],
        lambda r: (
            f"{sum(d['cases'] for d in r['damage'].values())}; {'all' if r['all_refused_and_named'] else 'NOT ALL'}"
        ),
    ),
    (
        "pipeline bubble, measured against (p-1)/(v m + p-1): worst difference",
        ["bench/bubble.py"],
        lambda r: f"{r['worst_difference']:.3f}",
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
