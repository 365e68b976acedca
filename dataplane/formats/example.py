"""Parses tf.train.Example from its wire format, column by column.

Parsing finds the places of each feature's values; numpy then converts the values of a whole block
at once, without a Python object per value. Records in the layout that TensorFlow writes take a fast
path; all other valid records take a general one, with the same result.

Source:  https://protobuf.dev/programming-guides/encoding/ and tensorflow/core/example/feature.proto
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from numpy.typing import NDArray

from dataplane.formats.arrays import bytes_column, list_column, primitive_column
from dataplane.formats.known_names import WORD_BYTES, KnownNames

# The kinds of a feature, numbered by their fields in feature.proto.
EMPTY, BYTES, FLOATS, INTS = 0, 1, 2, 3
KIND_NAMES = {EMPTY: "no list", BYTES: "bytes_list", FLOATS: "float_list", INTS: "int64_list"}
KIND_TYPES = {BYTES: pa.binary(), FLOATS: pa.float32(), INTS: pa.int64()}

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5

Span = tuple[int, int]


class MalformedExample(ValueError):
    """The record is not a tf.train.Example."""


class Feature(NamedTuple):
    """One feature of one record: its kind, and the places of its values.

    A span of a bytes_list is one value; a span of the other two kinds is any run of whole values.
    """

    kind: int
    spans: Sequence[Span] = ()


class FeatureSpans(Struct):
    """The spans of one feature over the records of a block. `counts` has the number of spans in
    each record, or -1 where the record lacks the feature.
    """

    spans: list[Span] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


def _varint(buffer: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise MalformedExample("a varint does not end")
        byte = buffer[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _fields(buffer: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (field number, wire type, start, end) of each field of a message."""
    while at < end:
        tag, at = _varint(buffer, at, end)
        wire = tag & 7
        if wire == _LEN:
            length, at = _varint(buffer, at, end)
        elif wire == _VARINT:
            start = at
            _, at = _varint(buffer, at, end)
            length, at = at - start, start
        elif wire == _FIXED32:
            length = 4
        elif wire == _FIXED64:
            length = 8
        else:
            raise MalformedExample(f"wire type {wire}")
        if length > end - at:
            raise MalformedExample(f"a field of {length} bytes, but only {end - at} bytes are left")
        yield tag >> 3, wire, at, at + length
        at += length


def features(buffer: memoryview, start: int, end: int) -> dict[bytes, Feature]:
    """Return the features of the Example at [start, end), by name. If a name occurs twice, the last
    one counts.

    Raises:  MalformedExample.
    """
    try:
        return _usual_features(buffer, start, end)
    except (_Unusual, IndexError):
        return _any_features(buffer, start, end)


class _Unusual(Exception):
    """The record does not have TensorFlow's layout."""


def _only(buffer: memoryview, at: int, tag: int, stop: int) -> Span:
    """Return the place of the field at `at`, which must have this tag and a length."""
    if buffer[at] != tag:
        raise _Unusual
    length = buffer[at + 1]
    at += 2
    if length > 127:
        length, at = _varint(buffer, at - 1, stop)
    if length > stop - at:
        raise _Unusual
    return at, at + length


def _usual_features(buffer: memoryview, start: int, end: int) -> dict[bytes, Feature]:
    by_name: dict[bytes, Feature] = {}
    at, stop = _only(buffer, start, 0x0A, end)
    if stop != end:
        raise _Unusual
    while at < end:
        at, entry_end = _only(buffer, at, 0x0A, end)
        name_at, name_end = _only(buffer, at, 0x0A, entry_end)
        at, stop = _only(buffer, name_end, 0x12, entry_end)
        kind = buffer[at] >> 3
        at, list_end = _only(buffer, at, (kind << 3) | _LEN, stop)
        if stop != entry_end or list_end != entry_end or kind not in KIND_TYPES:
            raise _Unusual
        spans = []
        while at < entry_end:
            value_at, at = _only(buffer, at, 0x0A, entry_end)
            if kind == BYTES or at > value_at:
                spans.append((value_at, at))
                if kind == FLOATS and (at - value_at) % 4:
                    raise _Unusual
        by_name[bytes(buffer[name_at:name_end])] = Feature(kind, spans)
    return by_name


