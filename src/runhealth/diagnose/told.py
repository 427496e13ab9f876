"""What a watch has told already, kept between its calls: an incident fires its hook once, and again when it changes."""

import hashlib
import json
import os
import sys
from pathlib import Path

from runhealth.diagnose.findings import Finding
from runhealth.diagnose.report.output import OutputError, write_output
from runhealth.storage.jsontext import parse_json

VERSION = 1
NEW, CHANGED = "new", "changed"


class Told:
    """Findings by id, with what makes a change worth a message. `path`: a JSON file; it is created when needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._gists: dict[str, list[str]] = {}
        self._warned = False
        self._load()

    def change(self, finding: Finding) -> str | None:
        """`new`, `changed`, or None if this was told."""
        before = self._gists.get(finding.id)
        if before is None:
            return NEW
        return CHANGED if before != gist(finding) else None

    def add(self, finding: Finding) -> None:
        self._gists[finding.id] = gist(finding)

    def save(self) -> None:
        """A place that cannot be written is reported once; the watch goes on and may repeat itself next time."""
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            write_output(json.dumps({"version": VERSION, "told": self._gists}, indent=1) + "\n", self._path)
        except (OutputError, OSError) as error:
            if not self._warned:
                print(f"diagnose: what was told cannot be kept for the next call: {error}", file=sys.stderr)
            self._warned = True

    def _load(self) -> None:
        try:
            body = parse_json(Path(self._path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            print(f"diagnose: {self._path} cannot be read, everything is told anew: {error}", file=sys.stderr)
            return
        told = body.get("told") if isinstance(body, dict) and body.get("version") == VERSION else None
        if isinstance(told, dict):
            self._gists = {str(name): [str(part) for part in parts] for name, parts in told.items() if parts}


def gist(finding: Finding) -> list[str]:
    """Not every digit."""
    return [finding.kind, finding.severity.value, finding.outcome.value, finding.verdict]


def state_path(run_folder: str | None, identity: str, hook: str | None) -> str:
    """Where a watch keeps what it has told: beside a run that can be written, else in the user's state folder. Each
    hook has a file of its own, so that two of them are both told everything."""
    if run_folder is not None and os.access(run_folder, os.W_OK):
        return str(Path(run_folder) / "watch" / f"{_short(hook or '')}.json")
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "runhealth" / "watch" / f"{_short(identity + chr(0) + (hook or ''))}.json")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
