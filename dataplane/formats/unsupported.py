"""Refuse columns that cannot be in a batch, with advice, when a dataset is opened.

Some types are never possible. Other reasons are known only from the file (encrypted pages, an
unknown codec): the format's `index` writes them as marks into the field's metadata. Columns that
differ from shard to shard have such a mark in the dataset's schema. The mark names shards by
number, not by url, so that copies of a dataset have the same schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import pyarrow as pa
from msgspec import Struct

from dataplane.base.units import some_of
from dataplane.model.errors import ConfigError, SchemaMismatch
from dataplane.model.typed import complete

DIFFERS_MARK = b"dataplane.differs"


class Difference(Struct, frozen=True):
    """Two shards of the dataset, by number, and the column's type in each; "" where a shard lacks
    it.
    """

    shards: tuple[int, int]
    types: tuple[str, str]

    @property
    def nouns(self) -> tuple[str, str]:
        """Return both types in the words of an error message."""
        first, second = (kind or "no such column" for kind in self.types)
        return first, second


def with_difference(field: pa.Field, difference: Difference) -> pa.Field:
    """Return the field with a mark for this difference."""
    noted = dict(field.metadata or {}) | {DIFFERS_MARK: msgspec.json.encode(difference)}
    return field.with_metadata(noted)


def differing(field: pa.Field) -> Difference | None:
    """Return how the shards of a dataset differ in this column; None if they agree."""
    mark = (field.metadata or {}).get(DIFFERS_MARK)
    return None if mark is None else msgspec.json.decode(mark, type=complete(Difference))


def is_missing(field: pa.Field) -> bool:
    """Return whether shards differ in this column only because some lack it."""
    difference = differing(field)
    return difference is not None and "" in difference.types


def mismatch_of(
    name: str,
    difference: Difference,
    url_of: Callable[[int], str],
    others: Sequence[str] = (),
    also: Sequence[str] = (),
) -> SchemaMismatch:
    """Return the error for a request of a differing column. `others` are the columns that can be
    read, `also` the other columns that differ.
    """
    (first, second), (expected, second_type) = map(url_of, difference.shards), difference.nouns
    way = f", or select the others with columns=[…]: {some_of(others)}" if others else ""
    if "" in difference.types:
        way += (
            f'. To read the rows of a shard without it as nulls, pass fill_null={{"{name}": …}} or '
            'nulls="mask"'
        )
    twins = [other for other in also if other.casefold() == name.casefold() and other != name]
    if twins:
        way += f". Is {twins[0]!r} the same column? Then rename one of them"
    return SchemaMismatch(
        f"{second}: column {name!r}: {first} has {expected}, this shard has {second_type}; "
        f"rewrite one of them, or leave it out of the dataset{way}",
        shard=second,
        field=name,
        expected=expected,
        found=second_type,
    )


def refuse_unknown(names: Sequence[str], columns: Iterable[str]) -> None:
    """Refuse columns that have none of these names.

    Raises:  ConfigError: names the first of them.
    """
    unknown = next((column for column in columns if column not in names), None)
    if unknown is not None:
        have = ", ".join(names)
        raise ConfigError(f"there is no column {unknown!r}; there are {have}", field=unknown)


def refuse_differing(schema: pa.Schema, names: Sequence[str], url_of: Callable[[int], str]) -> None:
    """Refuse to read columns that differ from shard to shard.

    Raises:  SchemaMismatch: shard, field, expected, found; names both shards.
    """
    marked = {
        field.name: difference
        for field in schema
        if field.metadata and (difference := differing(field)) is not None
    }
    for name in names if marked else ():
        if name in marked:
            others = [other for other in schema.names if other not in marked]
            raise mismatch_of(name, marked[name], url_of, others, list(marked))


UNSUPPORTED_MARK = b"dataplane.unsupported"
# Arrow's type ids of intervals of months, and of days with milliseconds. pyarrow 22 and later have
# names for these types, but cannot make arrays of them, unlike month_day_nano_interval.
_INTERVALS = frozenset({21, 22})


def marked(schema: pa.Schema, reasons: Mapping[str, str]) -> pa.Schema:
    """Return the schema with a mark on each of these columns: name -> "is encrypted"."""
    for name, reason in reasons.items():
        at = schema.get_field_index(name)
        field = schema.field(at)
        noted = dict(field.metadata or {}) | {UNSUPPORTED_MARK: reason.encode()}
        schema = schema.set(at, field.with_metadata(noted))
    return schema


def unsupported(field: pa.Field) -> str:
    """Return why this column cannot be in a batch, as the rest of a sentence; "" if it can."""
    return unsupported_mark(field) or unsupported_type(field.type) or _differing(field)


def unsupported_mark(field: pa.Field) -> str:
    """Return the reason given by the file's mark alone; see `unsupported`."""
    return str((field.metadata or {}).get(UNSUPPORTED_MARK, b""), "utf-8")


def _differing(field: pa.Field) -> str:
    """Return the reason if shards differ in this column; see `unsupported`."""
    difference = differing(field)
    if difference is None:
        return ""
    (first, second), (kind, other) = difference.shards, difference.nouns
    return f"is {kind} in shard {first} and {other} in shard {second}"


def unsupported_type(kind: pa.DataType) -> str:
    """Return why this type cannot be in a batch, as the rest of a sentence; "" if it can."""
    if isinstance(kind, pa.BaseExtensionType):
        return unsupported_type(kind.storage_type)
    if kind.id in _INTERVALS:
        return f"is of type {kind}"
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return unsupported_type(kind.value_type)
    if not pa.types.is_nested(kind):
        return ""
    fields = [kind.field(i) for i in range(kind.num_fields)]
    twins = [name for name, count in Counter(field.name for field in fields).items() if count > 1]
    if twins and pa.types.is_struct(kind):
        return f"has two fields named {twins[0]!r}"
    return next(filter(None, (unsupported_type(field.type) for field in fields)), "")


def supported_names(schema: pa.Schema) -> list[str]:
    """Return the columns that can be in a batch."""
    return [field.name for field in schema if not unsupported(field)]


def refusal(
    reasons: Mapping[str, str], others: Sequence[str] | None = None, url: str = ""
) -> ConfigError:
    """Return the error for requested columns: name -> reason. `others` are the columns that batches
    can have, if known.
    """
    refused = ", ".join(f"column {name!r} {reason}" for name, reason in reasons.items())
    way = "select the others with columns=[…]"
    if others is not None:
        way = f"{way}: {some_of(others)}" if others else "there are no others"
    return ConfigError(
        f"{url}{': ' if url else ''}not supported: {refused}; {way}",
        shard=url or None,
        field=next(iter(reasons)),
    )
