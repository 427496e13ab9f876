"""A folder of logs: which of its files tell of the one run in it, and how they belong together.

Every file is looked at once: what no importer recognises is ignored and noted. Files that belong together are

- TensorBoard event files of one folder: read one after the other, in the order of their times;
- `trainer_state.json` of several checkpoints: the longest one, which holds the others;
- files whose names or folders name a rank (`rank_3.jsonl`, torchrun's `attempt_0/3/stderr.log`): one rank each;
- other files of one format whose steps go on where another one stops: one after the other, as attempts;
- files of different formats: one run seen twice. The longest gives the values, the others what it lacks.

A folder in which more than one run is left is refused, and the runs are named.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runhealth.storage.errors import NoUsableDataError
from runhealth.storage.importers.base import USABLE, Mark, Tally
from runhealth.storage.importers.failures import FailureReader
from runhealth.storage.importers.lines import iter_lines, looks_binary, without_ansi
from runhealth.storage.importers.mlflow import is_run_folder
from runhealth.storage.importers.open import recognise
from runhealth.storage.importers.streams import open_stream
from runhealth.storage.importers.tracks import FilePart, MlflowPart, Part, Source, Track
from runhealth.storage.records import RunEvent, StepRecord

_MAX_FILES = 5000
_MAX_DEPTH = 6
_SNIFFED_BYTES = 1 << 20
_FAILURE_BYTES = 1 << 24  # of a file without measurements: its end tells how the job failed
_SHOWN = 12
_SKIPPED_FOLDERS = frozenset({"__pycache__", "artifacts", "node_modules", "site-packages", "code"})
_NO_LOGS = frozenset(
    {".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".py", ".pyc", ".png", ".jpg", ".jpeg", ".gif", ".svg",
     ".pdf", ".yaml", ".yml", ".toml", ".md", ".sh", ".npz", ".npy", ".pkl", ".onnx", ".zip", ".tar",
     ".whl", ".so", ".lock", ".h5", ".parquet", ".arrow", ".html", ".ipynb"}
)  # fmt: skip
_INSIDE_RUN = re.compile(r"checkpoint-\d+|\d{1,5}|rank[_-]?\d+|attempt_\d+|files|node[_-]?\d+|worker[_-]?\d+")
_RANK = re.compile(r"(?:^|[^a-z])(?:global_?rank|rank|worker|process|proc|gpu)[_-]?(\d{1,5})(?!\d)", re.I)
_TORCHRUN = re.compile(r"attempt_(?P<attempt>\d+)/(?P<rank>\d+)/(?:stdout|stderr)\.log\Z")


@dataclass(slots=True)
class _Seen:
    """What one reading of a file told."""

    path: Path
    part: Part
    rows: int = 0
    attempts: int = 1
    first_step: int = -1
    last_step: int = -1
    first_ts_ns: int = 0
    signals: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    signature: int = 0


@dataclass(frozen=True, slots=True)
class FailureTrack:
    """What a file without measurements, such as stderr, tells about the end of the run."""

    path: str
    name: str
    attempt: int
    step: int
    rank: int | None
    format: str = "text"

    def records(self, tally: Tally, mapping: Mapping[str, str]) -> Iterator[RunEvent]:  # noqa: ARG002
        """One event for each thing that failed."""
        for mark in _failures(Path(self.path), tally, self.rank):
            yield RunEvent(
                attempt=self.attempt,
                step=self.step,
                rank=self.rank if self.rank is not None else mark.rank,
                kind=mark.kind,
                message=mark.message,
                data={**mark.data, "line": mark.line},
            )


def tracks_of(folder: Path, mapping: Mapping[str, str]) -> tuple[list[Source], list[str]]:
    """The tracks of the one run in a folder, and what was left out. NoUsableDataError if there is none or several."""
    seen, others = _survey(folder, mapping)
    if not seen:
        names = _listed([path.relative_to(folder).as_posix() for path in others])
        raise NoUsableDataError(
            f"{folder}: expected a folder with a log; no file in it could be read as one{f': {names}' if names else ''}"
        )
    groups: dict[Path, list[_Seen]] = defaultdict(list)
    for one in seen:
        groups[_home(one.path, folder)].append(one)
    _adopt(groups)
    if len(groups) > 1:
        raise NoUsableDataError(_several(folder, {_relative(home, folder): group for home, group in groups.items()}))
    notes: list[str] = []
    tracks: list[Source] = []
    tracks += _arrange(folder, next(iter(groups.values())), notes)
    ends, ignored = _ends(folder, others, seen)
    tracks += ends
    if ignored:
        notes.append(f"{len(ignored)} other files ignored: {_listed(ignored)}")
    if len(seen) > 1:
        notes.append(f"read together: {_listed([_relative(one.path, folder) for one in seen])}")
    return tracks, notes


def _survey(folder: Path, mapping: Mapping[str, str]) -> tuple[list[_Seen], list[Path]]:
    seen: list[_Seen] = []
    others: list[Path] = []
    met: set[str] = set()
    count = 0
    for place, folders, files in os.walk(folder):
        here = Path(place)
        depth = len(here.relative_to(folder).parts)
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and name[:1] != "." and depth < _MAX_DEPTH
        )
        if is_run_folder(here):
            folders.clear()
            files = []
            seen.append(_look(here, MlflowPart(str(here)), mapping))
        for name in sorted(files):
            path = here / name
            count += 1
            if count > _MAX_FILES:
                raise NoUsableDataError(f"{folder} holds more than {_MAX_FILES} files: give the folder of one run")
            real = os.path.realpath(path)
            if real in met or name[:1] == "." or not path.is_file():
                continue
            met.add(real)
            one = None if path.suffix.lower() in _NO_LOGS else _recognised(path, mapping)
            if one is not None and one.rows and one.signals & USABLE:
                seen.append(one)
            else:
                others.append(path)
    return [one for one in seen if one.rows], others


def _recognised(path: Path, mapping: Mapping[str, str]) -> _Seen | None:
    try:
        with open_stream(str(path)) as stream:
            importer = recognise(str(path), stream, _SNIFFED_BYTES)
        return _look(path, FilePart(str(path), importer), mapping)
    except (NoUsableDataError, OSError):
        return None


def _look(path: Path, part: Part, mapping: Mapping[str, str]) -> _Seen:
    one = _Seen(path, part)
    tally = Tally()
    for record in Track(path.name, [part]).records(tally, mapping):
        one.attempts = max(one.attempts, record.attempt + 1)
        if not isinstance(record, StepRecord):
            continue
        one.rows += 1
        if one.first_step < 0:
            one.first_step, one.first_ts_ns = record.step, record.ts_ns
        one.last_step = max(one.last_step, record.step)
        one.ranks.add(record.rank)
        if "loss" in record.values:
            one.signature = hash((one.signature, record.step, record.values["loss"]))
    one.signals = tally.signals
    return one


def _home(path: Path, folder: Path) -> Path:
    """The folder of the run that a file belongs to."""
    home = path if path.is_dir() else path.parent
    while home != folder and _INSIDE_RUN.fullmatch(home.name):
        home = home.parent
    return home


def _adopt(groups: dict[Path, list[_Seen]]) -> None:
    """Event files below a folder with a log of its own, as the Hugging Face Trainer writes them, belong to it."""
    for home in sorted(groups, key=lambda path: len(path.parts), reverse=True):
        above = next((other for other in home.parents if other in groups), None)
        if above is None:
            continue
        events_only = all(one.part.format == "tfevents" for one in groups[home])
        siblings = [other for other in groups if other != home and above in other.parents]
        if (events_only and any(one.part.format != "tfevents" for one in groups[above])) or not siblings:
            groups[above] += groups.pop(home)


def _arrange(folder: Path, group: list[_Seen], notes: list[str]) -> list[Track]:
    by_format: dict[str, list[_Seen]] = defaultdict(list)
    for one in group:
        by_format[one.part.format].append(one)
    views: list[tuple[list[_Seen], list[Track]]] = []
    for kind, files in by_format.items():
        if kind == "hf_trainer_state":
            files.sort(key=lambda one: (one.last_step, one.rows))
            if len(files) > 1:
                notes.append(f"{_relative(files[-1].path, folder)} holds what {len(files) - 1} earlier copies hold")
            views.append((files[-1:], [_track(folder, files[-1:])]))
        elif kind == "tfevents":
            files.sort(key=lambda one: (one.first_ts_ns, _natural(one.path.name)))
            views.append((files, [_track(folder, files)]))
        else:
            views.append((files, _ranks(folder, files) or [_track(folder, _chain(folder, files, notes))]))
    views.sort(key=lambda view: sum(one.rows for one in view[0]), reverse=True)
    main = views[0][0]
    tracks = list(views[0][1])
    for files, more in views[1:]:
        same = len(files) == len(main) == 1 and files[0].attempts == main[0].attempts
        tracks += more if same else [Track(track.name, track.parts, track.rank, values=False) for track in more]
        if not same:
            notes.append(f"{more[0].name}: its restarts differ from those of {tracks[0].name}, its values are not used")
    return tracks


def _track(folder: Path, files: Sequence[_Seen], rank: int | None = None) -> Track:
    return Track(_relative(files[0].path, folder), [one.part for one in files], rank)


def _ranks(folder: Path, files: Sequence[_Seen]) -> list[Track]:
    """One track for each rank that the names tell; none unless all do, and there are several."""
    by_rank: dict[int, list[_Seen]] = defaultdict(list)
    for one in files:
        rank = _rank_of(_relative(one.path, folder))
        if rank is None or one.ranks != {0}:
            return []
        by_rank[rank].append(one)
    if len(by_rank) < 2:
        return []
    return [
        _track(folder, sorted(by_rank[rank], key=lambda one: _natural(str(one.path))), rank) for rank in sorted(by_rank)
    ]


def _rank_of(name: str) -> int | None:
    match = _TORCHRUN.search(name)
    if match is not None:
        return int(match["rank"])
    found = _RANK.findall(name)
    return int(found[-1]) if found else None


def _chain(folder: Path, files: list[_Seen], notes: list[str]) -> list[_Seen]:
    """Files of one format as attempts of one run, in order; refused if they begin at the same step."""
    files.sort(key=lambda one: (one.first_step, one.last_step, _natural(one.path.name)))
    chain: list[_Seen] = []
    for one in files:
        before = chain[-1] if chain else None
        if before is not None and (one.signature, one.rows) == (before.signature, before.rows):
            notes.append(f"{_relative(one.path, folder)} is a copy of {_relative(before.path, folder)}")
            continue
        if before is not None and (one.first_step <= before.first_step or one.first_step > 2 * before.last_step + 1000):
            raise NoUsableDataError(_several(folder, {_relative(other.path, folder): [other] for other in files}))
        chain.append(one)
    return chain


def _ends(folder: Path, others: Sequence[Path], seen: Sequence[_Seen]) -> tuple[list[FailureTrack], list[str]]:
    """Files without measurements that tell how the run failed, and the names of those that do not."""
    last = max(seen, key=lambda one: (one.attempts, one.last_step))
    tracks: list[FailureTrack] = []
    ignored: list[str] = []
    for path in others:
        name = _relative(path, folder)
        rank = _rank_of(name)
        if path.suffix.lower() not in _NO_LOGS and any(_failures(path, Tally(), rank)):
            tracks.append(FailureTrack(str(path), name, last.attempts - 1, last.last_step, rank))
        else:
            ignored.append(name)
    return tracks, ignored


def _failures(path: Path, tally: Tally, rank: int | None) -> Iterator[Mark]:
    reader = FailureReader()
    try:
        with open_stream(str(path)) as stream:
            if looks_binary(stream.read(4096)):
                return
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _FAILURE_BYTES))
            for number, line, _ in iter_lines(stream, tally):
                reader.feed(without_ansi(line), number, rank)
    except (OSError, NoUsableDataError):
        return
    yield from reader.take()


def _several(folder: Path, runs: Mapping[str, Sequence[_Seen]]) -> str:
    told = [
        f"{name} (steps {min(one.first_step for one in group):,} to {max(one.last_step for one in group):,})"
        for name, group in runs.items()
    ]
    return f"{folder} holds {len(runs)} runs: {_listed(told)}; expected one: give its file or folder"


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path != folder else folder.name


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
