"""Checks that all shards of a dataset have one schema."""

from __future__ import annotations

import pyarrow as pa

from dataplane.errors import SchemaMismatch
from dataplane.formats.conform import same_type
from dataplane.formats.inferred import contradicts, is_closed, is_inferred


def check_same(found: pa.Schema, url: str, expected: pa.Schema, first_url: str) -> None:
    """Refuse a shard whose schema is not the first shard's. Metadata, nullability and the order of
    columns may differ; inferred schemas may differ as long as they do not contradict each other.

    Raises:  SchemaMismatch: shard, field, expected, found.
    """
    if found.equals(expected):
        return
    inferred = is_inferred(expected)
    for field in expected:
        at = found.get_field_index(field.name)
        if at < 0:
            if not inferred:
                raise _mismatch(url, first_url, field.name, str(field.type), "no such column")
            continue
        kind = found.field(at).type
        same = not contradicts(field.type, kind) if inferred else same_type(field.type, kind)
        if not same:
            raise _mismatch(url, first_url, field.name, str(field.type), str(kind))
    for field in found:
        is_known = expected.get_field_index(field.name) >= 0
        if not is_known and (not inferred or is_closed(expected)):
            raise _mismatch(url, first_url, field.name, "no such column", str(field.type))


def _mismatch(url: str, first_url: str, field: str, expected: str, found: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{url}: column {field!r}: the dataset's first shard ({first_url}) has {expected}, this "
        f"one has {found}; all shards of a dataset have one schema: rewrite the shard, or leave "
        "it out",
        shard=url,
        field=field,
        expected=expected,
        found=found,
    )
