"""Kill -9 at random moments: is an acknowledged step ever lost, changed or seen twice?

Ranks log, a publisher compacts into small parts and removes the logs they cover, readers follow by `poll()` and query
by `sql()`. One of these processes after the other is killed and started anew. Every value of a step can be computed
from its attempt, rank and number, so readers check what they see while all this goes on; at the end the whole run is
compared with what was acknowledged. The last line is one JSON object:

    python bench/crash.py --kills 15
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import duckdb

from runhealth.storage.errors import StoreError
from runhealth.storage.publish import Publisher
from runhealth.storage.ranklog import RankLog
from runhealth.storage.reader import RunReader
from runhealth.storage.records import BatchRecord, LayerSample, Record, StepRecord
from runhealth.storage.store import Store

CREW = ("writer-0", "writer-1", "publisher", "publisher-2", "reader")
ACK = struct.Struct("<iiq")
PART_BYTES = 150_000  # small, so that parts are made all the time
SEGMENT_BYTES = 40_000
KINDS = 4  # records of one step


def mixed(attempt: int, rank: int, step: int) -> int:
    """64 bits that belong to this step and no other (the finaliser of splitmix64)."""
    x = (attempt << 48) ^ (rank << 40) ^ step
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def make(attempt: int, rank: int, step: int) -> list[Record]:
    at = {"attempt": attempt, "rank": rank, "step": step}
    bits = mixed(attempt, rank, step)
    loss = float("nan") if step % 7 == 3 else float("inf") if step % 11 == 5 else float(bits % 2**20)
    values = {"loss": loss, "tokens": bits >> 1, "free": bits, "ratio": (bits % 2**53) / 3.0}
    return [
        BatchRecord(**at, shard=f"s{bits % 9}", content_hash=bits),
        LayerSample(**at, layer="a", values={"amax": float(bits % 2**20), "elements": bits >> 1}),
        LayerSample(**at, layer="b", values={"amax": float("nan"), "elements": bits >> 2}),
        StepRecord(**at, ts_ns=step, values=values),
    ]


def check(records: Iterable[Record]) -> tuple[dict[tuple[int, int, int], int], int]:
    """How many records there are of each step, and how many records are not what was logged."""
    counts: dict[tuple[int, int, int], int] = {}
    expected: dict[tuple[int, int, int], set[str]] = {}
    corrupt = 0
    for record in records:
        key = (record.attempt, record.rank, record.step)
        counts[key] = counts.get(key, 0) + 1
        if key not in expected:
            expected[key] = set(map(repr, make(*key)))
        corrupt += repr(record) not in expected[key]
    return counts, corrupt


def write(attempt_dir: str, rank: int, acknowledged: str, pause_s: float) -> None:
    with (
        open(acknowledged, "ab", buffering=0) as acks,
        RankLog.create(attempt_dir, rank, segment_bytes=SEGMENT_BYTES) as log,
    ):
        step = 0
        while True:
            log.append(make(log.attempt, rank, step))
            acks.write(ACK.pack(log.attempt, rank, step))
            step += 1
            time.sleep(pause_s)


def publish(run_path: str) -> None:
    publisher = Publisher(run_path, part_bytes=PART_BYTES, retention_s=3.0)
    while True:
        try:
            publisher.publish(wait_s=10.0)
        except StoreError as error:
            print(f"publisher: {error}", file=sys.stderr, flush=True)
        time.sleep(0.2)


def read(run_path: str, found: str) -> None:
    """Follow the run and note what is wrong with it."""
    totals: dict[tuple[int, int, int], int] = {}
    looks = 0
    with RunReader.open(run_path) as reader, open(found, "a", buffering=1) as out:
        while True:
            counts, corrupt = check(reader.poll())
            for key, n in counts.items():
                totals[key] = totals.get(key, 0) + n
            twice = sum(totals[key] > KINDS for key in counts)
            if looks % 10 == 0:
                rows = reader.sql("SELECT count(*) - count(DISTINCT (attempt, rank, step)) FROM steps").item()
                gaps = reader.sql(
                    "SELECT count(*) FROM (SELECT max(step) + 1 - count(*) AS n FROM steps GROUP BY attempt, rank) "
                    "WHERE n <> 0"
                ).item()
                twice, corrupt = twice + rows, corrupt + gaps
            looks += 1
            out.write(json.dumps({"corrupt": corrupt, "duplicated": twice, "steps": len(counts)}) + "\n")
            time.sleep(0.05)


class Crew:
    """The processes; `kill` ends one and starts its successor."""

    def __init__(self, root: str, pause_s: float) -> None:
        self.store = Store(root)
        self.run = self.store.create_run("crash")
        self.acknowledged = f"{root}/acknowledged"
        self.found = f"{root}/found"
        self._pause_s = pause_s
        self._starts = 0
        self.errors = Path(f"{root}/errors").open("a")  # noqa: SIM115 - closed by end()
        self.people = {name: self._start(name) for name in CREW}

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        self._starts += 1
        role, _, rank = name.partition("-")
        command = [sys.executable, __file__, "--role", role, "--path", self.run.path]
        if role == "writer":
            claim = self.store.claim_attempt(self.run, f"start-{self._starts}")
            command[-1] = claim.path
            command += ["--rank", rank, "--out", self.acknowledged, "--pause-s", str(self._pause_s)]
        elif role == "reader":
            command += ["--out", self.found]
        return subprocess.Popen(command, stderr=self.errors)

    def kill(self, name: str) -> None:
        self.people[name].kill()
        self.people[name].wait()
        self.people[name] = self._start(name)

    def end(self) -> None:
        for person in self.people.values():
            person.kill()
            person.wait()
        self.errors.close()


def acknowledged_steps(path: str) -> list[tuple[int, int, int]]:
    data = Path(path).read_bytes()
    return list(ACK.iter_unpack(data[: len(data) // ACK.size * ACK.size]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.004, help="between two steps of a rank")
    for name in ("--role", "--path", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "writer":
        return write(args.path, args.rank, args.out, args.pause_s)
    if args.role == "publisher":
        return publish(args.path)
    if args.role == "reader":
        return read(args.path, args.out)

    rng = random.Random(args.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        crew = Crew(root, args.pause_s)
        kills = dict.fromkeys(crew.people, 0)
        try:
            deadline = time.monotonic() + 60
            while not (Path(crew.found).exists() and Path(crew.run.path, "run.duckdb").exists()):
                if time.monotonic() > deadline:
                    raise SystemExit("publisher or reader did not begin")
                time.sleep(0.05)
            for _ in range(args.kills):
                time.sleep(rng.uniform(0.2, 2.8))
                victim = rng.choice(list(kills))
                crew.kill(victim)
                kills[victim] += 1
        finally:
            crew.end()
        acked = acknowledged_steps(crew.acknowledged)
        Publisher(crew.run.path, part_bytes=PART_BYTES).publish(wait_s=10.0)
        with RunReader.open(crew.run.path) as reader:
            counts, corrupt = check(reader.records())
            rejected = [one.why for one in reader.describe().rejected if "cut off" not in one.why]
            notes = reader.describe().notes
        with duckdb.connect(f"{crew.run.path}/run.duckdb", read_only=True) as client:
            in_database = set(client.execute("SELECT attempt, rank, step FROM steps").fetchall())
            parts = client.execute("SELECT count(*) FROM parts").fetchall()[0][0]
        seen = [json.loads(line) for line in Path(crew.found).read_text().splitlines() if line.endswith("}")]
        lost = [key for key in acked if counts.get(key, 0) < KINDS or key not in in_database]
        errors = Path(f"{root}/errors").read_text().splitlines()
        result = {
            "acked": len(acked),
            "lost": len(lost),
            "corrupt": corrupt + len(rejected) + len(notes) + sum(look["corrupt"] for look in seen),
            "duplicated": sum(n > KINDS for n in counts.values()) + sum(look["duplicated"] for look in seen),
            "kills": kills,
            "steps_checked_live": sum(look["steps"] for look in seen),
            "parts": parts,
            "rank_logs_left": len(list(Path(crew.run.path).glob("log/a*/r*/*.rlog"))),
            "seconds": round(time.monotonic() - started, 1),
        }
        for why in (*rejected, *notes, *errors[-10:]):
            print(why, file=sys.stderr)
    print(json.dumps(result))
    return None


if __name__ == "__main__":
    main()
