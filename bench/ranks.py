"""How many frames an agent takes from many ranks of one node, and whether its memory stays flat.

The agent is a process of its own; the ranks are connections of some writer processes, each of which logs a step of
`--scalars` values and waits for the acknowledgement before the next. The last line is one JSON object.

    python bench/ranks.py --ranks 1000
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from runhealth.storage.agent import Agent, AgentLog, NodeLog
from runhealth.storage.errors import StoreError
from runhealth.storage.records import StepRecord
from runhealth.storage.store import Store
from runhealth.storage.tail import RunTail

WRITERS = 4


def serve(attempt_dir: str, socket_path: str) -> None:
    log = NodeLog.open(attempt_dir, 0)
    Agent(lambda _: log, socket_path).serve(threading.Event())


def write(socket_path: str, first: int, count: int, scalars: int, seconds: float) -> None:
    """Log from `count` ranks in turn for some seconds; prints steps and the ranks' waits in ms."""
    ranks = range(first, first + count)
    logs = [AgentLog(socket_path, 0, rank, timeout_s=60.0) for rank in ranks]
    sys.stdin.readline()  # all are connected
    names = [f"signal_{i}" for i in range(scalars)]
    waits: list[float] = []
    step, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for rank, log in zip(ranks, logs, strict=True):
            values = {name: step + i * 0.37 for i, name in enumerate(names)}
            start = time.perf_counter()
            log.append([StepRecord(attempt=0, step=step, rank=rank, values=values)])
            waits.append((time.perf_counter() - start) * 1e3)
        step += 1
    waits.sort()
    print(json.dumps({"steps": step, "p50": waits[len(waits) // 2], "p99": waits[len(waits) * 99 // 100]}), flush=True)


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--scalars", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "agent":
        return serve(*args.rest)
    if args.role == "writer":
        return write(args.rest[0], int(args.rest[1]), int(args.rest[2]), args.scalars, args.seconds)
    me = [sys.executable, __file__, "--scalars", str(args.scalars), "--seconds", str(args.seconds)]
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        run = store.create_run("ranks")
        claim, path = store.claim_attempt(run, "bench"), f"{root}/agent.sock"
        agent = subprocess.Popen([*me, "--role", "agent", claim.path, path])
        try:
            while True:
                try:
                    AgentLog(path, 0, args.ranks).close()
                    break
                except StoreError:
                    if agent.poll() is not None:
                        raise
                    time.sleep(0.05)
            share = -(-args.ranks // WRITERS)
            spans = [(first, min(share, args.ranks - first)) for first in range(0, args.ranks, share)]
            writers = [
                subprocess.Popen([*me, "--role", "writer", path, str(first), str(count)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
                for first, count in spans
            ]  # fmt: skip
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            memory = []
            while any(writer.poll() is None for writer in writers):
                memory.append(rss_mb(agent.pid))
                time.sleep(0.5)
            said = [json.loads(writer.stdout.read()) for writer in writers if writer.stdout is not None]
        finally:
            agent.kill()
            agent.wait()
        acked = sum(one["steps"] * count for one, (_, count) in zip(said, spans, strict=True))
        tail = RunTail(run.path)
        found = len(tail.read())
        files = len(list(Path(run.path).glob("log/a*/*/*.rlog")))
    settled = memory[len(memory) // 2 :]
    print(
        json.dumps({
            "ranks": args.ranks, "scalars": args.scalars, "acked": acked, "lost": max(0, acked - found),
            "frames_per_s": round(acked / args.seconds), "wait_ms_p50": round(max(one["p50"] for one in said), 2),
            "wait_ms_p99": round(max(one["p99"] for one in said), 2), "agent_rss_mb_half_way": round(settled[0], 1),
            "agent_rss_mb_end": round(settled[-1], 1), "files": files,
        })
    )  # fmt: skip
    return None


if __name__ == "__main__":
    main()
