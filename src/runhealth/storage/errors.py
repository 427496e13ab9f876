"""The one exception tree of runhealth.

Each error is also a subclass of the builtin that a caller would expect, and its message says what was expected, what
was met, and where.
"""


class RunhealthError(Exception):
    """Base of every error that runhealth raises on purpose."""


class RunNotFoundError(RunhealthError, LookupError):
    """No run of this name in the store; `nearest` holds similar names."""

    def __init__(self, message: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest


class AmbiguousRunError(RunhealthError, LookupError):
    """A prefix that fits more than one run."""


class StoreError(RunhealthError, OSError):
    """The store cannot be read or written: a permission, a full disk, a foreign folder."""


class CorruptDataError(RunhealthError, ValueError):
    """Bytes that fail their checksum or do not follow the format."""


class NoUsableDataError(RunhealthError, ValueError):
    """A file was read, but holds nothing that can be diagnosed."""


class UnknownFormatError(NoUsableDataError):
    """No importer recognised the file."""


class PlanError(RunhealthError, ValueError):
    """A rollback plan that is malformed, or whose preconditions do not hold."""


class ReplayError(RunhealthError, ValueError):
    """An incident that cannot be replayed, or a replay that failed; the message says why."""


class CheckpointError(RunhealthError, RuntimeError):
    """A checkpoint that is missing, incomplete or fails verification."""


class ConfigError(RunhealthError, ValueError):
    """A configuration that cannot work; raised before anything starts."""


class MissingExtraError(RunhealthError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""
