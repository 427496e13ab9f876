"""From one object of named values (a JSON object, a CSV line) to a row."""

from collections.abc import Iterator, Mapping

from runhealth.storage.importers.base import TRAINING, ReadContext, Row
from runhealth.storage.importers.names import Names, field_of
from runhealth.storage.importers.recipes import Span, Spots
from runhealth.storage.importers.scan import Shapes
from runhealth.storage.importers.values import to_number, to_step, to_ts_ns
from runhealth.storage.records import Scalar

_MAX_DEPTH = 6
_MAX_FIELDS = 2000
_MAX_NAMES = 10_000
_SHOWN = 12

_MAX_SHAPES = 256
_Roles = tuple[str, str, str]  # the names of step, rank and time; "" if there is none
_Places = dict[str, tuple[int, str, object]]  # field: (place in the table, foreign name, value)


class RowBuilder:
    """Finds step, rank, attempt and time among the names of a file and maps the rest.

    If the first object with a known signal has no step, the file has none: its rows are then numbered, by epoch if
    there is one, and the reading says so.
    """

    def __init__(self, context: ReadContext, names: Names) -> None:
        self._tally = context.tally
        self._names = names
        self._fixed = {
            context.mapping[key]: (key, -1) for key in ("step", "rank", "attempt", "ts") if key in context.mapping
        }
        self._kinds: dict[str, tuple[str, int] | None] = {}
        self._counting: str | None = None  # "" once a step was seen, else "epoch" or "row"
        self._count = 0
        self._texts: dict[str, None] = {}
        self._roles: dict[tuple[str, ...], _Roles] = {}

    def row(self, line: int, entry: Mapping[str, object]) -> Row | None:
        """A row, or None with the rejection noted."""
        keys = tuple(entry)
        roles = self._roles.get(keys)
        if roles is not None and (quick := self._quick(line, entry, roles)) is not None:
            return quick
        row = self._slow(line, entry)
        if row is not None and roles is None and len(self._roles) < _MAX_SHAPES:
            self._learn(keys)
        return row

    def learn(self, shapes: Shapes, places: Mapping[str, Span], row: Row, *, json: bool = False) -> None:
        """Remember the shape of the line that gave `row`; `places` are those of all its values."""
        roles: dict[str, str] = {}
        for name in places:
            kind = self._kind(name)
            if kind is not None:
                if kind[0] in roles or kind[0] not in ("step", "ts"):
                    return
                roles[kind[0]] = name
        if "step" not in roles or self._counting != "" or row.ranked or row.series is not TRAINING:
            return
        fields = [(name, *places[name]) for name in places if name not in roles.values()]
        if not 0 < len(fields) <= _MAX_FIELDS:
            return
        time = places[roles["ts"]] if "ts" in roles else None
        spots = Spots(step=places[roles["step"]], fields=fields, time=time, json=json)
        shapes.learn(spots, self._names.conversion(name for name, *_ in fields), row.step, row.ts_ns, row.values)

    def _quick(self, line: int, entry: Mapping[str, object], roles: _Roles) -> Row | None:
        """The row of an object whose names were met before and whose values are all plain numbers."""
        numbers: dict[str, Scalar] = {}
        for name, value in entry.items():
            kind = type(value)
            if kind is float:
                numbers[name] = value  # type: ignore[assignment]
            elif kind is str or kind is int:
                number = to_number(value)
                if number is None:
                    return None
                numbers[name] = number
            else:
                return None
        step_name, rank_name, ts_name = roles
        step = numbers.pop(step_name)
        rank: Scalar = numbers.pop(rank_name) if rank_name else 0
        if type(step) is not int or step < 0 or type(rank) is not int or rank < 0:
            return None
        ts_ns = 0
        if ts_name and not (ts_ns := to_ts_ns(numbers.pop(ts_name))):
            return None
        values, series = self._names.convert(numbers)
        return Row(line, step, values, rank, rank_name != "", series, None, None, ts_ns)

    def _learn(self, keys: tuple[str, ...]) -> None:
        """Remember objects that have one step, at most one rank and time, and no attempt among their names."""
        roles = {"step": "", "rank": "", "ts": ""}
        for name in keys:
            kind = self._kind(name)
            if kind is None:
                continue
            if roles.get(kind[0]) != "":
                return
            roles[kind[0]] = name
        if roles["step"] and self._counting == "":
            self._roles[keys] = roles["step"], roles["rank"], roles["ts"]

    def _slow(self, line: int, entry: Mapping[str, object]) -> Row | None:
        numbers: dict[str, Scalar] = {}
        places: _Places = {}
        for name, value in _flat(entry):
            try:
                kind = self._kinds[name]
            except KeyError:
                kind = self._kind(name)
            if kind is not None and value is not None and value != "":
                field, place = kind
                before = places.get(field)
                if before is None or place < before[0]:
                    places[field] = (place, name, value)
                    name, value = before[1:] if before is not None else ("", None)
            number = to_number(value)
            if number is not None:
                if len(numbers) < _MAX_FIELDS:
                    numbers[name] = number
            elif value and isinstance(value, (str, list)) and len(self._texts) < _MAX_NAMES:
                self._texts.setdefault(name, None)
        ts_ns = 0
        if "ts" in places:
            _, name, value = places["ts"]
            ts_ns = to_ts_ns(value)
            number = to_number(value)
            if not ts_ns and number is not None:
                numbers[name] = number
        values, series = self._names.convert(numbers)
        step = self._step(line, places, values)
        rank = to_step(places["rank"][2]) if "rank" in places else 0
        if rank is None:
            self._reject(line, f"expected a rank in '{places['rank'][1]}', met {places['rank'][2]!r}")
        if step is None or rank is None:
            self._tally.meet(name for name, _ in _flat(entry))
            return None
        attempt = to_step(places["attempt"][2]) if "attempt" in places else None
        return Row(
            line=line,
            step=step,
            values=values,
            rank=rank,
            ranked="rank" in places,
            series=series,
            attempt=attempt,
            ts_ns=ts_ns,
        )

    def finish(self) -> None:
        """Write the notes about names."""
        self._names.finish()
        if self._texts:
            names = list(self._texts)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            self._tally.note(f"not kept, because they hold text or lists: {', '.join(names[:_SHOWN])}{more}")

    def _kind(self, name: str) -> tuple[str, int] | None:
        if name not in self._kinds:
            if len(self._kinds) >= _MAX_NAMES:
                return None
            self._kinds[name] = self._fixed.get(name) or field_of(name)
        return self._kinds[name]

    def _step(self, line: int, places: _Places, values: Mapping[str, Scalar]) -> int | None:
        if "step" in places:
            self._counting = self._counting or ""
            _, name, raw = places["step"]
            step = to_step(raw)
            if step is None:
                self._reject(line, f"expected a whole step number in '{name}', met {raw!r}")
            return step
        if self._counting is None and any(name in values for name in ("loss", "eval_loss", "grad_norm")):
            by_epoch = to_step(values.get("epoch")) is not None
            self._counting = "epoch" if by_epoch else "row"
            used = "the epoch is used as the step" if by_epoch else "rows are numbered in the order of the file"
            self._tally.note(f"no step column: {used}")
        if self._counting == "epoch" and (epoch := to_step(values.get("epoch"))) is not None:
            return epoch
        if self._counting == "row" and values:
            self._count += 1
            return self._count - 1
        self._reject(line, "no step number in it" if values else "no number in it")
        return None

    def _reject(self, line: int, why: str) -> None:
        self._tally.rows_read += 1
        self._tally.reject(line, why)


def _flat(entry: Mapping[str, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Nested objects as `outer/inner`."""
    for name, value in entry.items():
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            yield from _flat(value, f"{prefix}{name}/", depth + 1)
        else:
            yield f"{prefix}{name}", value
