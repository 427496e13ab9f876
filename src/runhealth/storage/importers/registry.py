"""Finds the importers: every module of this folder with a constant `IMPORTER`, validated when loaded."""

import importlib
import pkgutil
import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import cast

import runhealth.storage.importers as folder
from runhealth.storage.errors import ConfigError
from runhealth.storage.importers.base import Importer

_HELPERS = frozenset(
    {
        "assemble",
        "base",
        "chunk_table",
        "clock",
        "digits",
        "failures",
        "folder",
        "follow",
        "into_store",
        "json_stream",
        "lanes",
        "linemap",
        "lines",
        "names",
        "open",
        "packing",
        "protobuf",
        "recipes",
        "registry",
        "rows",
        "scan",
        "shapes",
        "streams",
        "tables",
        "text",
        "tracks",
        "values",
    }
)
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@cache
def importers() -> Mapping[str, Importer]:
    """All importers by name. ConfigError if a module of the folder is neither a helper nor a valid importer."""
    found: dict[str, Importer] = {}
    for module in sorted(pkgutil.iter_modules(folder.__path__), key=lambda info: info.name):
        if module.name in _HELPERS:
            continue
        loaded = importlib.import_module(f"{folder.__name__}.{module.name}")
        importer = _validated(module.name, getattr(loaded, "IMPORTER", None), found)
        found[importer.name] = importer
    return MappingProxyType(found)


def _validated(module: str, importer: object, found: Mapping[str, Importer]) -> Importer:
    name = getattr(importer, "name", None)
    if importer is None or not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"importers/{module}.py: expected a constant IMPORTER with a lower-case name, met {name!r}")
    if name in found:
        raise ConfigError(f"importers/{module}.py: the name {name!r} is taken")
    for method in ("sniff", "read"):
        if not callable(getattr(importer, method, None)):
            raise ConfigError(f"importers/{module}.py: IMPORTER has no method {method}()")
    return cast(Importer, importer)
