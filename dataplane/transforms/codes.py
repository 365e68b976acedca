"""Columns delivered as integer codes: the index of each value in the dataset's sorted values.

Numbers are sorted by size and text by its UTF-8 bytes, so that the codes are the same in every
shard, on every node and in every run. The sorted values are kept in the metadata of the dataset's
schema, where workers read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from dataplane.base.units import meant
from dataplane.formats.arrays import decoded
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, ListPolicy
from dataplane.plan.columns import categories_from_bytes, categories_to_bytes
from dataplane.transforms.leaves import Leaf, canonical_type, coded_leaf, spec_of

NULL_CODE = -1
CODE_TYPE = "int64"
_KEY = b"dataplane.categories"
_UNKNOWN = -2


def coded_columns(options: ColumnOptions) -> Sequence[str]:
    """Return the names of the columns delivered as codes."""
    return options.codes


def check_codes(codes: Sequence[str], chosen: Sequence[Leaf], every: Sequence[Leaf]) -> None:
    """Refuse columns that are not in the batches, or whose values cannot have codes.

    Raises:  ConfigError: names the column.
    """
    if not codes:
        return
    by_name = {leaf.name: leaf for leaf in chosen}
    for name in codes:
        leaf = by_name.get(name)
        if leaf is None:
            where = "columns=[…] leaves out: name it there too"
            if all(leaf.name != name for leaf in every):
                known = ", ".join(sorted(by_name)[:100])
                where = f"is not a column of single values; the batches have: {known}"
                where += meant(name, by_name)
            raise ConfigError(f"codes names {name!r}, which {where}", field="codes")
        if not _has_codes(spec_of(coded_leaf(leaf), ListPolicy.RAGGED)):
            raise ConfigError(
                f"codes: column {name!r} is of type {leaf.type}: codes are for text, bytes, "
                "integers, bools, times and lists of these",
                field="codes",
            )


def _has_codes(spec: ColumnSpec) -> bool:
    if spec.kind is Kind.FIXED:
        return not spec.shape and "float" not in spec.dtype
    return spec.kind in {Kind.STRING, Kind.BYTES}


def with_categories(schema: pa.Schema, categories: Mapping[str, pa.Array]) -> pa.Schema:
    """Return the schema with the values of each coded column."""
    if not categories:
        return schema
    content = categories_to_bytes(categories)
    return schema.with_metadata({**(schema.metadata or {}), _KEY: content})


def categories_in(schema: pa.Schema) -> dict[str, pa.Array]:
    """Return the categories that `with_categories` stored, by column."""
    return categories_from_bytes((schema.metadata or {}).get(_KEY, b""))


def codes_of(
    array: pa.Array, leaf: Leaf, categories: pa.Array, null_code: int, url: str
) -> pa.Array:
    """Return the code of each value of a column, or of its lists, and `null_code` for nulls.

    Shapes:  result: int64[len(array)].
    Raises:  CorruptShard: a value did not exist when the dataset's values were collected.
    """
    import pyarrow.compute as pc

    found = _coded(array, canonical_type(coded_leaf(leaf).type), categories)
    unknown = pc.index(found, pa.scalar(_UNKNOWN, pa.int64())).as_py()
    if unknown >= 0:
        raise CorruptShard(
            f"{url}: column {leaf.name!r} has a value that is not among the {len(categories)} that "
            f"the dataset had when they were counted: {array[unknown]!s:.80}. The shard changed "
            "but kept its ETag: start a new run",
            shard=url,
            field=leaf.name,
        )
    return pc.fill_null(found, pa.scalar(null_code, pa.int64()))


def distinct_of(array: pa.Array, leaf: Leaf) -> pa.Array:
    """Return the distinct values in a block's lists, serialised in the first row; other rows are
    empty. `distinct_in` reads a row.
    """
    import pyarrow.compute as pc

    values = plain_values(decoded(array).flatten(), canonical_type(coded_leaf(leaf).type))
    content = categories_to_bytes({"": pc.unique(values.drop_null())})
    return pa.array([content, *[b""] * (len(array) - 1)][: len(array)], pa.large_binary())


def distinct_in(content: bytes) -> pa.Array | None:
    """Return the values that `distinct_of` has serialised in a row, if any."""
    return categories_from_bytes(content).get("")


def _coded(array: pa.Array, kind: pa.DataType, categories: pa.Array) -> pa.Array:
    """Return int64[rows]; null for null, and _UNKNOWN for a value that is not a category."""
    import pyarrow.compute as pc

    if isinstance(array, pa.ExtensionArray):
        return _coded(array.storage, kind, categories)
    if pa.types.is_dictionary(array.type):
        # Find the code of each value of the dictionary. Values that no row uses may not be
        # categories.
        return _coded(array.dictionary, kind, categories).take(array.indices)
    values = plain_values(array, kind)
    found = pc.index_in(values, value_set=categories).cast(pa.int64())
    if found.null_count == values.null_count:
        return found
    unknown = np.logical_and(
        found.is_null().to_numpy(zero_copy_only=False),
        values.is_valid().to_numpy(zero_copy_only=False),
    )
    return pc.if_else(pa.array(unknown), pa.scalar(_UNKNOWN, pa.int64()), found)


def plain_values(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert values to the canonical type of their column; nulls stay null."""
    array = decoded(array)
    if array.type == kind:
        return array
    if pa.types.is_large_binary(kind):
        if pa.types.is_string_view(array.type) or pa.types.is_string(array.type):
            array = array.cast(pa.large_string())
        return array.cast(kind)
    return array.cast(kind) if pa.types.is_boolean(array.type) else array.view(kind)


def stored_values(values: pa.Array) -> pa.Array:
    """Invert `shown_as`."""
    if pa.types.is_large_string(values.type):
        return values.cast(pa.large_binary())
    return values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values


def shown_as(values: pa.Array, leaf: Leaf) -> pa.Array:
    """Return categories as users see them: text as text, bools as bools, times as integers."""
    spec = spec_of(coded_leaf(leaf), ListPolicy.RAGGED)
    if spec.kind is Kind.STRING:
        return values.cast(pa.large_string())
    return values.cast(pa.bool_()) if spec.dtype == "bool" else values
