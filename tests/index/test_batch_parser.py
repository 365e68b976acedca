"""The answers of a worker about the parts of a batch, and its requests."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from shards import MemoryShard, arrow_bytes, parquet_bytes

from dataplane.formats import registry
from dataplane.formats.index_frames import decode_indexes, encode_index
from dataplane.rpc import tasks
from dataplane.worker import indexing

ROWS = st.integers(1, 500)
COLUMNS = st.integers(1, 40)


@st.composite
def shards(draw: st.DrawFn, name: str) -> bytes:
    """With a footer, or with metadata, of a hundred bytes to a few hundred kilobytes."""
    rows, at_once = draw(ROWS), draw(st.integers(1, 500))
    table = pa.table(
        {f"{'c' * draw(st.integers(1, 200))} {n}": range(rows) for n in range(draw(COLUMNS))}
    )
    if name == "parquet":
        return parquet_bytes(table, row_group_size=max(at_once, rows // 50))
    return arrow_bytes(table, rows=max(at_once, rows // 50), file=draw(st.booleans()))


@given(st.sampled_from(("parquet", "arrow")).flatmap(lambda name: st.tuples(
    st.just(name), st.lists(shards(name), max_size=4), st.sets(st.integers(0, 3)), st.booleans()
)))  # fmt: skip
def test_what_is_read_is_indexed_as_anywhere_else(
    drawn: tuple[str, list[bytes], set[int], bool],
) -> None:
    """A shard with a part that could not be read is counted, and the others are still indexed."""
    name, contents, unread, with_preambles = drawn
    named = tuple(tasks.BatchShard(f"s3://b/{n}", len(c)) for n, c in enumerate(contents))
    batch = indexing.Batch(tasks.IndexBatch(name, named, (), with_preambles))
    format_ = registry.by_name(name)
    places = [
        (n, place)
        for n, one in enumerate(named)
        for place in indexing.first_reads(format_, one.size_bytes)
    ]
    for _ in range(indexing._ROUNDS_MAX + 1):
        parts = tuple(
            tasks.BatchPart(n, place.offset, contents[n][place.offset :][: place.length])
            for n, place in places
            if n not in unread
        )
        answer = batch.go_on(parts)
        if isinstance(answer, tasks.BatchIndexed):
            break
        places = [(part.shard, part.place) for part in answer.parts]
        assert sum(place.length for _, place in places) <= indexing.BYTES_MAX
    assert isinstance(answer, tasks.BatchIndexed)
    found = decode_indexes(answer.indexes)
    expected = {n: format_.index(MemoryShard(c)) for n, c in enumerate(contents) if n not in unread}
    assert {int(n): encode_index(each) for n, each in found.items()} == {
        n: encode_index(each) for n, each in expected.items()
    }
    assert answer.unread_count == len(unread & set(range(len(contents))))
    preambles = {one.shard: one.content for one in answer.preambles}
    spans = {n: (one.preamble.offset, one.preamble.length) for n, one in expected.items()}
    assert preambles == {
        n: contents[n][at:][:length] for n, (at, length) in spans.items() if with_preambles
    }
