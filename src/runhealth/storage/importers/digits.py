"""Lines that differ from a known one in their digits only, found and read many at a time.

The digits of a chunk are taken out of it. Lines whose rest (the skeleton) is the same, with runs of digits at the same
places, have the same shape. What the format's own rules found in one of them, the numbers at known places, is then read
out of all of them with array operations. The result is what `values.to_number` gives for each: a decimal whose digits
fit into 53 bits, times or over a power of ten up to 22, is rounded once and so rounded correctly (W. D. Clinger, How
to read floating point numbers accurately, 1990); any other is left to `float`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runhealth.storage.blocks import Bools, Floats, Ints

MAX_RUN = 18  # digits that fit into 63 bits
_DIGITS = b"0123456789"
_RUN = re.compile(rb"[0-9]+")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)(?P<point>\.?)(?P<part>\d*)(?:[eE](?P<expsign>[-+]?)(?P<exp>\d+))?\Z", re.A
)
_CONSTANT = re.compile(r"[-+]?(?:nan|inf(?:inity)?)\Z", re.I)
_POWERS = 10.0 ** np.arange(23)
_WHOLE_POWERS = 10 ** np.arange(MAX_RUN + 1, dtype=np.int64)
_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Where the parts of a number are: indices of digit runs within the line, None where a part has none. A number
    without digits (`nan`) has a `constant` value. `is_int`: `to_number` gives an int."""

    negative: bool = False
    whole: int | None = None
    part: int | None = None
    exponent: int | None = None
    exponent_negative: bool = False
    is_int: bool = False
    constant: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What lines have in common: the text without its digits, the places of the K runs of digits in it, and the runs
    that are the same in all lines."""

    skeleton: bytes
    places: Ints  # (K,)
    fixed: tuple[tuple[int, bytes], ...]
    no_leading_zero: tuple[int, ...]  # runs that JSON would refuse with a leading zero


class Chunk:
    """Whole lines, each with its line end, and where their digits are."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._bytes = np.frombuffer(data, np.uint8)
        digit = (self._bytes - np.uint8(48)) < 10
        edges = np.flatnonzero(digit[1:] != digit[:-1]) + 1
        if digit[0]:
            edges = np.concatenate(([0], edges))
        self._starts, self._ends = np.ascontiguousarray(edges[0::2]), np.ascontiguousarray(edges[1::2])
        newlines = np.flatnonzero(self._bytes == 10)
        self.line_starts = np.concatenate(([0], newlines + 1))  # (n + 1,)
        self._first_run = np.searchsorted(self._starts, self.line_starts)  # (n + 1,)
        before = np.concatenate(([0], np.cumsum(self._ends - self._starts)))  # digits before each run
        self._skeleton = data.translate(None, _DIGITS)
        self._skeleton_bytes = np.frombuffer(self._skeleton, np.uint8)
        self._skeleton_starts = self.line_starts - before[self._first_run]
        self._places = self._starts - before[:-1]

    def __len__(self) -> int:
        return len(self.line_starts) - 1

    def raw(self, line: int) -> bytes:
        """The line without its line end."""
        return self.data[self.line_starts[line] : self.line_starts[line + 1] - 1]

    def skeleton(self, line: int) -> bytes:
        """The line without digits, with its line end."""
        return self._skeleton[self._skeleton_starts[line] : self._skeleton_starts[line + 1]]

    def fitting(self, shape: Shape, lines: Ints) -> Ints:
        """Those of `lines` (ascending) that have this shape."""
        length, runs = len(shape.skeleton), len(shape.places)
        begins = self._skeleton_starts[lines]
        fits = self._skeleton_starts[lines + 1] - begins == length
        fits &= self._first_run[lines + 1] - self._first_run[lines] == runs
        lines, begins = lines[fits], begins[fits]
        if not len(lines):
            return lines
        wanted = np.frombuffer(shape.skeleton, np.uint8)
        if begins[-1] - begins[0] == length * (len(lines) - 1):  # one after the other
            text = self._skeleton_bytes[begins[0] : begins[0] + length * len(lines)].reshape(-1, length)
        else:
            text = self._skeleton_bytes[begins[:, None] + np.arange(length)]
        fits = (text == wanted).all(axis=1)
        lines, begins = lines[fits], begins[fits]
        if not len(lines):
            return lines
        at = self._runs(lines, runs)
        fits = (self._places[at] - begins[:, None] == shape.places).all(axis=1)
        starts = self._starts[at]
        widths = self._ends[at] - starts
        fits &= (widths <= MAX_RUN).all(axis=1)
        for run, digits in shape.fixed:
            fits &= widths[:, run] == len(digits)
            for place, digit in enumerate(digits):
                # A run that is too short is already out; its index may lie behind the last byte.
                fits &= self._bytes.take(starts[:, run] + place, mode="clip") == digit
        for run in shape.no_leading_zero:
            fits &= (widths[:, run] == 1) | (self._bytes[starts[:, run]] != 48)
        found: Ints = lines[fits]
        return found

    def _runs(self, lines: Ints, runs: int) -> Ints:
        at: Ints = self._first_run[lines][:, None] + np.arange(runs)
        return at

    def whole(self, lines: Ints, run: int) -> tuple[Ints, Ints]:
        """The value and the width of one run in each line."""
        at = self._first_run[lines] + run
        starts, ends = self._starts[at], self._ends[at]
        widths = ends - starts
        values = np.zeros(len(lines), np.int64)
        least, most = int(widths.min()), int(widths.max())
        for place in range(most):
            digits = self._bytes[starts + place if place < least else np.minimum(starts + place, ends - 1)] - 48
            longer = values * 10 + digits
            values = longer if place < least else np.where(place < widths, longer, values)
        return values, widths

    def numbers(self, lines: Ints, number: Number) -> Ints | Floats:
        """The value of a number in each line: int64 if it is one, else float64."""
        if number.constant is not None:
            return np.full(len(lines), number.constant)
        if number.is_int:
            assert number.whole is not None
            whole, _ = self.whole(lines, number.whole)
            return -whole if number.negative else whole
        zero = np.zeros(len(lines), np.int64)
        mantissa, digits = self.whole(lines, number.whole) if number.whole is not None else (zero, zero)
        power = zero
        if number.part is not None:
            part, width = self.whole(lines, number.part)
            digits = digits + width
            mantissa = mantissa * _WHOLE_POWERS[width] + part  # may overflow where there are more than 18 digits
            power = -width
        if number.exponent is not None:
            exponent, _ = self.whole(lines, number.exponent)
            exponent = np.minimum(exponent, 9999)
            power = power - exponent if number.exponent_negative else power + exponent
        exact = (digits <= MAX_RUN) & (mantissa <= _EXACT) & (power >= -22) & (power <= 22)
        values: Floats = mantissa.astype(np.float64)
        scale = _POWERS[np.minimum(np.abs(power), 22)]
        values = np.where(power < 0, values / scale, values * scale)
        if not exact.all():
            self._slowly(values, np.flatnonzero(~exact), lines, number)
        return -values if number.negative else values

    def _slowly(self, values: Floats, which: Ints, lines: Ints, number: Number) -> None:
        """Fill in the values that are not exact, without their sign."""
        parts = [run for run in (number.whole, number.part, number.exponent) if run is not None]
        first, last = self._first_run[lines[which]] + min(parts), self._first_run[lines[which]] + max(parts)
        # A number without digits before or behind its point: the point is beside the run.
        begins = self._starts[first] - (number.whole is None)
        ends = self._ends[last]
        data = self.data
        values[which] = [float(data[a:b]) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]

    def stamps(self, lines: Ints, first: int, fraction: bool) -> tuple[Ints, Bools]:
        """Nanoseconds since 1970 from six runs (year to second, read as UTC) and one more for the fraction, and where
        they are a date from 1970 to 2199 as `values.to_ts_ns` reads it."""
        read = [self.whole(lines, first + place) for place in range(6)]
        year, month, day, hour, minute, second = (values for values, _ in read)
        good = (year >= 1970) & (year < 2200) & (month >= 1) & (month <= 12) & (hour < 24) & (minute < 60)
        good &= (second < 60) & (day >= 1)
        for place, (_, width) in enumerate(read):
            good &= width == (2 if place else 4)
        year, month = np.where(good, year, 1970), np.where(good, month, 1)
        months = ((year - 1970) * 12 + month - 1).astype("datetime64[M]")
        begin = months.astype("datetime64[D]")
        good &= day <= ((months + 1).astype("datetime64[D]") - begin).astype(np.int64)
        seconds = ((begin.astype(np.int64) + day - 1) * 24 + hour) * 3600 + minute * 60 + second
        micros = seconds * 1_000_000
        if fraction:
            part, width = self.whole(lines, first + 6)
            good &= (width == 3) | (width == 6)
            micros = micros + part * np.where(width == 3, 1000, 1)
        # The way over a double loses what `to_ts_ns` loses.
        return (micros / 1e6 * 1e6).astype(np.int64) * 1000, good