def _any_features(buffer: memoryview, start: int, end: int) -> dict[bytes, Feature]:
    by_name: dict[bytes, Feature] = {}
    for number, wire, at, stop in _fields(buffer, start, end):
        if (number, wire) != (1, _LEN):
            continue
        for inner, inner_wire, entry, entry_end in _fields(buffer, at, stop):
            if (inner, inner_wire) != (1, _LEN):
                continue
            name, value = b"", Feature(EMPTY)
            for part, part_wire, part_at, part_end in _fields(buffer, entry, entry_end):
                if part_wire == _LEN and part == 1:
                    name = bytes(buffer[part_at:part_end])
                elif part_wire == _LEN and part == 2:
                    value = _feature(buffer, part_at, part_end)
            by_name[name] = value
    return by_name


def _feature(buffer: memoryview, start: int, end: int) -> Feature:
    kind = EMPTY
    spans: list[Span] = []
    for number, wire, at, stop in _fields(buffer, start, end):
        if wire != _LEN or number not in KIND_TYPES:
            continue
        if number != kind:
            # The kind is a oneof of protobuf: if there are several kinds, the last one counts, and
            # lists of the same kind are merged.
            kind, spans = number, []
        for inner, inner_wire, value_at, value_end in _fields(buffer, at, stop):
            if inner == 1 and value_end > value_at - (kind == BYTES):
                _check_wire(kind, inner_wire, value_end - value_at)
                spans.append((value_at, value_end))
    return Feature(kind, spans)


def _check_wire(kind: int, wire: int, length: int) -> None:
    """Check a value's wire type: numbers may be packed (LEN) or single, which is equivalent."""
    alone = {BYTES: _LEN, FLOATS: _FIXED32, INTS: _VARINT}[kind]
    if wire not in {alone, _LEN} or (kind == FLOATS and length % 4):
        raise MalformedExample(f"a value of wire type {wire} in a {KIND_NAMES[kind]}")


def value_count(buffer: memoryview, feature: Feature) -> int:
    """Return how many values a feature has."""
    if feature.kind == INTS:
        return sum(
            int(np.count_nonzero(np.frombuffer(buffer[a:b], np.uint8) < 128))
            for a, b in feature.spans
        )
    if feature.kind == FLOATS:
        return sum(b - a for a, b in feature.spans) // 4
    return len(feature.spans)


def written_names(names: Iterable[bytes]) -> list[bytes]:
    """Encode names as TensorFlow writes them, with their lengths. Names of more than 127 bytes are
    left out, so `with_others` treats them as unknown.
    """
    return [bytes([len(name)]) + name for name in names if len(name) < 128]


def with_others(records: Sequence[memoryview], trailer_bytes: int, known: KnownNames) -> list[int]:
    """Return the records that have features of unknown names, or a layout other than TensorFlow's.
    Each record is followed by `trailer_bytes` bytes.
    """
    before, behind = bytes(WORD_BYTES), bytes(2 * WORD_BYTES)
    codes = np.frombuffer(b"".join([before, *records, behind]), np.uint8)
    lengths = np.fromiter(map(len, records), np.int64, len(records))
    after = WORD_BYTES + np.cumsum(lengths)
    at, end = after - lengths, after - trailer_bytes
    are_other = np.zeros(len(records), bool)
    left = np.flatnonzero(at < end)
    at, end = at[left], end[left]
    at, stop, is_usual = _delimited(codes, at, end, 0x0A)
    is_usual &= stop == end
    while True:
        are_other[left[~is_usual]] = True
        go_on = is_usual & (at < end)
        left, at, end = left[go_on], at[go_on], end[go_on]
        if not len(left):
            return np.flatnonzero(are_other).tolist()
        entry, entry_end, is_usual = _delimited(codes, at, end, 0x0A)
        _, name_end, has_name = _delimited(codes, entry, entry_end, 0x0A)
        is_usual &= has_name & (codes[name_end] == 0x12) & (known.match(codes, name_end) >= 0)
        at = entry_end


