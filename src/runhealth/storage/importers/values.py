"""Reading numbers, steps and times out of other people's text."""

import math
import re
from datetime import UTC, datetime

from runhealth.storage.records import Scalar

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\Z")
_MAX_STEP = 2**62
_MAX_DIGITS = 400  # longer than any double in plain notation


def to_number(value: object) -> Scalar | None:
    """A number from a number or from its text ('nan', 'Infinity', '1,234', '3.0e-4'); None for anything else.

    Integers beyond 64 bits become doubles, infinite if need be.
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[return-value]
    if kind is str:
        return _from_text(value)  # type: ignore[arg-type]
    if isinstance(value, int):
        return int(value) if -_MAX_STEP < value < _MAX_STEP else _as_double(value)
    return float(value) if isinstance(value, float) else None


def _from_text(text: str) -> Scalar | None:
    if text.isdecimal() and len(text) < 19:
        return int(text)
    if "." in text and len(text) < _MAX_DIGITS:
        try:
            if "_" not in text:
                return float(text)
        except ValueError:
            pass
    text = text.strip()
    if not text or len(text) > _MAX_DIGITS or "_" in text:
        return None
    if "," in text:
        if not _GROUPED.match(text):
            return None
        text = text.replace(",", "")
    try:
        return to_number(int(text)) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return None


def _as_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def to_step(value: object) -> int | None:
    """A step number: a whole number from 0 to 2**62; None for anything else."""
    number = to_number(value)
    if number is None:
        return None
    if isinstance(number, float):
        if not math.isfinite(number) or number != int(number):
            return None
        number = int(number)
    return number if 0 <= number < _MAX_STEP else None


def checked_ns(ts_ns: int) -> int:
    """The time, or 0 if it lies before 1970 or after 2262, where 64 bits end."""
    return ts_ns if 0 <= ts_ns < 2**63 else 0


def to_ts_ns(value: object) -> int:
    """Nanoseconds since 1970 from an ISO time (naive ones are read as UTC) or from seconds, milliseconds,
    microseconds or nanoseconds since 1970; 0 if it is neither."""
    number = to_number(value)
    if number is not None:
        if not math.isfinite(number) or number < 1e8:
            return 0
        for limit, factor in ((1e11, 10**9), (1e14, 10**6), (1e17, 10**3), (1e20, 1)):
            if number < limit:
                return checked_ns(int(number * factor))
        return 0
    if not isinstance(value, str) or not 10 <= len(value) <= 40:
        return 0
    try:
        moment = datetime.fromisoformat(value.strip().replace(",", "."))
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    try:
        return checked_ns(int(moment.timestamp() * 1e6) * 1000)
    except (OverflowError, OSError):
        return 0
