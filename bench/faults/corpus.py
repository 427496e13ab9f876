"""The data of the bench: the trainer's packed corpus, and shards of two other clean kinds of text for benign runs."""

import dataclasses
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import xxhash

from runhealth.trainer.data import DataConfig, Manifest, ShardEntry, pack, shard_name

DATA = DataConfig(shards=48, heldout_shards=2, shard_bytes=5_120, piece_bytes=256, seq_len=32, batch_size=8)
HARD = 4  # shards of tables of characters, on which a model of code has a loss half as high again
PROSE = 12  # shards of English


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """`hard` and `prose` are the numbers of the first shard of each kind."""

    folder: str
    manifest: Manifest
    hard: int
    prose: int


def load(cache: Path) -> Corpus:
    """Pack the corpus below `cache`, unless it is there."""
    folder = cache / "corpus"
    manifest = pack(str(folder), DATA)
    library = Path(sysconfig.get_paths()["stdlib"])
    tables = (library / "stringprep.py").read_bytes()[2_000:] + (library / "html" / "entities.py").read_bytes()[:11_000]
    prose = (library / "pydoc_data" / "topics.py").read_bytes()
    entries = list(manifest.shards)
    hard = len(entries)
    entries += [_shard(folder, hard + i, tables, i, HARD) for i in range(HARD)]
    first_prose = len(entries)
    entries += [_shard(folder, first_prose + i, prose, i, PROSE) for i in range(PROSE)]
    return Corpus(
        folder=str(folder), manifest=dataclasses.replace(manifest, shards=tuple(entries)), hard=hard, prose=first_prose
    )


def _shard(folder: Path, number: int, text: bytes, index: int, count: int) -> ShardEntry:
    start = (len(text) - DATA.shard_bytes) * index // (count - 1)
    blob = text[start : start + DATA.shard_bytes]
    digest = xxhash.xxh3_64_intdigest(blob)
    path = folder / f"other-{digest:016x}.bin"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(blob)
        temporary.replace(path)
    return ShardEntry(name=shard_name(number), path=path.name, start=0, stop=len(blob), xxh3_64=digest)
