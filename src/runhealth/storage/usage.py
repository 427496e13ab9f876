"""How much disk a run takes, and by what."""

from dataclasses import dataclass
from pathlib import Path

from runhealth.storage.errors import StoreError
from runhealth.storage.places import is_remote
from runhealth.storage.store import RunInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of one local run. `publisher_bytes` can be deleted at any time; it is made anew."""

    log_bytes: int = 0
    parts_bytes: int = 0
    database_bytes: int = 0
    publisher_bytes: int = 0
    checkpoint_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in self.__slots__)


_FOLDERS = {
    "log": "log_bytes", "parts": "parts_bytes", "run.duckdb": "database_bytes", ".publish": "publisher_bytes",
    "checkpoints": "checkpoint_bytes",
}  # fmt: skip


def usage(run: RunInfo) -> Usage:
    """Disk usage of a local run. Files that vanish meanwhile count nothing. Raises StoreError for a remote run."""
    if is_remote(run.path):
        raise StoreError(f"expected a local run, met {run.path}")
    sizes: dict[str, int] = {}
    for entry in Path(run.path).iterdir():
        kind = _FOLDERS.get(entry.name, "other_bytes")
        sizes[kind] = sizes.get(kind, 0) + _size(entry)
    return Usage(**sizes)


def _size(entry: Path) -> int:
    total = 0
    for file in (entry, *entry.rglob("*")) if entry.is_dir() else (entry,):
        try:
            if file.is_file():
                total += file.stat().st_size
        except OSError:
            continue
    return total
