"""Facts about a dataset beyond its column types. They are stored in the metadata of its schema, so
that node and workers plan the same columns from one value.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dataplane.model.records import ColumnOptions, NullPolicy
from dataplane.plan.columns import NEVER, NullCounts

_REQUIRED = b"dataplane.required"


def marks_nulls(options: ColumnOptions) -> bool:
    """Return whether each column that may have nulls is followed by a bool column that marks
    these.
    """
    return options.nulls is NullPolicy.MASK


def annotated(schema: pa.Schema, options: ColumnOptions, nulls: NullCounts | None) -> pa.Schema:
    """Return the dataset's schema with the facts that a job with these options needs."""
    if not marks_nulls(options) or nulls is None:
        return schema
    return _with(schema, _REQUIRED, np.packbits(nulls.counts == NEVER).tobytes())


def required_nodes(schema: pa.Schema) -> frozenset[int]:
    """Return the field nodes that have no nulls in any shard."""
    packed = (schema.metadata or {}).get(_REQUIRED, b"")
    return frozenset(np.flatnonzero(np.unpackbits(np.frombuffer(packed, np.uint8))).tolist())


def _with(schema: pa.Schema, key: bytes, value: bytes) -> pa.Schema:
    return schema.with_metadata({**(schema.metadata or {}), key: value})
