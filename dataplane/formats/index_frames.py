"""The bytes of shard indexes, in logs and messages: frames with a checksum, one for each shard, and
one for each of their schemas.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from dataplane.formats.base import Block, ShardIndex
from dataplane.model.records import Region

_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<I")


def encode_index(index: ShardIndex) -> bytes:
    """Serialise one shard's index for another process."""
    return IndexFrames().of("", index)


def decode_index(content: bytes) -> ShardIndex:
    """Invert `encode_index`."""
    return decode_indexes(content)[""]


class IndexFrames:
    """Makes the frames of one log, which `decode_indexes` reads in the same order."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._last: tuple[pa.Schema, str] | None = None

    def of(self, key: str, index: ShardIndex) -> bytes:
        """Make one shard's frame, after a frame of its schema if the log does not have it yet."""
        frames = b""
        # Shards that were indexed together share one schema object.
        if self._last is None or self._last[0] is not index.schema:
            schema = index.schema.serialize().to_pybytes()
            name = hashlib.blake2b(schema, digest_size=16).hexdigest()
            self._last = (index.schema, name)
            if name not in self._written:
                self._written.add(name)
                frames = frame({"schema": name}, schema)
        return frames + _shard_frame(key, index, self._last[1])


def _shard_frame(key: str, index: ShardIndex, schema_name: str) -> bytes:
    table = np.array(
        [(b.rows, b.place.offset, b.place.length, b.decoded_bytes) for b in index.blocks], "<i8"
    )
    facts = {
        "shard": key,
        "of": schema_name,
        "preamble": [index.preamble.offset, index.preamble.length],
        "zero_copy": index.zero_copy,
        "blocks": len(index.blocks),
        "nulls": len(index.nulls),
    }
    columns = b"".join(np.array(block.columns, "<i8").tobytes() for block in index.blocks)
    nulls = np.array(index.nulls, "<i8").tobytes()
    return frame(facts, table.tobytes() + columns + nulls)


def frame(facts: Mapping[str, object], body: bytes) -> bytes:
    """Return a frame of a log that contains `facts`, as JSON, and `body`."""
    header = json.dumps(facts, separators=(",", ":")).encode()
    payload = _HEADER.pack(len(header)) + header + body
    return _FRAME.pack(len(payload), google_crc32c.value(payload)) + payload


def frames_in(content: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the facts and the bytes of each frame, up to the first that is torn or damaged."""
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or google_crc32c.value(payload) != crc:
            return
        end = _HEADER.size + _HEADER.unpack_from(payload)[0]
        yield json.loads(payload[_HEADER.size : end]), payload[end:]
        at += _FRAME.size + length


@functools.lru_cache(maxsize=4)
def _schema(serialised: bytes) -> pa.Schema:
    """Return the same object for the same bytes, so that comparing shards with one schema costs
    nothing.
    """
    return pa.ipc.read_schema(pa.py_buffer(serialised))


def decode_indexes(content: bytes) -> dict[str, ShardIndex]:
    """Return the indexes of all shards in a log, by key."""
    schemas: dict[str, pa.Schema] = {}
    found: dict[str, ShardIndex] = {}
    for facts, body in frames_in(content):
        if "schema" in facts:
            schemas[facts["schema"]] = _schema(body)
            continue
        numbers, count = np.frombuffer(body, "<i8"), facts["blocks"]
        end = len(numbers) - facts["nulls"]
        table = numbers[: 4 * count].reshape(-1, 4).tolist()
        per_block = (count, -1) if count else (0, 0)
        columns = numbers[4 * count : end].reshape(per_block)
        found[facts["shard"]] = ShardIndex(
            schemas[facts["of"]],
            tuple(
                Block(rows, Region(at, length), size, array("q", places.tobytes()))
                for (rows, at, length, size), places in zip(table, columns, strict=True)
            ),
            Region(*facts["preamble"]),
            facts["zero_copy"],
            array("q", numbers[end:].tobytes()),
        )
    return found
