"""WebDataset tar: a block is a run of samples up to about 4 MiB; a .tar.gz shard is one block.

A sample is the run of members that share a key: the path up to the first dot of the file's name.
The rest of the name, in lower case, is the field. Directories, names without a dot or that start
with one, and names in double underscores are skipped, as the webdataset library does. A shard in
which the members of a key are not adjacent is refused.

Schema: `__key__`, then the fields of the shard in the order of occurrence, images of several
extensions as one column (see FieldSurvey). cls, cls2, index, inx and id are int64 where all values
in the first 4 MiB are integers (else string); txt, text, transcript, json and jsn are string; all
others binary. A field that a sample lacks is null.

Source:  https://github.com/webdataset/webdataset (tariterators.py)
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.base.suffixes import BY_FORMAT
from dataplane.formats.arrays import bytes_column, primitive_column
from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.conform import batch_of, check_columns, check_rows, mismatch
from dataplane.formats.faults import corrupt, require_bytes
from dataplane.formats.joint_types import inferred_schema
from dataplane.formats.source import (
    BLOCK_BYTES,
    ByteSource,
    Inflated,
    Memory,
    Window,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.formats.tarheader import TarMember, members
from dataplane.model.errors import SchemaMismatch
from dataplane.model.joined import KEY
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

# The fields of the samples of a tar shard, and the columns in which they are read.
#
# Image members that differ only in their extension (`a.jpg`, `b.jpeg`, `c.png`) form one column,
# unless a sample of the shard has two of them. The column is named after the field that occurs
# first. Its metadata lists the fields, so that other shards are read in the same way.

FIELDS_MAX = 1024
# Two keys rarely have the same hash, so a few hashes suffice.
_HASHES_MAX = 64
EXTENSIONS = b"dataplane.extensions"

# The image format of each extension. If two members of a sample have the same format, neither can
# be a mask of the other.
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpeg"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "pnm"),
    **{name: name for name in ("png", "webp", "avif", "gif", "bmp", "jp2")},
}
_MARKS = {"jpeg": b"\xff\xd8", "png": b"\x89PNG"}


class Sample(Struct, frozen=True):
    """The members with one key, by field."""

    key: str
    fields: dict[str, TarMember]
    start: int
    end: int


class FieldSurvey:
    """Collects the fields of the samples of a shard. It takes 12 bytes per sample, and twice that
    while `scattered` compares them.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers: dict[str, int] = {}
        # Sets of fields, as bits, in order of first occurrence, and the number of samples of each.
        self._sets: dict[int, int] = {}
        self._counts: list[int] = []
        self._keys, self._set_of = array("q"), array("I")

    def note(self, sample: Sample) -> None:
        """Note a sample.

        Raises:  CorruptShard: there are very many fields.
        """
        bits = 0
        for field, member in sample.fields.items():
            number = self._numbers.setdefault(field, len(self._numbers))
            if number >= FIELDS_MAX:
                raise corrupt(
                    self._url,
                    member.start,
                    f"member {member.name!r}: the samples of the shard have more than {FIELDS_MAX} "
                    "fields. A key ends at the first dot of a file's name, and the rest is the "
                    "field: write keys without dots",
                )
            bits |= 1 << number
        place = self._sets.setdefault(bits, len(self._sets))
        if place == len(self._counts):
            self._counts.append(0)
        self._counts[place] += 1
        self._keys.append(hash(sample.key))
        self._set_of.append(place)

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of each column; a column has the name of its first field."""
        return {fields[0]: fields for fields in self._columns()}

    def _columns(self) -> list[tuple[str, ...]]:
        kinds: dict[tuple[str, str], list[str]] = {}
        groups: dict[tuple[str, str], list[str]] = {}
        for field in self._numbers:
            prefix, kind = _image_kind(field)
            kinds.setdefault((prefix, kind or field), []).append(field)
            groups.setdefault((prefix, "" if kind else field), []).append(field)
        columns = []
        for group in groups.values():
            if self._are_apart(group):
                columns.append(tuple(group))
                continue
            for field in group:
                prefix, kind = _image_kind(field)
                alike = kinds[prefix, kind or field]
                if not self._are_apart(alike):
                    columns.append((field,))
                elif field == alike[0]:
                    columns.append(tuple(alike))
        return sorted(columns, key=lambda fields: self._numbers[fields[0]])

    def _are_apart(self, fields: Sequence[str]) -> bool:
        """Return whether no sample has two of these fields."""
        bits = sum(1 << self._numbers[field] for field in fields)
        return all((fields_of_set & bits).bit_count() <= 1 for fields_of_set in self._sets)

    def count(self, fields: Iterable[str]) -> int:
        """Count the samples that have one of these fields."""
        bits = sum(1 << self._numbers[field] for field in fields)
        sets = zip(self._sets, self._counts, strict=True)
        return sum(count for fields_of_set, count in sets if fields_of_set & bits)

    def scattered(self) -> frozenset[int]:
        """Return the hashes of some keys that occur again with other fields: samples whose members
        are not adjacent. A key that occurs again with the same fields is another sample.
        """
        keys = np.frombuffer(self._keys, np.int64)
        order = np.argsort(keys, kind="stable")
        again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        if not len(again):
            return frozenset()
        set_of = np.frombuffer(self._set_of, np.uint32)
        pairs = np.stack([set_of[order[again]], set_of[order[again + 1]]], 1)
        sets = list(self._sets)
        disjoint = {(a, b) for a, b in np.unique(pairs, axis=0).tolist() if not sets[a] & sets[b]}
        halves = [
            order[at + 1] for at, pair in zip(again, pairs.tolist(), strict=True)
            if tuple(pair) in disjoint
        ]  # fmt: skip
        return frozenset(keys[sorted(halves)[:_HASHES_MAX]].tolist())


def refuse_scattered(url: str, samples: Iterable[Sample], hashes: frozenset[int]) -> None:
    """Refuse a shard in which a key with one of these hashes occurs twice, with other fields.

    Raises:  CorruptShard: names the members and what to do.
    """
    by_key: dict[str, Sample] = {}
    for sample in samples:
        if hash(sample.key) not in hashes:
            continue
        before = by_key.setdefault(sample.key, sample)
        if before is not sample and before.fields.keys().isdisjoint(sample.fields):
            first, other = (next(iter(s.fields.values())) for s in (before, sample))
            raise corrupt(
                url,
                other.start,
                f"the members of sample {sample.key!r} do not follow one another: {first.name!r} "
                f"is at byte {first.start} and {other.name!r} at byte {other.start}, with other "
                "samples between them, and each would be half a sample; write the archive in the "
                "order of names, with `tar --sort=name -cf SHARD.tar FOLDER`, or `ls | sort -V | "
                "tar -cf SHARD.tar -T -`",
            )
        by_key[sample.key] = sample


def image_groups(fields: Iterable[str]) -> list[list[str]]:
    """Return the fields that differ only in being images of several extensions, in groups."""
    groups: dict[str, list[str]] = {}
    for field in fields:
        prefix, kind = _image_kind(field)
        if kind:
            groups.setdefault(prefix, []).append(field)
    return [group for group in groups.values() if len(group) > 1]


def fields_of(column: pa.Field) -> list[str]:
    """Return the fields that make up a column; its own name comes first."""
    noted = json.loads((column.metadata or {}).get(EXTENSIONS, b"[]"))
    return [column.name, *(field for field in noted if field != column.name)]


def field_of(content: bytes, fields: Sequence[str]) -> str:
    """Return the first of a column's fields that is for images of this kind, else its name."""
    is_webp = content[:4] == b"RIFF" and content[8:12] == b"WEBP"
    kind = next((kind for kind, mark in _MARKS.items() if content.startswith(mark)), "")
    kind = "webp" if is_webp else kind
    return next((field for field in fields if kind and _image_kind(field)[1] == kind), fields[0])


