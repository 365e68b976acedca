"""The fields of the samples of a tar shard, and the columns in which they are read.

Images whose members differ only in their extension (`a.jpg`, `b.jpeg`, `c.png`) are one column,
unless a sample of the shard has two of them. The column's name is the field that occurs first. The
column's metadata lists the fields, so that other shards are read alike.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import SchemaMismatch
from dataplane.formats.conform import mismatch
from dataplane.formats.faults import corrupt
from dataplane.formats.tarheader import TarMember

FIELDS_MAX = 1024
# A few are enough: two keys of one hash are as rare as can be.
_HASHES_MAX = 64
EXTENSIONS = b"dataplane.extensions"

# The kind of image that each extension stands for. Members of one kind are never masks of another.
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpeg"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    **dict.fromkeys(("ppm", "pgm", "pbm", "pnm"), "pnm"),
    **{name: name for name in ("png", "webp", "avif", "gif", "bmp", "jp2")},
}


class Sample(Struct, frozen=True):
    """The members of one key, by field."""

    key: str
    fields: dict[str, TarMember]
    start: int
    end: int


class FieldSurvey:
    """Collects the fields of the samples of a shard.

    Takes 12 bytes a sample, and twice that while `scattered` compares them.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers: dict[str, int] = {}
        # Sets of fields, as bits, in the order in which they occurred; how many samples have each.
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
        """The fields of each column; the column has the name of the first."""
        return {fields[0]: fields for fields in self._columns()}

    def _columns(self) -> list[tuple[str, ...]]:
        kinds: dict[tuple[str, str], list[str]] = {}
        groups: dict[tuple[str, str], list[str]] = {}
        for field in self._numbers:
            prefix, kind = _image_kind(field)
            kinds.setdefault((prefix, kind or field), []).append(field)
            groups.setdefault((prefix, "" if kind else field), []).append(field)
        found = []
        for group in groups.values():
            if self._are_apart(group):
                found.append(tuple(group))
                continue
            for field in group:
                prefix, kind = _image_kind(field)
                alike = kinds[prefix, kind or field]
                if not self._are_apart(alike):
                    found.append((field,))
                elif field == alike[0]:
                    found.append(tuple(alike))
        return sorted(found, key=lambda fields: self._numbers[fields[0]])

    def _are_apart(self, fields: Sequence[str]) -> bool:
        """Whether no sample has two of these fields."""
        bits = sum(1 << self._numbers[field] for field in fields)
        return all((each & bits).bit_count() <= 1 for each in self._sets)

    def count(self, fields: Iterable[str]) -> int:
        """How many samples have one of these fields."""
        bits = sum(1 << self._numbers[field] for field in fields)
        sets = zip(self._sets, self._counts, strict=True)
        return sum(count for each, count in sets if each & bits)

    def scattered(self) -> frozenset[int]:
        """Return the hashes of some keys that occur again with other fields: those are samples torn
        in two. A key that occurs again with the same fields is another sample.
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
    first: dict[str, Sample] = {}
    for sample in samples:
        if hash(sample.key) not in hashes:
            continue
        before = first.setdefault(sample.key, sample)
        if before is not sample and before.fields.keys().isdisjoint(sample.fields):
            one, other = (next(iter(each.fields.values())) for each in (before, sample))
            raise corrupt(
                url,
                other.start,
                f"the members of sample {sample.key!r} do not follow one another: {one.name!r} is "
                f"at byte {one.start} and {other.name!r} at byte {other.start}, with other samples "
                "between them, and each would be half a sample; write the archive in the order of "
                "names, with `tar --sort=name -cf SHARD.tar FOLDER`, or `ls | sort -V | tar -cf "
                "SHARD.tar -T -`",
            )
        first[sample.key] = sample


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
    """Return the only column of such images, and whether it has the same kind; "" if there
    is none.
    """
    prefix, kind = _image_kind(field)
    kinds = dict[str, set[str]]()
    for column in schema if kind else ():
        noted = json.loads((column.metadata or {}).get(EXTENSIONS, b"[]"))
        of = {_image_kind(each) for each in noted or [column.name]}
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
        found = {name: each for name, each in sample.fields.items() if name in self._known}
        others = [(*self._column_of(field), field) for field in sample.fields.keys() - self._known]
        for column, is_same, field in sorted(others, key=lambda other: (not other[1], other[2])):
            member = sample.fields[field]
            if column and column not in found:
                if not is_same and column in self._columns:
                    raise self._other_kind(column, member)
                found[column] = member
            elif self._reads_all:
                raise self._unknown(member, field)
        return found

    def _column_of(self, field: str) -> tuple[str, bool]:
        known = self._elsewhere.get(field)
        if known is None:
            known = self._elsewhere[field] = column_of(self._schema, field)
        return known

    def _other_kind(self, column: str, member: TarMember) -> SchemaMismatch:
        return mismatch(
            self._url,
            column,
            f".{column} images in its first shard",
            f"{member.name!r}",
            "list a shard first that has images of all kinds, or give all of them one extension "
            "when you write the shards: they are decoded by content, whatever their names",
        )

    def _unknown(self, member: TarMember, field: str) -> SchemaMismatch:
        names = ", ".join(self._schema.names)
        return mismatch(
            self._url,
            field,
            "no such field in its first shard",
            f"{member.name!r}",
            f"list a shard first that has it, or leave it out with columns=[…]: {names}",
        )
