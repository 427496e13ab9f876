"""Training data: the Python standard library's own source files, packed into shards with a manifest.

A batch is a pure function of (seed, step, rank, skip set). So a resume, a skip and a replay need no state: whoever
knows the step knows the samples. A change of the number of ranks does not change which samples a step has.

Every rank reads one shard at a time and stays with it for `steps_per_visit` steps, so a corrupted shard reaches one
rank for one contiguous stretch of steps. The order of shards is permuted for every epoch, and the order of samples for
every visit, with xxh3 as the source of randomness: unlike a library's generator it never changes between versions.
"""

import json
import os
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from runhealth.storage.errors import ConfigError, CorruptDataError
from runhealth.storage.jsontext import parse_json
from runhealth.trainer.skips import SkipSet

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
_OMITTED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
_CORPUS_SEED = 0x5EED
_EPOCH, _VISIT, _SUBSTITUTE, _PIECES, _HELDOUT = range(5)

Tokens = npt.NDArray[np.uint8]
Tamper = Callable[[str, bytes], bytes]  # (shard name, its bytes) -> the bytes as they arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`shards` are trained on, `heldout_shards` more are kept for evaluation. The corpus is cut into pieces of
    `piece_bytes` that are dealt to the shards in a fixed random order, so that all shards look alike.

    `stream_size` is for a world that has shrunk (`elastic`): the plan stays cut into streams of so many sequences a
    step, as the first ranks had one each, and the ranks that are left read them on. 0: a rank is a stream."""

    shards: int = 64
    heldout_shards: int = 2
    shard_bytes: int = 32_768
    piece_bytes: int = 1_024
    seq_len: int = 64
    batch_size: int = 16  # sequences a rank and step
    stream_size: int = 0

    def __post_init__(self) -> None:
        for name in ("shards", "heldout_shards", "shard_bytes", "piece_bytes", "seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"data: expected {name} >= 1, met {getattr(self, name)}")
        if self.shard_bytes % self.piece_bytes:
            raise ConfigError(
                f"data: expected shard_bytes to be a multiple of piece_bytes {self.piece_bytes}, met {self.shard_bytes}"
            )
        if self.stream_size < 0:
            raise ConfigError(f"data: expected stream_size >= 0, met {self.stream_size}")
        if self.samples_per_shard < self.stream:
            raise ConfigError(
                f"data: a shard holds {self.samples_per_shard} samples of {self.seq_len} tokens,"
                f" fewer than batch_size {self.stream}"
            )

    @property
    def samples_per_shard(self) -> int:
        """Samples are `seq_len + 1` bytes long and start `seq_len` bytes apart."""
        return (self.shard_bytes - 1) // self.seq_len

    @property
    def stream(self) -> int:
        """Sequences that a stream gives to a step."""
        return self.stream_size or self.batch_size

    @property
    def steps_per_visit(self) -> int:
        return self.samples_per_shard // self.stream


# ---------------------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Bytes `start` to `stop` (exclusive) of a source file, relative to the standard library's folder."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard: its file and byte range (exclusive), xxh3_64 of these bytes, and where they came from."""

    name: str
    path: str
    start: int
    stop: int
    xxh3_64: int
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    shards: tuple[ShardEntry, ...]  # training shards first, then the held-out ones
    python: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "version": MANIFEST_VERSION,
            "python": self.python,
            "shards": [
                {
                    "name": entry.name,
                    "path": entry.path,
                    "start": entry.start,
                    "stop": entry.stop,
                    "xxh3_64": f"{entry.xxh3_64:016x}",
                    "sources": [[source.path, source.start, source.stop] for source in entry.sources],
                }
                for entry in self.shards
            ],
        }

    @classmethod
    def load(cls, folder: str) -> "Manifest":
        """Raises CorruptDataError where the manifest is missing or not one of ours."""
        path = Path(folder) / MANIFEST
        try:
            raw = parse_json(path.read_text())
            if raw["version"] != MANIFEST_VERSION:
                raise CorruptDataError(f"{path}: expected manifest version {MANIFEST_VERSION}, met {raw['version']!r}")
            return cls(
                python=raw["python"],
                shards=tuple(
                    ShardEntry(
                        name=item["name"],
                        path=item["path"],
                        start=item["start"],
                        stop=item["stop"],
                        xxh3_64=int(item["xxh3_64"], 16),
                        sources=tuple(Source(path=p, start=a, stop=b) for p, a, b in item["sources"]),
                    )
                    for item in raw["shards"]
                ),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(f"{path}: expected a data manifest, met {type(error).__name__}: {error}") from error


def shard_name(index: int) -> str:
    return f"{index:04d}"


def data_folder(store_root: str, config: DataConfig) -> str:
    """Where the packed corpus of this configuration lives: shared by all runs of a store."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.version_info.micro}"
    size = f"{config.shards}+{config.heldout_shards}x{config.shard_bytes}p{config.piece_bytes}"
    return str(Path(store_root) / ".data" / f"stdlib-{python}-{size}")


def pack(folder: str, config: DataConfig) -> Manifest:
    """Write the shards and, last, the manifest; an existing pack is verified by its manifest and kept.

    Raises:
        ConfigError: the standard library is too small for the wanted number of shards.
    """
    target = Path(folder)
    if (target / MANIFEST).exists():
        return Manifest.load(folder)
    target.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(config)
    per_shard = config.shard_bytes // config.piece_bytes
    root = Path(sysconfig.get_paths()["stdlib"])
    entries = []
    for index in range(config.shards + config.heldout_shards):
        sources = tuple(pieces[index * per_shard : (index + 1) * per_shard])
        blob = b"".join(_read_range(root, source) for source in sources)
        path = f"shard-{shard_name(index)}.bin"
        _write_whole(target / path, blob)
        entries.append(
            ShardEntry(
                name=shard_name(index),
                path=path,
                start=0,
                stop=len(blob),
                xxh3_64=xxhash.xxh3_64_intdigest(blob),
                sources=sources,
            )
        )
    manifest = Manifest(shards=tuple(entries), python=sys.version.split()[0])
    _write_whole(target / MANIFEST, json.dumps(manifest.to_json(), indent=1).encode())
    return manifest


def _pieces(config: DataConfig) -> list[Source]:
    """All whole pieces of the standard library, in the fixed random order in which they are dealt."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        Source(path=str(path.relative_to(root)), start=start, stop=start + config.piece_bytes)
        for path in _source_files(root)
        for start in range(0, path.stat().st_size - config.piece_bytes + 1, config.piece_bytes)
    ]
    needed = (config.shards + config.heldout_shards) * (config.shard_bytes // config.piece_bytes)
    if len(found) < needed:
        raise ConfigError(
            f"data: expected {needed} pieces of {config.piece_bytes} bytes for {config.shards}+{config.heldout_shards}"
            f" shards, met {len(found)} in {root}; use fewer or smaller shards"
        )
    return [found[i] for i in permutation(len(found), _CORPUS_SEED, _PIECES)]


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _OMITTED_FOLDERS)
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder) / name


