"""Readers of other people's logs: `open_log(path)` finds the format by content and yields our records."""

from runhealth.storage.importers.open import ImportedLog, open_log

__all__ = ["ImportedLog", "open_log"]
