"""The command `runhealth plan`."""

import argparse
import json
import math
from pathlib import Path

from runhealth.storage.errors import ConfigError
from runhealth.trainer.planner.cluster import Cluster, parse_bytes
from runhealth.trainer.planner.estimate import Job
from runhealth.trainer.planner.shape import PRESETS, from_params, preset

MOST_TOKENS = 1e18  # in one step
LARGE = 100e9  # parameters from which on 16M tokens a step are usual
DEFAULTS = Cluster()


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What sits in GPU memory, which layout fits, what holds it up, where tensor parallel ends, how often to save."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", type=_number, metavar="N", help="parameters, such as 7e9 or 70B")
    what.add_argument("--model", metavar="NAME", help=f"a known shape: {', '.join(PRESETS)}")
    parser.add_argument("--nodes", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--gpu-memory", default="80GB", metavar="SIZE", help="of one GPU (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens a sequence (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=_number, help="tokens an optimizer step (default: 2^22, from 100B parameters on 2^24)"
    )
    parser.add_argument(
        "--peak-tflops", type=_number, default=DEFAULTS.peak_flops / 1e12, help="bf16, dense (default: %(default).0f)"
    )
    parser.add_argument(
        "--intra-node", default="450GB", metavar="SIZE", help="a GPU sends a second inside its node (%(default)s)"
    )
    parser.add_argument(
        "--inter-node", default="50GB", metavar="SIZE", help="a GPU sends a second to other nodes (%(default)s)"
    )
    parser.add_argument("--fp32-gradients", action="store_true", help="gradients kept and reduced in fp32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--run", metavar="R", help="also keep the answer with this run, for `diagnose` to hold it against"
    )
    parser.add_argument("--store", metavar="S", help="where runs are kept (default: $RUNHEALTH_STORE, else ./runs)")


def run_plan(arguments: argparse.Namespace) -> int:
    """0 a layout fits · 1 nothing fits.

    Raises:
        ConfigError: a number that cannot be. RunNotFoundError: `--run` names no run.
    """
    from runhealth.trainer.planner import render
    from runhealth.trainer.planner.walk import walk

    for name in ("nodes", "gpus_per_node", "seq_len"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, met {getattr(arguments, name)}")
    shape = preset(arguments.model) if arguments.model else from_params(arguments.params)
    cluster = Cluster(
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        gpu_memory_bytes=_size("--gpu-memory", arguments.gpu_memory),
        peak_flops=arguments.peak_tflops * 1e12,
        intra_bytes_s=_size("--intra-node", arguments.intra_node),
        inter_bytes_s=_size("--inter-node", arguments.inter_node),
    )
    batch_tokens = arguments.batch_tokens or (2**24 if shape.params >= LARGE else 2**22)
    if batch_tokens < arguments.seq_len:
        raise ConfigError(f"--batch-tokens: expected at least one sequence, {arguments.seq_len}, met {batch_tokens:g}")
    if batch_tokens > MOST_TOKENS:
        raise ConfigError(f"--batch-tokens: expected at most {MOST_TOKENS:.0e}, met {batch_tokens:g}")
    job = Job(
        shape=shape,
        seq_len=arguments.seq_len,
        batch_tokens=batch_tokens,
        fp32_gradients=arguments.fp32_gradients,
    )
    answer = walk(job, cluster)
    found = render.to_json(answer)
    if arguments.run:
        _keep(arguments.run, arguments.store, found)
    print(json.dumps(found, indent=2) if arguments.json else render.text(answer))
    return 0 if answer.chosen is not None else 1


def _keep(run: str, store: str | None, found: dict[str, object]) -> None:
    from runhealth.storage.durable import write_whole
    from runhealth.storage.store import Store

    write_whole(Path(Store(store).resolve(run).path) / "plan.json", json.dumps(found, indent=2).encode())


def _number(text: str) -> float:
    """`70e9`, `70B`, `4M`."""
    factor = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, such as 7e9 or 7B, met {text!r}")
    return value


def _size(option: str, text: str) -> float:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
