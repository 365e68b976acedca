"""Converts values of any Arrow type to JSON, exactly.

Timestamps, dates and times are ISO 8601 with all digits of their unit, durations too ("PT1.5S");
values outside the years 1 to 9999 are an integer and a unit. A timestamp with a time zone is shown
in UTC; its zone is in the schema. Floats that JSON lacks are "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping

import pyarrow as pa

from dataplane.formats.arrays import decoded

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY_S = 86_400
_DAY_ZERO = dt.date(1970, 1, 1).toordinal()
_BYTES_SHOWN = 16
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def shown(array: pa.Array) -> list[object]:
    """Each value in its JSON form."""
    if pa.types.is_run_end_encoded(array.type):
        array = decoded(array)  # not all of them have scalars
    return [_shown(scalar) for scalar in array]


def _shown(scalar: pa.Scalar) -> object:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if isinstance(scalar, pa.UuidScalar):
        return str(scalar.as_py())
    if isinstance(kind, pa.BaseExtensionType) or _is_wrapped(kind):
        return _shown(scalar.value)
    if pa.types.is_temporal(kind):
        return _time(scalar)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind.fields]
        values = [_shown(scalar[i]) for i in range(len(names))]
        pairs = list(zip(names, values, strict=True))
        return dict(pairs) if len(set(names)) == len(names) else [list(pair) for pair in pairs]
    if pa.types.is_map(kind):
        keys, values = shown(scalar.values.field(0)), shown(scalar.values.field(1))
        return [list(pair) for pair in zip(keys, values, strict=True)]
    if pa.types.is_nested(kind):
        return shown(scalar.values)
    value = scalar.as_py()
    if isinstance(value, bytes):
        return _bytes(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _NOT_FINITE[str(value)]
    return value


def _is_wrapped(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) or pa.types.is_union(kind)
    )


def _bytes(value: bytes) -> object:
    """Text if they are UTF-8, else a length and the first bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"bytes": len(value), "hex": value[:_BYTES_SHOWN].hex()}


def _time(scalar: pa.Scalar) -> object:
    kind = scalar.type
    if kind.equals(pa.month_day_nano_interval()):
        found = scalar.as_py()
        return {"months": found.months, "days": found.days, "nanoseconds": found.nanoseconds}
    value = int(scalar.value)
    for is_kind, told in _TIMES.items():
        if is_kind(kind):
            return told(value, kind)
    return str(value)


def _timestamp(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(value, _PER_SECOND[kind.unit])
    day, second = divmod(second, _DAY_S)
    date = _iso_date(day)
    if date is None:
        return f"{value} {kind.unit}"
    return f"{date}T{_clock(second, fraction, kind.unit)}{'Z' if kind.tz else ''}"


def _date(value: int, kind: pa.DataType) -> str:
    if pa.types.is_date32(kind):
        return _iso_date(value) or f"{value} days"
    day, rest = divmod(value, 1000 * _DAY_S)
    date = _iso_date(day)
    if date is None:
        return f"{value} ms"
    return date if not rest else f"{date}T{_clock(*divmod(rest, 1000), 'ms')}"


def _time_of_day(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(value, _PER_SECOND[kind.unit])
    if not 0 <= second < _DAY_S:
        return f"{value} {kind.unit}"
    return _clock(second, fraction, kind.unit)


def _duration(value: int, kind: pa.DataType) -> str:
    second, fraction = divmod(abs(value), _PER_SECOND[kind.unit])
    return f"{'-' if value < 0 else ''}PT{second}{_fraction(fraction, kind.unit)}S"


def _iso_date(day: int) -> str | None:
    """A day, counted from 1970, as ISO 8601; None outside the range of Python's calendar."""
    ordinal = _DAY_ZERO + day
    if not 1 <= ordinal <= dt.date.max.toordinal():
        return None
    return dt.date.fromordinal(ordinal).isoformat()


def _clock(second: int, fraction: int, unit: str) -> str:
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{_fraction(fraction, unit)}"


def _fraction(fraction: int, unit: str) -> str:
    digits = len(str(_PER_SECOND[unit])) - 1
    return f".{fraction:0{digits}d}" if digits else ""


_TIMES: Mapping[Callable[[pa.DataType], bool], Callable[[int, pa.DataType], str]] = {
    pa.types.is_timestamp: _timestamp,
    pa.types.is_date: _date,
    pa.types.is_time: _time_of_day,
    pa.types.is_duration: _duration,
}
