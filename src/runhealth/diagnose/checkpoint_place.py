"""Where a run's checkpoints lie: in its folder, or below the folder or fsspec URL that its config names as their
target."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from runhealth.storage.errors import StoreError
from runhealth.storage.jsontext import parse_json
from runhealth.storage.places import is_remote, place_of

MANIFEST = "MANIFEST.json"


def target_of(run_path: Path) -> str:
    """`checkpoint.target` of the run's config; empty for the run's own folder, or where the config says nothing."""
    try:
        raw = parse_json((run_path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    config = raw.get("config") if isinstance(raw, Mapping) else None
    checkpoint = config.get("checkpoint") if isinstance(config, Mapping) else None
    target = checkpoint.get("target") if isinstance(checkpoint, Mapping) else None
    return target if isinstance(target, str) else ""


def look(run_path: Path, run_name: str, checkpoint: str) -> tuple[bool, bool, str]:
    """Whether a checkpoint (relative to where they lie) exists, whether its manifest is committed, and what is in the
    way of the answer, if something is. A path that leaves the place does not exist."""
    target = target_of(run_path)
    if not target or not is_remote(target):
        try:
            root = (Path(target.removeprefix("file://")) / run_name if target else run_path).resolve()
            folder = (root / checkpoint).resolve()
            exists = folder.is_relative_to(root) and folder != root and folder.is_dir()
            return exists, exists and (folder / MANIFEST).is_file(), ""
        except (OSError, ValueError) as error:  # a name too long, or one that no file can have
            return False, False, f"{checkpoint[:60]!r}: {error.strerror if isinstance(error, OSError) else error}"
    path = PurePosixPath(checkpoint)
    if path.is_absolute() or ".." in path.parts or not path.parts or "://" in checkpoint:
        return False, False, ""
    try:
        names = place_of(f"{target.rstrip('/')}/{run_name}/{path}").files()
    except StoreError as error:
        return False, False, str(error)
    return bool(names), MANIFEST in names, ""