def _read_range(root: Path, source: Source) -> bytes:
    with open(root / source.path, "rb") as file:
        file.seek(source.start)
        return file.read(source.stop - source.start)


def _write_whole(path: Path, blob: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(blob)
    temporary.replace(path)


# --------------------------------------------------------------------------------------------------------- batching


@lru_cache(maxsize=64)
def permutation(n: int, *key: int) -> tuple[int, ...]:
    """A permutation of range(n) that depends on the key only: the indices sorted by xxh3_64 of (key, index)."""
    prefix = struct.pack(f"<{len(key)}Q", *key)
    return tuple(sorted(range(n), key=lambda i: xxhash.xxh3_64_intdigest(prefix + struct.pack("<Q", i))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of one shard in the order in which they enter the batch; `positions` are their rows."""

    shard: int
    samples: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Which samples each (step, rank) trains on. Pure: no state, no I/O.

    The samples of a step come from `streams`, each of which visits one shard after the other. A rank reads one stream,
    or, in a world that has shrunk, its equal part of all rows of all streams in their order: the samples of a step, and
    the rows they stand in, are the same for every number of ranks.
    """

    data: DataConfig
    seed: int
    world: int
    skips: SkipSet = field(default_factory=SkipSet)

    def __post_init__(self) -> None:
        if self.world * self.data.batch_size % self.data.stream:
            raise ConfigError(
                f"data: expected the {self.world} x {self.data.batch_size} sequences of a step to be a multiple of"
                f" stream_size {self.data.stream}"
            )
        if self.data.shards < self.streams:
            raise ConfigError(
                f"data: expected at least one shard a rank, met {self.data.shards} for {self.streams} ranks"
            )

    @property
    def streams(self) -> int:
        return self.world * self.data.batch_size // self.data.stream

    @property
    def epoch_steps(self) -> int:
        return self.data.shards // self.streams * self.data.steps_per_visit

    def shard_of(self, step: int, stream: int) -> int:
        """The shard that this stream visits at this step when nothing is skipped. Raises ConfigError."""
        if not 0 <= stream < self.streams:
            raise ConfigError(f"data: expected a data-parallel rank below {self.streams}, met {stream}")
        visits_per_epoch = self.data.shards // self.streams
        epoch, slot = divmod(step // self.data.steps_per_visit, visits_per_epoch)
        return permutation(self.data.shards, self.seed, _EPOCH, epoch)[slot * self.streams + stream]

    def visit_of(self, step: int) -> range:
        """The steps of the visit that `step` belongs to."""
        first = step - step % self.data.steps_per_visit
        return range(first, first + self.data.steps_per_visit)

    def batch(self, step: int, rank: int) -> tuple[Part, ...]:
        """The parts of one batch, ordered by their first row; one part unless samples are skipped or streams joined."""
        first = rank * self.data.batch_size
        rows: list[tuple[int, int]] = []
        while len(rows) < self.data.batch_size:
            stream, row = divmod(first + len(rows), self.data.stream)
            rows += self._rows(step, stream)[row : row + self.data.batch_size - len(rows)]
        parts = []
        for part_shard in dict.fromkeys(owner for owner, _ in rows):
            positions = tuple(row for row, (owner, _) in enumerate(rows) if owner == part_shard)
            parts.append(Part(shard=part_shard, samples=tuple(rows[row][1] for row in positions), positions=positions))
        return tuple(parts)

    def _rows(self, step: int, stream: int) -> list[tuple[int, int]]:
        """What a stream gives to a step: (shard, sample) by row."""
        data = self.data
        shard = self.shard_of(step, stream)
        visit, offset = divmod(step, data.steps_per_visit)
        order = permutation(data.samples_per_shard, self.seed, _VISIT, visit, stream)
        wanted = order[offset * data.stream : (offset + 1) * data.stream]
        return [
            self._substitute(visit, stream, offset * data.stream + row)
            if self.skips.covers(shard_name(shard), sample)
            else (shard, sample)
            for row, sample in enumerate(wanted)
        ]

    def _substitute(self, visit: int, stream: int, index: int) -> tuple[int, int]:
        """The sample that takes the place of the `index`-th of a visit: out of a shard drawn for this visit, the next
        one in its order that is not skipped."""
        n = self.data.samples_per_shard
        order = permutation(n, self.seed, _SUBSTITUTE, visit, stream, 1)
        for shard in permutation(self.data.shards, self.seed, _SUBSTITUTE, visit, stream):
            for ahead in range(n):
                sample = order[(index + ahead) % n]
                if not self.skips.covers(shard_name(shard), sample):
                    return shard, sample
        raise ConfigError("data: every sample of every shard is in the skip set; nothing is left to train on")


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard:
    name: str
    tokens: Tokens
    shard_hash: int  # xxh3_64 as read
    manifest_hash: int  # what the manifest says


class ShardReader:
    """Reads shards whole and hashes them as they arrive. A hash that disagrees is recorded by the caller, not refused:
    the reader does not judge, the diagnosis does."""

    def __init__(self, folder: str, manifest: Manifest, data: DataConfig, tamper: Tamper | None = None) -> None:
        self._folder = Path(folder)
        self._manifest = manifest
        self._data = data
        self._tamper = tamper
        self._cache: dict[int, LoadedShard] = {}

    def shard(self, index: int) -> LoadedShard:
        """Raises CorruptDataError if the file is missing or shorter than the manifest says."""
        if index not in self._cache:
            if len(self._cache) >= 4:
                self._cache.pop(next(iter(self._cache)))
            self._cache[index] = self._load(self._manifest.shards[index])
        return self._cache[index]

    def _load(self, entry: ShardEntry) -> LoadedShard:
        path = self._folder / entry.path
        try:
            with open(path, "rb") as file:
                file.seek(entry.start)
                blob = file.read(entry.stop - entry.start)
        except OSError as error:
            raise CorruptDataError(f"{path}: expected shard {entry.name}, met {error.strerror}") from error
        if len(blob) != entry.stop - entry.start:
            raise CorruptDataError(f"{path}: expected {entry.stop - entry.start} bytes, met {len(blob)}")
        if self._tamper is not None:
            blob = self._tamper(entry.name, blob)
        return LoadedShard(
            name=entry.name,
            tokens=np.frombuffer(blob, dtype=np.uint8),
            shard_hash=xxhash.xxh3_64_intdigest(blob),
            manifest_hash=entry.xxh3_64,
        )

    def rows(self, parts: Sequence[Part]) -> npt.NDArray[np.int64]:
        """Token ids of a batch, int64 [batch, seq_len + 1]."""
        size = sum(len(part.samples) for part in parts)
        out = np.empty((size, self._data.seq_len + 1), dtype=np.int64)
        for part in parts:
            out[list(part.positions)] = self._samples(self.shard(part.shard).tokens, part.samples)
        return out

    def heldout(self, samples: int) -> npt.NDArray[np.int64]:
        """Up to `samples` samples spread over the held-out shards, int64 [samples, seq_len + 1]; always the same."""
        per_shard, shards = self._data.samples_per_shard, self._data.heldout_shards
        chosen = sorted(permutation(per_shard * shards, _CORPUS_SEED, _HELDOUT)[:samples])
        return np.stack(
            [self._samples(self.shard(self._data.shards + i // per_shard).tokens, (i % per_shard,))[0] for i in chosen]
        )

    def _samples(self, tokens: Tokens, samples: Sequence[int]) -> npt.NDArray[np.int64]:
        starts = np.asarray(samples, dtype=np.int64)[:, None] * self._data.seq_len
        picked: npt.NDArray[np.int64] = tokens[starts + np.arange(self._data.seq_len + 1)].astype(np.int64)
        return picked


def describe(manifest: Manifest) -> Mapping[str, object]:
    """A short summary for logs."""
    return {
        "shards": len(manifest.shards),
        "bytes": sum(entry.stop - entry.start for entry in manifest.shards),
        "python": manifest.python,
    }
