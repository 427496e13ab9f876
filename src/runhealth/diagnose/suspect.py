"""What a suspect is, and how suspects are found and validated.

A suspect is one file in `suspects/` with a constant `SUSPECT`; other packages add theirs through the entry-point group
`runhealth.suspects`, each entry naming such a constant. Its `investigate` is a pure function of the case. It never
reads events of kind `fault_injected`: a case holds no events at all.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points

import runhealth.diagnose.suspects as folder
from runhealth.diagnose.case import Case
from runhealth.diagnose.findings import UNDETERMINED, Evidence, Missing
from runhealth.diagnose.plans import REPAIRS
from runhealth.storage.signals import lookup

ENTRY_POINTS = "runhealth.suspects"
VETO_NATS = -5.0  # a necessary signature is absent
CLIP_NATS = 3.5  # no single observation says more than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Signals a suspect looks at. Without each of `all` and one of `any` (where given) it cannot look at all; without
    those of `optional` it sees less. Layer signals carry the prefix `layer.`."""

    all: tuple[str, ...] = ()
    any: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """`kinds` are the kinds of finding it can be the cause of (empty: all). `action` is the remedy when it is
    implicated, `repairs` the kinds of repair that a plan then needs. `shown_in`: incidents in which a replay has shown
    it at work, so that it is judged whatever was recorded."""

    name: str
    title: str
    needs: Needs
    investigate: Callable[[Case], Iterable[Evidence]]
    action: str
    remedy: str
    explains: str
    repairs: tuple[str, ...] = ()
    kinds: tuple[str, ...] = field(default=())
    shown_in: frozenset[str] = frozenset()


def raw_sum(evidence: Iterable[Evidence]) -> float:
    """Sum of the weights in nats, each clipped to ±3.5 except vetoes."""
    return sum(
        e.weight_nats if e.weight_nats <= VETO_NATS else max(-CLIP_NATS, min(CLIP_NATS, e.weight_nats))
        for e in evidence
    )


def missing_signals(suspect: Suspect, case: Case) -> tuple[tuple[Missing, ...], bool]:
    """What the suspect could not look at, and whether it can look at all."""
    needs = suspect.needs
    absent = [s for s in needs.all if not case.has(s)]
    able = not absent
    if needs.any and not any(case.has(s) for s in needs.any):
        absent.extend(needs.any)
        able = False
    absent.extend(s for s in needs.optional if not case.has(s))
    return tuple(Missing(signal=s, would_tell=would_tell(s)) for s in absent), able


EXTRA_TELLS: Mapping[str, str] = {
    "shard_hash": "whether a shard is what the data manifest says",
    "shard": "which shard a batch came from",
}


def would_tell(signal: str) -> str:
    """What a signal would tell if it were recorded."""
    entry = lookup(signal.removeprefix("layer."))
    if entry is not None and entry.would_tell:
        return entry.would_tell
    return EXTRA_TELLS.get(signal, "more about this suspect")


def validate(suspect: object, where: str) -> Suspect:
    """Check a suspect when it is loaded, not when it is first needed.

    Raises:
        TypeError: not a Suspect. ValueError: a name or repair that cannot be.
    """
    if not isinstance(suspect, Suspect):
        raise TypeError(f"{where}: expected SUSPECT to be a Suspect, met {type(suspect).__name__}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", suspect.name) or suspect.name == UNDETERMINED:
        raise ValueError(f"{where}: expected a lower-case name, met {suspect.name!r}")
    if not callable(suspect.investigate):
        raise TypeError(f"{where}: expected investigate to be callable")
    unknown = set(suspect.repairs) - set(REPAIRS)
    if unknown:
        raise ValueError(f"{where}: expected repairs out of {', '.join(REPAIRS)}, met {', '.join(sorted(unknown))}")
    return suspect


@cache
def load_suspects() -> tuple[Suspect, ...]:
    """All suspects, sorted by name. A built-in module without a valid constant is an error; so is a second suspect of
    the same name."""
    found: dict[str, Suspect] = {}
    for info in pkgutil.iter_modules(folder.__path__):
        where = f"{folder.__name__}.{info.name}"
        _add(found, getattr(importlib.import_module(where), "SUSPECT", None), where)
    for entry in entry_points(group=ENTRY_POINTS):
        _add(found, entry.load(), f"entry point {entry.name} ({entry.value})")
    return tuple(found[name] for name in sorted(found))


def _add(found: dict[str, Suspect], candidate: object, where: str) -> None:
    suspect = validate(candidate, where)
    if suspect.name in found:
        raise ValueError(f"{where}: there already is a suspect {suspect.name!r}")
    found[suspect.name] = suspect