def shape_of(
    raw: bytes, free: Sequence[tuple[int, int]], numbers: Sequence[tuple[int, int]], *, json: bool = False
) -> Shape | None:
    """The shape of a line (without its line end), whose digits may vary within the spans `free` and `numbers`."""
    runs = [match.span() for match in _RUN.finditer(raw)]
    if any(end - start > MAX_RUN for start, end in runs):
        return None
    places, before = [], 0
    for start, end in runs:
        places.append(start - before)
        before += end - start
    spans = [*free, *numbers]
    fixed = tuple(
        (index, raw[start:end])
        for index, (start, end) in enumerate(runs)
        if not any(left <= start and end <= right for left, right in spans)
    )
    leading: tuple[int, ...] = ()
    if json:
        begins = {start + (raw[start : start + 1] == b"-") for start, _ in numbers}
        leading = tuple(index for index, (start, _) in enumerate(runs) if start in begins)
    return Shape(
        skeleton=raw.translate(None, _DIGITS) + b"\n",
        places=np.array(places, np.int64),
        fixed=fixed,
        no_leading_zero=leading,
    )


def number_at(raw: bytes, start: int, end: int) -> Number | None:
    """How to read the number at a place of a line; None if it is none, or written in a way that arrays do not read."""
    text = raw[start:end].decode("ascii", "replace")
    if _CONSTANT.match(text):
        return Number(constant=float(text))
    match = _NUMBER.match(text)
    if match is None or not (match["whole"] or match["part"]):
        return None
    run = len(_RUN.findall(raw[:start]))
    if start and raw[start - 1 : start].isdigit():
        return None
    parts: dict[str, int | None] = {}
    for name in ("whole", "part", "exp"):
        parts[name] = run if match[name] else None
        run += bool(match[name])
    return Number(
        negative=match["sign"] == "-",
        whole=parts["whole"],
        part=parts["part"],
        exponent=parts["exp"],
        exponent_negative=match["expsign"] == "-",
        is_int=not match["point"] and match["exp"] is None,
    )
