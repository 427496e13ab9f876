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


def mean_of_batches(signal: str, attempt: int, step: int, ranks: Sequence[int] = ()) -> str:
    """The mean of a statistic over the batches of a step; of all ranks unless some are given."""
    return f"SELECT avg({identifier(signal)}) FROM batches WHERE attempt = {attempt} AND step = {step}{_ranks(ranks)}"


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


def totals(signal: str, attempt: int, first: int, last: int) -> str:
    """The largest sum over the ranks of any step."""
    return (
        f"SELECT max(total) FROM (SELECT sum({identifier(signal)}) AS total FROM steps WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last} GROUP BY step)"
    )


def mean_norm_ratio(attempt: int, step: int) -> str:
    """The norm of the mean gradient over the mean of the ranks' own norms; over 1 cannot be."""
    return f"SELECT max(grad_norm) / avg(grad_norm_rank) FROM steps WHERE attempt = {attempt} AND step = {step}"


def distinct(signal: str, attempt: int, step: int) -> str:
    """How many different values the ranks have at a step."""
    return f"SELECT count(DISTINCT {identifier(signal)}) FROM steps WHERE attempt = {attempt} AND step = {step}"


def distinct_layer(signal: str, attempt: int, step: int, layer: str) -> str:
    """How many different values the ranks have of a layer at a step."""
    return (
        f"SELECT count(DISTINCT {identifier(signal)}) FROM layers WHERE attempt = {attempt} AND step = {step} "
        f"AND layer = {literal(layer)}"
    )


def batches_seen_before(attempt: int, first: int, last: int) -> str:
    """The share of the batches of these steps that were read at an earlier step too."""
    return (
        "SELECT avg(CASE WHEN EXISTS (SELECT 1 FROM batches old WHERE old.shard = new.shard "
        "AND old.first_sample = new.first_sample AND old.last_sample = new.last_sample "
        f"AND old.step < {first}) THEN 1.0 ELSE 0.0 END) "
        f"FROM batches new WHERE attempt = {attempt} AND step BETWEEN {first} AND {last}"
    )


def repeated_batches(attempt: int, first: int, last: int, ranks: Sequence[int]) -> str:
    """The share of what ranks read in these steps that was read at an earlier step, too."""
    return (
        "SELECT avg(CASE WHEN EXISTS (SELECT 1 FROM batches old WHERE old.content_hash = new.content_hash "
        "AND old.step < new.step) THEN 1.0 ELSE 0.0 END) "
        f"FROM batches new WHERE attempt = {attempt} AND step BETWEEN {first} AND {last}{_ranks(ranks)}"
    )


def cosine_with_others(attempt: int, step: int, rank: int, count: int) -> str:
    """The cosine of a rank's gradient with the mean of those of the others, of `count` ranks in all."""
    return (
        f"SELECT ({count} * p - n * n) / (n * sqrt({count} * {count} - 2 * {count} * p + n * n)) FROM (SELECT "
        "grad_projection_rank AS p, grad_projection_rank / grad_cosine_rank AS n FROM steps "
        f"WHERE attempt = {attempt} AND step = {step} AND rank = {rank})"
    )


def copied_batches(attempt: int, first: int, last: int) -> str:
    """The share of the batches of these steps that another batch of them equals."""
    return (
        f"SELECT 1 - count(DISTINCT content_hash) / count(content_hash) FROM batches WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last}"
    )


def phases(aggregate: str, names: Sequence[str], attempt: int, first: int, last: int, ranks: Sequence[int] = ()) -> str:
    """`aggregate` of the sum of several times over these steps; over all ranks unless some are given."""
    total = " + ".join(f"coalesce({identifier(name)}, 0)" for name in names)
    return (
        f"SELECT {aggregate}({total}) FROM steps WHERE attempt = {attempt} "
        f"AND step BETWEEN {first} AND {last}{_ranks(ranks)}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f" AND rank IN ({', '.join(str(rank) for rank in ranks)})" if ranks else ""
