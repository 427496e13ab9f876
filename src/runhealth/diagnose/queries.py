"""SQL that recomputes a piece of evidence from `run.duckdb`. One number each."""

from collections.abc import Sequence


def identifier(name: str) -> str:
    """A column name, quoted: free-form signals may hold any character."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def steps(aggregate: str, signal: str, attempt: int, first: int, last: int, ranks: Sequence[int] = ()) -> str:
    """`aggregate` of a step signal over steps `first` to `last`; over all ranks unless some are given."""
    return (
        f"SELECT {aggregate}({identifier(signal)}) FROM steps WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last}{_ranks(ranks)}"
    )


def batches(aggregate: str, signal: str, attempt: int, step: int, rank: int, micro_batch: int) -> str:
    """A statistic of one micro-batch."""
    return (
        f"SELECT {aggregate}({identifier(signal)}) FROM batches WHERE attempt = {attempt} AND step = {step} "
        f"AND rank = {rank} AND micro_batch = {micro_batch}"
    )


def hash_mismatches(attempt: int, first: int, last: int) -> str:
    """How many batches came from a shard whose hash is not the manifest's."""
    return (
        f"SELECT count(*) FROM batches WHERE attempt = {attempt} AND step BETWEEN {first} AND {last} "
        "AND shard_hash <> manifest_hash"
    )


def layers(aggregate: str, signal: str, attempt: int, first: int, last: int, layer: str) -> str:
    """`aggregate` of a layer signal over the steps, all ranks."""
    return (
        f"SELECT {aggregate}({identifier(signal)}) FROM layers WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last} AND layer = {literal(layer)}"
    )


def over_threshold(attempt: int, first: int, last: int) -> str:
    """The largest gradient norm over its clip threshold."""
    return (
        f"SELECT max(grad_norm / clip_threshold) FROM steps WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f" AND rank IN ({', '.join(str(rank) for rank in ranks)})" if ranks else ""
