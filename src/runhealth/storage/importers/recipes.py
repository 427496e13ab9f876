"""How to read the numbers of lines of one shape, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from runhealth.storage.importers.digits import Number, Shape, number_at, shape_of

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spots:
    """Where the numbers of a line are: those of the step and of the fields, and a time stamp (date and time, in whose
    place nothing but its digits changes). What lies in `free` may be any digits. `start_ns`: the field `elapsed_s`
    counts seconds from there to the stamp. `json`: numbers with leading zeros are none."""

    step: Span
    fields: Sequence[tuple[str, int, int]]
    stamp: Span | None = None
    time: Span | None = None  # seconds, milliseconds … since 1970
    free: Sequence[Span] = ()
    start_ns: int = 0
    total: int | None = None
    ranked: bool = False
    json: bool = False

    def moved(self, places: Sequence[int]) -> "Spots | None":
        """The spots in the text whose characters `places` the text of these spots consists of; None if one is split."""

        def move(span: Span | None) -> Span | None:
            return None if span is None else (places[span[0]], places[span[1] - 1] + 1)

        spans = [self.step, *((a, b) for _, a, b in self.fields), *self.free]
        spans += [span for span in (self.stamp, self.time) if span is not None]
        if any(places[b - 1] - places[a] != b - 1 - a for a, b in spans):
            return None
        step = move(self.step)
        assert step is not None
        return Spots(
            step=step,
            fields=[(name, places[a], places[b - 1] + 1) for name, a, b in self.fields],
            stamp=move(self.stamp),
            time=move(self.time),
            free=[(places[a], places[b - 1] + 1) for a, b in self.free],
            start_ns=self.start_ns,
            total=self.total,
            ranked=self.ranked,
            json=self.json,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What becomes of the fields, in their order: the name under which a value is kept ("" for none), the factor to its
    unit, whether it is a whole number."""

    outs: tuple[str, ...]
    changed: tuple[tuple[str, float, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    step: Number
    fields: tuple[tuple[str, Number | None], ...]  # kept name; None: seconds since `start_ns`
    changed: tuple[tuple[str, float, bool], ...]
    stamp: tuple[int, bool] | None  # first run, whether there is a fraction
    time: Number | None
    start_ns: int
    total: int | None
    ranked: bool
    names: tuple[str, ...]  # the file's own, in their order


Known = tuple[Shape, Recipe | None]  # None: the line has no effect


def recipe_of(raw: bytes, spots: Spots, conversion: Conversion) -> tuple[Shape, Recipe] | None:
    step = number_at(raw, *spots.step)
    if step is None or not step.is_int or step.negative:
        return None
    if len(spots.fields) + bool(spots.start_ns) != len(conversion.outs):
        return None
    kept = [out for out in conversion.outs if out]
    if len(set(kept)) != len(kept):
        return None
    fields: list[tuple[str, Number | None]] = []
    numbers = [number_at(raw, start, end) for _, start, end in spots.fields]
    if any(number is None for number in numbers):
        return None
    if spots.start_ns:
        numbers.append(None)
    fields = [(out, number) for out, number in zip(conversion.outs, numbers, strict=True) if out]
    time = number_at(raw, *spots.time) if spots.time is not None else None
    if spots.time is not None and time is None:
        return None
    spans = [spots.step, *((a, b) for _, a, b in spots.fields)]
    free = list(spots.free)
    stamp = None
    if spots.stamp is not None:
        free.append(spots.stamp)
        first = number_at(raw, spots.stamp[0], spots.stamp[0] + 4)
        if first is None or first.whole is None:
            return None
        stamp = first.whole, any(mark in raw[spots.stamp[0] + 19 : spots.stamp[1]] for mark in b".,")
    if spots.time is not None:
        spans.append(spots.time)
    shape = shape_of(raw, free, spans, json=spots.json)
    if shape is None:
        return None
    return shape, Recipe(
        step=step,
        fields=tuple(fields),
        changed=conversion.changed,
        stamp=stamp,
        time=time,
        start_ns=spots.start_ns,
        total=spots.total,
        ranked=spots.ranked,
        names=(*(name for name, _, _ in spots.fields), *(("elapsed_s",) if spots.start_ns else ())),
    )