def _image_kind(field: str) -> tuple[str, str]:
    """Split a field into the part before its extension and its kind of image; "" for other
    fields.
    """
    prefix, dot, extension = field.rpartition(".")
    return prefix + dot, _KINDS.get(extension, "")


def with_fields(schema: pa.Schema, columns: Mapping[str, Sequence[str]]) -> pa.Schema:
    """Return the schema, with the list of fields noted on columns that have several."""
    for name, fields in columns.items():
        if len(fields) > 1:
            at = schema.get_field_index(name)
            noted = schema.field(at).with_metadata({EXTENSIONS: json.dumps(fields)})
            schema = schema.set(at, noted)
    return schema


def column_of(schema: pa.Schema, field: str) -> tuple[str, bool]:
    """Return the image column to which a field belongs, and whether the column has images of the
    same kind; "" if no column or several columns fit.
    """
    prefix, kind = _image_kind(field)
    kinds = dict[str, set[str]]()
    for column in schema if kind else ():
        noted = json.loads((column.metadata or {}).get(EXTENSIONS, b"[]"))
        of = {_image_kind(name) for name in noted or [column.name]}
        if {before for before, has in of if has} == {prefix}:
            kinds[column.name] = {has for _, has in of}
    same = [name for name, has in kinds.items() if kind in has]
    if len(same) == 1 or len(kinds) == 1:
        return (same or list(kinds))[0], bool(same)
    return "", False