def _delimited(
    codes: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64], tag: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the start and end of the fields at these places, and which places have a field with
    this tag whose length ends before `end`. Other places get a start and end of `end`.
    """
    is_usual = codes[at] == tag
    start = at + 1
    length = np.zeros(len(at), np.int64)
    more = is_usual
    for shift in range(0, 28, 7):
        part = codes[np.minimum(start, end)]
        length += np.where(more, (part & 127).astype(np.int64) << shift, 0)
        start = start + more
        more = more & (part >= 128)
        if not more.any():
            break
    is_usual = is_usual & ~more & (start + length <= end)
    return np.where(is_usual, start, end), np.where(is_usual, start + length, end), is_usual


class Values(Struct, frozen=True):
    """One feature of a block, converted.

    Shapes:  counts: int64[records], values of each.   present: bool[records].
    """

    values: pa.Array
    counts: np.ndarray
    present: np.ndarray


def convert(buffer: memoryview, kind: pa.DataType, gathered: FeatureSpans) -> Values:
    """Convert the values of one feature over all records of a block.

    Raises:  MalformedExample: a varint that does not end with its list.
    """
    span_counts = np.array(gathered.counts, np.int64)
    present = span_counts >= 0
    pieces = [buffer[a:b] for a, b in gathered.spans]
    if pa.types.is_binary(kind):
        counts = np.where(present, span_counts, 0)
        return Values(bytes_column(pieces, kind), counts, present)
    lengths = np.fromiter((b - a for a, b in gathered.spans), np.int64, len(pieces))
    joined = np.frombuffer(b"".join(pieces), np.uint8)
    if pa.types.is_float32(kind):
        numbers, per_span = joined.view("<f4"), lengths // 4
    else:
        numbers, per_span = _varints(joined, lengths)
    totals = np.concatenate(([0], np.cumsum(per_span)))
    edges = np.concatenate(([0], np.cumsum(np.where(present, span_counts, 0))))
    counts = np.diff(totals[edges])
    return Values(primitive_column(numbers, np.ones(len(numbers), bool), kind), counts, present)


def _varints(joined: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decode concatenated varints.

    Shapes:  joined: uint8[bytes].   lengths: int64[spans].   result: int64[values], int64[spans].
    """
    last = joined < 128
    span_ends = np.cumsum(lengths)
    if len(joined) and not last[span_ends[lengths > 0] - 1].all():
        raise MalformedExample("a varint does not end with its list")
    ended = np.concatenate(([0], np.cumsum(last)))
    per_span = ended[span_ends] - ended[span_ends - lengths]
    ends = np.flatnonzero(last)
    if len(ends) == len(joined):
        return joined.astype(np.int64), per_span
    starts = np.concatenate(([0], ends[:-1] + 1))
    sizes = ends - starts + 1
    if sizes.max() > 10:
        raise MalformedExample("a varint of more than 10 bytes")
    values = (joined[starts] & 127).astype(np.uint64)
    for k in range(1, int(sizes.max())):
        longer = np.flatnonzero(sizes > k)
        bits = (joined[starts[longer] + k] & 127).astype(np.uint64) << np.uint64(7 * k)
        values[longer] |= bits
    return values.view(np.int64), per_span


def column_of(feature: Values, kind: pa.DataType) -> pa.Array:
    """Return a feature's values as a column: one list per record, or one value per record if `kind`
    is not a list. In the latter case, every count must be 0 (null) or 1.
    """
    if pa.types.is_list(kind):
        return list_column(feature.counts, feature.present, feature.values)
    valid = feature.counts == 1
    places = np.where(valid, np.cumsum(feature.counts) - 1, 0)
    return feature.values.take(pa.array(places, mask=~valid))


def gather(records: Sequence[Mapping[bytes, Feature]], name: bytes) -> FeatureSpans:
    """Collect the spans of one feature over the records of a block."""
    out = FeatureSpans()
    for record in records:
        feature = record.get(name)
        if feature is None or feature.kind == EMPTY:
            out.counts.append(-1)
        else:
            out.counts.append(len(feature.spans))
            out.spans.extend(feature.spans)
    return out
