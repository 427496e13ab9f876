"""JSON that somebody else may have written: a run folder can come from anywhere."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Like `json.loads`, but every text that is no JSON of ours is a ValueError, one nested too deeply as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("expected JSON of a few levels, met brackets nested too deeply") from None
