"""The planner's answers for four models on four clusters, as the table in docs/plan.md.

    python bench/plans.py [--write | --check]

`--write` puts the table between the marks of docs/plan.md; `--check` exits 1 if the page holds another one. GPUs of
80 GB with the default links; 4,096 tokens a sequence; 4M tokens a step, 16M for the 405B model.
"""

import argparse
import json
import sys
from pathlib import Path

from runhealth.storage.errors import ConfigError
from runhealth.trainer.cadence import duration
from runhealth.trainer.planner.cluster import Cluster
from runhealth.trainer.planner.estimate import Job
from runhealth.trainer.planner.render import size
from runhealth.trainer.planner.saving import saving
from runhealth.trainer.planner.shape import preset
from runhealth.trainer.planner.walk import Walk, walk

MODELS = (("llama-2-7b", 2**22), ("llama-2-13b", 2**22), ("llama-3-70b", 2**22), ("llama-3-405b", 2**24))
NODES = (1, 8, 64, 256)
HEAD = ("model", "GPUs", "layout", "memory a GPU", "MFU", "largest loss", "save every", "time that trains")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"
BEGIN, END = "<!-- table: python bench/plans.py --write -->", "<!-- end of table -->"


def row(name: str, nodes: int, batch_tokens: int) -> tuple[str, ...]:
    cluster = Cluster(nodes=nodes)
    shape = preset(name)
    kept = saving(shape, cluster).cadence
    last = (duration(kept.interval_s), f"{kept.effective:.1%}")
    try:
        answer = walk(Job(shape=shape, seq_len=4096, batch_tokens=batch_tokens), cluster)
    except ConfigError as error:
        return (name, f"{cluster.gpus:,}", str(error), "", "", "", *last)
    return (name, f"{cluster.gpus:,}", *answer_cells(answer), *last)


def answer_cells(answer: Walk) -> tuple[str, str, str, str]:
    best = answer.chosen
    if best is None:
        laid = [stop.best for stop in answer.stops if stop.best is not None]
        nearest = min(laid, key=lambda e: e.memory.total)
        over = f"{size(nearest.memory.total)}, {size(nearest.over_bytes)} too much"
        return (f"nothing fits; nearest: {nearest.layout.words()}", over, "", nearest.bottleneck)
    loss, seconds = best.terms.named()[0]
    return (
        best.layout.words(),
        f"{size(best.memory.total)} of {size(best.budget_bytes)}",
        f"{best.mfu:.0%}",
        f"{loss} {seconds / best.step_s:.0%}" if seconds > 0.01 * best.step_s else "none over 1%",
    )


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="put the table into docs/plan.md")
    what.add_argument("--check", action="store_true", help="exit 1 if docs/plan.md holds another table")
    args = parser.parse_args()
    rows = [row(name, nodes, tokens) for name, tokens in MODELS for nodes in NODES]
    made = table(rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page = f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"
    same = page == PAGE.read_text()
    if args.write:
        PAGE.write_text(page)
    print(made)
    print(json.dumps({"rows": len(rows), "page_is_current": same or args.write}))
    return 1 if args.check and not same else 0


if __name__ == "__main__":
    sys.exit(main())
