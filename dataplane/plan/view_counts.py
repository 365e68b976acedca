"""Serialise, for a manifest, how many rows of each block some views have."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ViewCounts = Mapping[str, NDArray[np.int64]]
"""By the name of the view: int64[K]."""


def counts_to_bytes(counts: ViewCounts) -> bytes:
    """One Arrow stream, zstd-compressed, with a column for each view; empty without views."""
    if not counts:
        return b""
    narrow = {name: each.astype(np.min_scalar_type(each.max())) for name, each in counts.items()}
    batch, sink = pa.record_batch(narrow), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def counts_from_bytes(content: bytes, block_count: int) -> ViewCounts:
    """Invert `counts_to_bytes`.

    Raises:  pa.ArrowInvalid: the bytes are something else.  ValueError: they belong to other
    blocks.
    """
    if not content:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        batch = reader.read_next_batch()
    if batch.num_rows != block_count:
        raise ValueError(f"the views are of {batch.num_rows} blocks")
    return {name: batch.column(name).to_numpy().astype(np.int64) for name in batch.schema.names}
