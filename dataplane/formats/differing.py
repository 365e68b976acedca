"""Columns that differ from shard to shard, so that a job must leave them out.

The dataset's schema marks them in the field's metadata. The mark names shards by number, not by
url, so that copies of a dataset have the same schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa
from msgspec import Struct

from dataplane.errors import SchemaMismatch
from dataplane.typed import complete

MARK = b"dataplane.differs"
_NAMES_SHOWN = 10


class Difference(Struct, frozen=True):
    """Two shards of the dataset, by number, and the column's type in each; "" where a shard lacks
    it.
    """

    shards: tuple[int, int]
    types: tuple[str, str]

    @property
    def nouns(self) -> tuple[str, str]:
        """The types, in the words of an error message."""
        first, second = (kind or "no such column" for kind in self.types)
        return first, second


def with_difference(field: pa.Field, difference: Difference) -> pa.Field:
    """Return the field with a mark for this difference."""
    noted = dict(field.metadata or {}) | {MARK: msgspec.json.encode(difference)}
    return field.with_metadata(noted)


def differing(field: pa.Field) -> Difference | None:
    """Return how the shards of a dataset differ in this column; None if they agree."""
    mark = (field.metadata or {}).get(MARK)
    return None if mark is None else msgspec.json.decode(mark, type=complete(Difference))


def mismatch_of(
    name: str,
    difference: Difference,
    url_of: Callable[[int], str],
    others: Sequence[str] = (),
) -> SchemaMismatch:
    """Return the error for a request of a differing column. `others` are the columns that can be
    read.
    """
    (first, second), (expected, found) = map(url_of, difference.shards), difference.nouns
    some = ", ".join(others[:_NAMES_SHOWN]) + (", …" if len(others) > _NAMES_SHOWN else "")
    way = f", or select the others with columns=[…]: {some}" if others else ""
    return SchemaMismatch(
        f"{second}: column {name!r}: {first} has {expected}, this shard has {found}; "
        f"rewrite one of them, or leave it out of the dataset{way}",
        shard=second,
        field=name,
        expected=expected,
        found=found,
    )


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
            others = [each for each in schema.names if each not in marked]
            raise mismatch_of(name, marked[name], url_of, others)