class FieldReader:
    """Maps the fields of a shard's samples to `columns`, according to the dataset's schema."""

    def __init__(self, url: str, schema: pa.Schema, columns: Sequence[str]) -> None:
        self._url, self._schema = url, schema
        self._known, self._columns = frozenset(schema.names), frozenset(columns)
        self._reads_all = len(self._columns) == len(self._known)
        self._elsewhere: dict[str, tuple[str, bool]] = {}

    def fields_of(self, sample: Sample) -> dict[str, TarMember]:
        """Return the members of a sample by column.

        Raises:  SchemaMismatch: a member is in no column, so the job would miss it.
        """
        if sample.fields.keys() <= self._known:
            return sample.fields
        by_column = {name: member for name, member in sample.fields.items() if name in self._known}
        others = [(*self._column_of(field), field) for field in sample.fields.keys() - self._known]
        for column, _, field in sorted(others, key=lambda other: (not other[1], other[2])):
            member = sample.fields[field]
            if column and column not in by_column:
                by_column[column] = member
            elif self._reads_all:
                raise self._unknown(member, field)
        return by_column

    def _column_of(self, field: str) -> tuple[str, bool]:
        known = self._elsewhere.get(field)
        if known is None:
            known = self._elsewhere[field] = column_of(self._schema, field)
        return known

    def _unknown(self, member: TarMember, field: str) -> SchemaMismatch:
        names = ", ".join(self._schema.names)
        return mismatch(
            self._url,
            field,
            "no such field in its first shard",
            f"{member.name!r}",
            f"list a shard first that has it, or leave it out with columns=[…]: {names}",
        )


INTEGERS = frozenset({"cls", "cls2", "index", "inx", "id"})
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn"})
ROW_BYTES = 128

_NAME = re.compile(r"((?:.*/)?([^./][^./]*))\.([^/]*)", re.DOTALL)
_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,19}\s*")


class Tar:
    """The WebDataset tar format, plain and gzip."""

    name = "tar"
    suffixes = BY_FORMAT["tar"]
    index_version = 1  # raised when indexes got the fields of the whole shard, and joint images

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: one pass over the headers."""
        require_bytes(shard.url, shard.size_bytes, "tar")
        window = Window(shard)
        compressed = is_compressed(bytes(window.view(0, 4)))
        source: ByteSource = Inflated(shard) if compressed else window
        head = Memory(shard.url, source.view(0, BLOCK_BYTES), 0)
        survey, integers = FieldSurvey(shard.url), dict[str, bool]()
        blocks: list[Block] = []
        start = end = rows = 0
        for sample in samples(source, 0, None):
            if rows and not compressed and sample.end - start > BLOCK_BYTES:
                blocks.append(_block(rows, start, end))
                start, rows = sample.start, 0
            if not rows:
                start = sample.start
            rows, end = rows + 1, sample.end
            survey.note(sample)
            if not INTEGERS.isdisjoint(sample.fields):
                for field in INTEGERS & sample.fields.keys():
                    is_integer = _is_integer(head, sample.fields[field])
                    integers[field] = integers.get(field, True) and is_integer
        if hashes := survey.scattered():
            again: ByteSource = Inflated(shard) if compressed else Window(shard)
            refuse_scattered(shard.url, samples(again, 0, None), hashes)
        count = rows + sum(block.rows for block in blocks)
        if compressed and rows:
            place = Region(0, shard.size_bytes)
            blocks = [Block(rows, place, end + ROW_BYTES * rows)]
        elif rows:
            blocks.append(_block(rows, start, end))
        columns = survey.columns()
        types = {KEY: pa.string()} | {
            name: _type(name, integers=integers.get(name, False)) for name in columns
        }
        schema = with_fields(inferred_schema(types if columns else {}), columns)
        lacking = (count - survey.count(fields) for fields in columns.values())
        nulls = array("q", [NEVER, *lacking] if columns else [])
        return ShardIndex(schema, tuple(blocks), Region(0, 0), zero_copy=False, nulls=nulls)

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        check_columns(schema, columns)
        compressed = holds_compressed(block)
        source = block_source(block, compressed=compressed)
        end = None if compressed else block.place.offset + block.place.length
        stored = list(samples(source, source.base, end))
        check_rows(block.url, block.place.offset, block.rows, len(stored))
        reader = FieldReader(block.url, schema, columns)
        fields = [reader.fields_of(sample) for sample in stored]
        arrays = {
            name: _column(source, [by_column.get(name) for by_column in fields], schema.field(name))
            for name in columns
            if name != KEY
        }
        if KEY in columns:
            keys = [sample.key.encode() for sample in stored]
            arrays[KEY] = bytes_column(keys, schema.field(KEY).type)
        return batch_of(arrays, schema, columns, block)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the samples of a block begin in its bytes, and its end; None if they are
        compressed.
        """
        if holds_compressed(block):
            return None
        source, base = block_source(block, compressed=False), block.place.offset
        end = base + block.place.length
        starts = [sample.start - base for sample in samples(source, base, end)]
        return [0, *starts[1:], block.place.length]


