"""Refuse columns that cannot be in a batch, with advice, when a dataset is opened.

Some types are never possible. Facts that only the file has (encrypted pages, an unknown codec) are
marks in the field's metadata, written by the format's `index`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from dataplane.errors import ConfigError
from dataplane.formats.differing import differing

MARK = b"dataplane.unsupported"
# Months, and days with milliseconds, by Arrow's ids, which pyarrow names from 22 on. It has
# no arrays of them, unlike month_day_nano_interval.
_INTERVALS = frozenset({21, 22})
_NAMES_SHOWN = 10


def marked(schema: pa.Schema, reasons: Mapping[str, str]) -> pa.Schema:
    """Return the schema with a mark on each of these columns: name -> "is encrypted"."""
    for name, reason in reasons.items():
        at = schema.get_field_index(name)
        field = schema.field(at)
        noted = dict(field.metadata or {}) | {MARK: reason.encode()}
        schema = schema.set(at, field.with_metadata(noted))
    return schema


def unsupported(field: pa.Field) -> str:
    """Why this column cannot be in a batch, as the rest of a sentence; "" if it can."""
    return unsupported_mark(field) or unsupported_type(field.type) or _differing(field)


def unsupported_mark(field: pa.Field) -> str:
    """Return the reason given by the file's mark alone; see `unsupported`."""
    return str((field.metadata or {}).get(MARK, b""), "utf-8")


def _differing(field: pa.Field) -> str:
    """Return the reason if shards differ in this column; see `unsupported`."""
    difference = differing(field)
    if difference is None:
        return ""
    (first, second), (kind, other) = difference.shards, difference.nouns
    return f"is {kind} in shard {first} and {other} in shard {second}"


def unsupported_type(kind: pa.DataType) -> str:
    """Why values of this type cannot be in a batch, as the rest of a sentence; "" if they can."""
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
    """The columns that can be in a batch."""
    return [field.name for field in schema if not unsupported(field)]


def refusal(
    reasons: Mapping[str, str], others: Sequence[str] | None = None, url: str = ""
) -> ConfigError:
    """Return the error for requested columns: name -> reason. `others` are the columns that batches
    can have, if known.
    """
    told = ", ".join(f"column {name!r} {reason}" for name, reason in reasons.items())
    way = "select the others with columns=[…]"
    if others is not None:
        some = ", ".join(others[:_NAMES_SHOWN]) + (", …" if len(others) > _NAMES_SHOWN else "")
        way = f"{way}: {some}" if others else "there are no others"
    return ConfigError(
        f"{url}{': ' if url else ''}not supported: {told}; {way}",
        shard=url or None,
        field=next(iter(reasons)),
    )
