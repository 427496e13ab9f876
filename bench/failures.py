"""Ranks that are killed, crash, raise, hang or are stopped, and a node that is lost: how long until it is noticed,
named and trained on, and are the final weights those of a run that nothing happened to?

Each failure strikes another rank of the same run, an attempt later than the one before. Times count from the moment of
the failure, as the rank itself wrote it down. The last line is one JSON object:

    python bench/failures.py --ranks 3 --kind ddp
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runhealth.storage.reader import RunReader
from runhealth.storage.records import EventKind, RunEvent
from runhealth.storage.store import RunInfo, Store
from runhealth.trainer import checkpoints
from runhealth.trainer.attempt import Progress
from runhealth.trainer.config import CheckpointConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from runhealth.trainer.data import DataConfig
from runhealth.trainer.drill import ENVIRONMENT
from runhealth.trainer.supervisor import Supervisor, create

MODES = {  # mode -> what has to be said of the rank
    "kill": "rank {} was killed (signal 9, SIGKILL)",
    "segv": "rank {} was killed (signal 11, SIGSEGV)",
    "exception": "rank {}: DrillError",
    "hang": "rank {} never joined the others",
    "stop": "rank {} is suspended (SIGSTOP)",
}
EVERY = 5
NODE = "node"


def config_for(ranks: int, kind: str, timeout_s: float) -> TrainConfig:
    return TrainConfig(
        steps=EVERY * (len(MODES) + 2),
        seed=3,
        world=ranks,
        data=DataConfig(shards=2 * ranks, shard_bytes=4_096, seq_len=32, batch_size=4),
        model=ModelConfig(layers=2, width=32, heads=2, ffn_width=64),
        parallel=ParallelConfig(kind=kind),  # type: ignore[arg-type]
        optim=OptimConfig(warmup_steps=4),
        checkpoint=CheckpointConfig(every=EVERY),
        eval_every=1_000,
        eval_samples=16,
        timeout_s=timeout_s,
    )


def weights(run: RunInfo) -> dict[str, str]:
    """Shard -> hash of the newest checkpoint."""
    newest, failed = checkpoints.newest_verified(run.path)
    assert newest is not None
    assert not failed, failed
    manifest = checkpoints.read_manifest(str(Path(run.path) / newest.path))
    return {entry.name: entry.xxh3_64 for entry in manifest.files if entry.name != ".metadata"}


def events(store: Store, run: RunInfo) -> list[RunEvent]:
    with RunReader.open(run.name, store.root) as reader:
        return [record for record in reader.records() if isinstance(record, RunEvent)]


def times(found: list[RunEvent], attempt: int, failed_ns: int) -> dict[str, Any]:
    failure = next(e for e in found if e.kind == EventKind.EXCEPTION and e.rank == -1 and e.attempt == attempt)
    resumed = next(e for e in found if e.kind == EventKind.RESUME and e.attempt == attempt + 1)
    detected_ns, named_ns = (int(str(failure.data[key])) for key in ("detected_ns", "named_ns"))
    return {
        "detect_s": round((detected_ns - failed_ns) / 1e9, 3),
        "name_s": round((named_ns - failed_ns) / 1e9, 3),
        "resume_s": round((resumed.ts_ns - failed_ns) / 1e9, 3),
        "ranks": failure.data["ranks"],
        "message": failure.message,
    }


def strike_ranks(store: Store, config: TrainConfig) -> tuple[dict[str, dict[str, Any]], RunInfo]:
    run = create(store, "failures", config)
    orders = [f"{mode}:step={EVERY * (n + 1) + 2},rank={n % config.world},attempt={n}" for n, mode in enumerate(MODES)]
    os.environ[ENVIRONMENT] = ";".join(orders)
    code = Supervisor(store, run, say=lambda line: print(line, file=sys.stderr)).supervise()
    del os.environ[ENVIRONMENT]
    assert code == 0, code
    found = events(store, run)
    results = {}
    for attempt, (mode, words) in enumerate(MODES.items()):
        log = (Path(run.path) / "launch" / f"a{attempt:03d}.log").read_text()
        struck = re.search(rf"drill: {mode} of rank \d+ at step \d+, (\d+)", log)
        assert struck is not None, log
        rank = attempt % config.world
        result = times(found, attempt, int(struck[1]))
        result["named"] = result["ranks"] == [rank] and result["message"].startswith(words.format(rank))
        results[mode] = result
    return results, run


def lose_a_node(store: Store, config: TrainConfig) -> tuple[dict[str, Any], RunInfo]:
    """One node a rank and a spare; the agent of the last node is killed."""
    run = create(store, "node", dataclasses.replace(config, steps=600, checkpoint=CheckpointConfig(every=50)))
    killed_ns: list[int] = []
    victim = f"n{config.world - 1}"

    def kill_once(progress: Progress) -> None:
        if progress.attempt == 0 and progress.step > 50 and not killed_ns:
            status = json.loads((Path(run.path) / "supervisor.json").read_text())
            killed_ns.append(time.time_ns())
            os.kill(status["agents"][victim], signal.SIGKILL)

    supervisor = Supervisor(store, run, nodes=config.world, spares=1, on_progress=kill_once)
    assert supervisor.supervise() == 0
    result = times(events(store, run), 0, killed_ns[0])
    result["named"] = result["message"].startswith(f"node {victim} was lost with rank {config.world - 1}")
    return result, run


def undisturbed(store: Store, like: RunInfo) -> dict[str, str]:
    run = create(store, f"{like.name}-undisturbed", TrainConfig.from_json(like.config))
    assert Supervisor(store, run).supervise() == 0
    return weights(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kind", default="ddp", help="ddp, zero1, zero2 or zero3 (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=5.0, help="of the group, seconds (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        store = Store(root)
        config = config_for(args.ranks, args.kind, args.timeout)
        results, run = strike_ranks(store, config)
        equal = weights(run) == undisturbed(store, run)
        results[NODE], lost = lose_a_node(store, config)
        node_equal = weights(lost) == undisturbed(store, lost)
    result = {
        "ranks": args.ranks,
        "kind": args.kind,
        "timeout_s": args.timeout,
        "failures": results,
        "detected_in_time": all(one["detect_s"] <= args.timeout + 1.0 for one in results.values()),
        "all_named": all(one["named"] for one in results.values()),
        "weights_equal": equal and node_equal,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
