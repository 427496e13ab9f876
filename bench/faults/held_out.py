"""The kinds of run that are in the report alone (see `kinds.py` for what that means and who writes them)."""

from bench.faults.kind import Kind

KINDS: tuple[Kind, ...] = ()
