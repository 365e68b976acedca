"""Serialises the values of columns that come as codes, for a schema or a manifest."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa


def categories_to_bytes(
    categories: Mapping[str, pa.Array], compression: str | None = None
) -> bytes:
    """Serialise to one Arrow stream with one row, a list for each column; empty without columns."""
    if not categories:
        return b""
    rows = {
        name: pa.LargeListArray.from_arrays([0, len(values)], values)
        for name, values in categories.items()
    }
    batch, sink = pa.record_batch(rows), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def categories_from_bytes(content: bytes) -> dict[str, pa.Array]:
    """Return the values that `categories_to_bytes` serialised, by column.

    Raises:  pa.ArrowInvalid: the bytes are something else.
    """
    if not content:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(content)) as reader:
        batch = reader.read_next_batch()
    return {name: batch.column(name)[0].values for name in batch.schema.names}