def is_new_field(schema: pa.Schema, field: str) -> bool:
    """Return whether a field that the dataset's first shard lacks is a column of its own. In a tar
    dataset, an image with such a field may belong to an image column of the first shard; a second
    image of a sample is refused when it is read.
    """
    return schema.get_field_index(KEY) < 0 or not column_of(schema, field)[0]


def samples(source: ByteSource, at: int, end: int | None) -> Iterator[Sample]:
    """Yield the samples of an archive, or of one block of it.

    Raises:  CorruptShard: as `members`, and if a sample has one field twice.
    """
    current: Sample | None = None
    for member in members(source, at, end):
        place = _NAME.fullmatch(member.name)
        if place is None or _is_meta(place.group(2)):
            continue
        key, field = place.group(1), place.group(3).lower()
        if current is None or current.key != key:
            if current is not None:
                yield current
            current = Sample(key, {field: member}, member.start, member.end)
            continue
        if field in current.fields or field == KEY:
            raise corrupt(
                source.url,
                member.start,
                f"the sample {key!r} has the field {field!r} twice; give each sample its own key",
            )
        current = Sample(key, current.fields | {field: member}, current.start, member.end)
    if current is not None:
        yield current


def key_of(name: str) -> str:
    """Return the key of a member with this name; "" if it belongs to no sample."""
    place = _NAME.fullmatch(name)
    return "" if place is None or _is_meta(place.group(2)) else place.group(1)


def _is_meta(base: str) -> bool:
    return base.startswith("__") and base.endswith("__")


def _block(rows: int, start: int, end: int) -> Block:
    return Block(rows, Region(start, end - start), end - start + ROW_BYTES * rows)


def _is_integer(head: Memory, member: TarMember) -> bool:
    """Return whether a member's content is an integer. Content beyond the sampled bytes counts as
    an integer.
    """
    if member.size > 64:
        return False
    content = head.view(member.body, member.size)
    return len(content) < member.size or bool(_INTEGER.fullmatch(bytes(content)))


def _type(field: str, *, integers: bool) -> pa.DataType:
    if field in INTEGERS:
        return pa.int64() if integers else pa.string()
    return pa.string() if field in TEXTS else pa.binary()


def _column(source: Memory, of_rows: Sequence[TarMember | None], field: pa.Field) -> pa.Array:
    url, name = source.url, field.name
    pieces = [None if m is None else source.view(m.body, m.size) for m in of_rows]
    if not pa.types.is_int64(field.type):
        column = bytes_column(pieces, field.type)
        if pa.types.is_string(field.type):
            _check_text(column, of_rows, pieces, url)
        return column
    values = np.zeros(len(pieces), np.int64)
    valid = np.zeros(len(pieces), bool)
    for row, (member, piece) in enumerate(zip(of_rows, pieces, strict=True)):
        if member is None or piece is None:
            continue
        content = bytes(piece)
        number = int(content) if _INTEGER.fullmatch(content) else None
        if number is None or not -(1 << 63) <= number < 1 << 63:
            raise mismatch(url, name, "an integer", f"{content[:40]!r} in member {member.name!r}")
        values[row], valid[row] = number, True
    return primitive_column(values, valid, field.type)


def _check_text(
    column: pa.Array,
    of_rows: Sequence[TarMember | None],
    pieces: Sequence[memoryview | None],
    url: str,
) -> None:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for member, piece in zip(of_rows, pieces, strict=True):
            if member is not None and piece is not None:
                try:
                    bytes(piece).decode()
                except UnicodeDecodeError as fault:
                    raise corrupt(
                        url, member.body, f"member {member.name!r} is not UTF-8 text"
                    ) from fault
        raise
