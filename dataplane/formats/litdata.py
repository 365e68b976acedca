"""LitData's chunks: `litdata:{…}`, a name that is made from the index.json beside them.

A chunk does not say what its samples have: index.json does, as `data_format` (the kind of each
value) and `data_spec` (the structure of a sample). Both are in the format's name, so that a chunk
needs nothing else. A chunk has the number of samples (uint32), their offsets (uint32 each, and the
end), and the samples: the size of each value (uint32) and the values; those of a TokensLoader are
documents, without sizes. Chunks are plain, compressed as a whole, or compressed in runs of samples,
whose table follows the offsets. A block is a run of samples, about 4 MiB.

Names of columns are the keys of a sample, joined by dots where it is nested; elements of lists and
tuples have their numbers, a sample that is one value is `sample`, and a document `tokens`. Arrays
of one axis are lists. Others have a fixed size if every sample of every chunk has the same shape,
for which chunks are indexed whole; else they are nested lists. Pickles and LitData's own nested
values are never read.

Source:  litdata/streaming/writer.py, serializers.py, framed_zstd.py of Lightning-AI/litData
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataplane.formats.base import Block, RawBlock, ShardIndex, ShardReader
from dataplane.formats.cells import (
    AXES_MAX,
    NUMBER_BYTES,
    Arrays,
    Cells,
    array_kinds,
    blocks_of,
    cells_of,
    decoded_batch,
    fixed_column,
    is_ascending,
    lists_column,
    offsets_in,
    refuse_mixed,
    runs_in,
    samples_apart,
    samples_of,
    schema_of,
    source_of,
    text_column,
)
from dataplane.formats.conform import check_rows
from dataplane.formats.faults import corrupt, foreign_faults, require_bytes
from dataplane.formats.nulls import node_count
from dataplane.formats.source import (
    BLOCK_BYTES,
    RATIO_FLOOR_BYTES,
    RATIO_MAX,
    ByteSource,
    Memory,
    Window,
    block_source,
    holds_compressed,
    is_compressed,
)
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import Region
from dataplane.plan.columns import NEVER

INDEX = "index.json"
INDEX_BYTES_MAX = 64 << 20
_FRAMED = b"LDFZ01\0\0"
_FRAME = np.dtype(
    [("first", "<u4"), ("rows", "<u4"), ("at", "<u8"), ("stored", "<u4"), ("size", "<u4")]
)
_PREFIX_BYTES = 24
_WHAT = "a LitData chunk"
_SCALARS = {"int": "<i8", "float": "<f8", "bool": "?"}
_TEXTS = {"str", "text"}
_BYTES = {
    *("bytes", "jpeg", "pil", "tiff", "tifffile", "file", "image", "video", "audio", "pdf", "mesh")
}
_OF_NUMPY = (
    *("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"),
    *("", "", "?"),
)
_OF_TORCH = (
    *("<f4", "<f4", "<f8", "<f8", "", "", "", "", "<f2", "<f2", ""),
    *("<u1", "<i1", "<i2", "<i2", "<i4", "<i4", "<i8", "<i8", "?", "<u2"),
)
_ARRAYS = {"numpy": (_OF_NUMPY, "<u4"), "tensor": (_OF_TORCH, ">u4")}
TOKENS = "tokens"


def described(url: str, content: bytes) -> tuple[str, list[str]] | None:
    """Return the name of the format of the chunks beside an index.json, and the names of the chunks
    in their order; None if another program wrote it.

    Raises:  ConfigError: the chunks are encrypted or of a kind that is not read.  CorruptShard: the
    index.json is damaged.
    """
    try:
        index = json.loads(content)
    except ValueError as error:
        raise CorruptShard(
            f"{url} is damaged ({error}): restore it; if the .bin files are none of LitData's, "
            "pass format=",
            shard=url,
        ) from error
    try:
        config, files = index["config"], [entry["filename"] for entry in index["chunks"]]
        kinds, loader = config["data_format"], config.get("item_loader") or ""
        twins = [file for file, count in Counter(files).items() if count > 1]
    except (LookupError, TypeError):
        return None
    if twins:
        raise ConfigError(f"{url} names {twins[0]} twice: remove one of its entries", shard=url)
    level = config.get("compression_level") or "chunk"
    why = f"are read by a {loader}" if loader not in {"", "PyTreeLoader", "TokensLoader"} else ""
    why = "are encrypted" if config.get("encryption") else why
    why = "are compressed sample by sample" if level == "sample" else why
    if why or not kinds:
        raise ConfigError(
            f"{url}: its chunks {why or 'have no data_format'}, which is not supported: write them "
            "again with PyTreeLoader or TokensLoader, plain or with compression_level='batch'",
            shard=url,
        )
    if loader == "TokensLoader":
        parameters: dict[str, str] | list[str] = kinds[:1]
    else:
        try:
            names = [*_names(json.loads(config["data_spec"])[1], "")]
        except (ValueError, LookupError, TypeError, RecursionError):
            names = [str(at) for at in range(len(kinds))]
        if len(names) != len(kinds) or len({*names}) < len(names):
            names = [str(at) for at in range(len(kinds))]
        parameters = dict(zip(names, kinds, strict=True))
    name = json.dumps(parameters, separators=(",", ":"))
    return f"litdata:{name}", files


def _names(spec: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the names of the values below a node of a sample's structure."""
    children = spec["children_spec"]
    if not children:
        if spec["type"] is None:
            yield path or "sample"
        return
    keys: Sequence[object] = range(len(children))
    if str(spec["type"]).endswith("dict") or str(spec["type"]).endswith("OrderedDict"):
        keys = json.loads(spec["context"])
    for key, child in zip(keys, children, strict=True):
        yield from _names(child, f"{path}.{key}" if path else str(key))


class LitData:
    """The chunks of one index.json.   Raises:  ConfigError: the parameters are wrong."""

    suffixes = (".bin",)
    index_version = 1  # raised when arrays got the shape of all samples
    needs = "index.json beside the chunks"

    def __init__(self, parameters: str) -> None:
        self.name = f"litdata:{parameters}"
        try:
            given: dict[str, str] | list[str] = json.loads(parameters)
            kinds = {TOKENS: given[0]} if isinstance(given, list) else given
            self._values = [_Value.of(name, kind) for name, kind in kinds.items()]
        except (ValueError, AttributeError, LookupError, TypeError):
            raise ConfigError(
                f"the format {self.name!r} is made from the {INDEX} beside LitData's chunks: pass "
                "their folder, and no format",
                field="format",
            ) from None
        self._is_tokens = isinstance(given, list)
        self._least = 0 if self._is_tokens else 1  # a document may be empty
        self._sizes = [None] * len(self._values)

    def index(self, shard: ShardReader) -> ShardIndex:
        """Implement `Format.index`: read the header, and samples if their arrays vary."""
        url, size = shard.url, shard.size_bytes
        require_bytes(url, size, "LitData")
        window = Window(shard)
        head = bytes(window.view(0, 8))
        if head == _FRAMED:
            offsets, frames, start = _framed(url, window, size, self._least)
            blocks = _frame_blocks(frames, self._decoded)
        else:
            compressed = is_compressed(head)
            source = source_of(shard, compressed=compressed)
            length = None if compressed else size
            offsets = offsets_in(url, source, length, _WHAT, self._least)
            blocks = blocks_of(offsets, self._decoded, size if compressed else None)
            start, frames = (0 if compressed else int(offsets[0])), None
        varying = {
            at: functools.partial(value.arrays, url=url)
            for at, value in enumerate(self._values)
            if value.has_header
        }
        kinds: dict[int, pa.DataType] = {}
        with foreign_faults(url, start, "the arrays of samples are damaged"):
            if blocks and varying:
                if frames is None:
                    runs = runs_in(source, offsets, self._sizes)
                else:
                    runs = self._framed_runs(shard, offsets, frames)
                kinds = array_kinds(runs, varying)
        schema = schema_of(self._values, varying, kinds)
        return ShardIndex(schema, blocks, Region(0, start), False, [NEVER] * node_count(schema))

    def _framed_runs(
        self, shard: ShardReader, offsets: NDArray[np.uint32], frames: np.ndarray
    ) -> Iterator[list[Cells]]:
        """Read the values of all samples, frame by frame."""
        for at in range(len(frames)):
            frame = frames[at : at + 1]
            place, stored, first, rows = (
                int(frame[name][0]) for name in ("at", "stored", "first", "rows")
            )
            body = _inflated(shard.url, memoryview(shard.read(place, stored)), frame)
            places = offsets[first : first + rows + 1]
            if rows:
                yield cells_of(shard.url, body, places, int(places[0]), self._sizes)

    def _decoded(self, rows: int, length: int) -> int:
        # Nested lists have an offset for each list, which may have one byte.
        growth = 5 if any(value.has_header for value in self._values) else 1
        return growth * length + rows * 8 * len(self._values) + 64

    def decode(self, block: RawBlock, schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
        """Implement `Format.decode`."""
        url = block.url
        compressed = holds_compressed(block)
        if block.preamble[:8] == _FRAMED:
            header = Memory(url, block.preamble, 0)
            offsets, frames, _ = _framed(url, header, block.shard_bytes, self._least)
            first, stop = np.searchsorted(
                frames["at"], (block.place.offset, block.place.offset + block.place.length)
            ).tolist()
            frames = frames[first:stop]
            rows = int(frames["rows"].sum())
            check_rows(url, block.place.offset, block.rows, rows)
            at = int(frames["first"][0])
            places, body = offsets[at : at + rows + 1], _inflated(url, block.body, frames)
            base = int(places[0])
        else:
            source = block_source(block, compressed=compressed)
            header = source if compressed else Memory(url, block.preamble, 0)
            length = source.length if compressed else None
            offsets = offsets_in(url, header, length, _WHAT, self._least)
            places = samples_of(offsets, block, compressed=compressed)
            body, base = source.view(source.base, source.length), source.base
        if self._is_tokens:
            starts = places.astype(np.int64) - base
            cells = [Cells(body, starts[:-1], np.diff(starts))]
        else:
            cells = cells_of(url, body, places, base, self._sizes)
        return decoded_batch(self._values, cells, block, schema, columns)

    def rows_apart(self, block: RawBlock) -> Sequence[int] | None:
        """Return where the samples of a block begin; None also if they are in frames."""
        is_framed = block.preamble[:8] == _FRAMED
        return None if is_framed else samples_apart(block, _WHAT, self._least)


class _Value(NamedTuple):
    """One value of a sample: the dtype of numbers, whether these are an array of one axis, and why
    it cannot be read.
    """

    name: str
    family: str
    dtype: np.dtype | None = None
    refused: str = ""

    @classmethod
    def of(cls, name: str, kind: str) -> _Value:
        """Return a value of a kind of `data_format`.   Raises:  ValueError."""
        family, _, option = kind.partition(":")
        if family in _SCALARS:
            return cls(name, family, np.dtype(_SCALARS[family]))
        if family in {"no_header_numpy", "no_header_tensor"}:
            dtype = _dtype_of(family.rpartition("_")[2], int(option))
            refused = "" if dtype else f"has values of the kind {kind}, which NumPy lacks"
            return cls(name, family, dtype, refused)
        if family in _TEXTS | _BYTES | {"jpeg_array", *_ARRAYS}:
            return cls(name, family)
        refused = f"has values of LitData's kind {kind!r}, which is not read"
        if "pickle" in kind:
            refused = "is pickled, which nodes do not unpickle: write numbers, text or bytes"
        return cls(name, family, None, refused)

    @property
    def has_header(self) -> bool:
        """Return whether each value states its type and shape."""
        return self.family in _ARRAYS

    @property
    def type(self) -> pa.DataType:
        """The type of the column, unless it is seen in samples."""
        if self.dtype is not None:
            kind = pa.from_numpy_dtype(self.dtype)
            return kind if self.family in _SCALARS else pa.list_(kind)
        if self.family in _TEXTS:
            return pa.string()
        if self.family == "jpeg_array":
            return pa.list_(pa.binary())
        return pa.binary()

    def array(self, cells: Cells, kind: pa.DataType, url: str) -> pa.Array:
        """Return the column's values; `kind` is its type in the dataset.

        Raises:  SchemaMismatch.   ValueError, LookupError, Arrow's errors: a value is damaged.
        """
        if self.has_header:
            return self.arrays(cells, url).column(kind)
        if self.dtype is None:
            if self.family == "jpeg_array":
                return lists_column(cells, 0)
            return text_column(cells, self.type)
        if self.family in _SCALARS:
            if (cells.lengths != self.dtype.itemsize).any():
                raise ValueError(f"a value does not have {self.dtype.itemsize} bytes")
            return fixed_column(cells, self.dtype, pa.from_numpy_dtype(self.dtype))
        shapes = (cells.lengths // self.dtype.itemsize)[:, None]
        return Arrays(cells, shapes, self.dtype, 0, self.name, url).column(kind)

    def arrays(self, cells: Cells, url: str) -> Arrays:
        """Return arrays that state their type and shape."""
        number = _ARRAYS[self.family][1]
        codes, axes = cells.numbers(np.dtype(number), 2).T
        refuse_mixed(codes, self.name, url, "types")
        refuse_mixed(axes, self.name, url, "numbers of axes")
        dtype, count = _dtype_of(self.family, int(codes[0])), int(axes[0])
        if dtype is None:
            raise ValueError(f"an array has the type {codes[0]}")
        if count > AXES_MAX:
            raise ValueError(f"an array has {count} axes")
        shapes = cells.numbers(np.dtype(number), count, 2 * NUMBER_BYTES).astype(np.int64)
        return Arrays(cells, shapes, dtype, (2 + count) * NUMBER_BYTES, self.name, url)


def _dtype_of(family: str, code: int) -> np.dtype | None:
    """Return the dtype of a code; None if it is not read."""
    kinds = _ARRAYS[family][0]
    name = kinds[code] if code < len(kinds) else ""
    return np.dtype(name) if name else None


def _framed(
    url: str, source: ByteSource, size: int, least: int
) -> tuple[NDArray[np.uint32], np.ndarray, int]:
    """Return the offsets of samples before they were compressed, the table of the frames, and where
    the first frame begins.

    Raises:  CorruptShard.
    """
    head = bytes(source.view(0, _PREFIX_BYTES))
    version = int.from_bytes(head[8:10], "little")
    count, frame_count = (int.from_bytes(head[at : at + 4], "little") for at in (12, 20))
    end = _PREFIX_BYTES + NUMBER_BYTES * (count + 1)
    start = end + _FRAME.itemsize * frame_count
    if version != 1 or not count or not frame_count or start > size:
        raise corrupt(url, 0, f"a damaged table of frames, or one of another version ({version})")
    table = source.view(0, start)
    if len(table) < start:
        raise corrupt(url, 0, "the table of frames is truncated")
    offsets = np.frombuffer(table, "<u4", count + 1, _PREFIX_BYTES)
    frames = np.frombuffer(table, _FRAME, frame_count, end)
    firsts = np.append(0, np.cumsum(frames["rows"], dtype=np.int64))
    ends = np.append(start, start + np.cumsum(frames["stored"], dtype=np.int64))
    is_sound = firsts[-1] == count and is_ascending(offsets, least)
    if not is_sound or (frames["first"] != firsts[:-1]).any() or (frames["at"] != ends[:-1]).any():
        raise corrupt(url, _PREFIX_BYTES, "the table of frames contradicts itself")
    if (frames["size"] != np.diff(offsets[firsts].astype(np.int64))).any():
        raise corrupt(url, _PREFIX_BYTES, "the sizes of frames contradict the offsets of samples")
    if ends[-1] != size:
        what = "the chunk is truncated, or something follows its frames"
        raise corrupt(url, size, what, expected=f"{ends[-1]} bytes", found=f"{size} bytes")
    return offsets, frames, start


def _frame_blocks(frames: np.ndarray, decoded: Callable[[int, int], int]) -> tuple[Block, ...]:
    """Combine frames into blocks of about 4 MiB before compression."""
    blocks, first = [], 0
    ends = np.cumsum(frames["size"], dtype=np.int64)
    while first < len(frames):
        limit = int(ends[first]) - int(frames["size"][first]) + BLOCK_BYTES
        stop = max(first + 1, int(np.searchsorted(ends, limit, "right")))
        some = frames[first:stop]
        rows, size = int(some["rows"].sum()), int(some["size"].sum(dtype=np.int64))
        place = Region(int(some["at"][0]), int(some["stored"].sum(dtype=np.int64)))
        blocks.append(Block(rows, place, decoded(rows, size)))
        first = stop
    return tuple(blocks)


def _inflated(url: str, body: memoryview, frames: np.ndarray) -> memoryview:
    """Decompress these frames, which lie one after the other in `body`.   Raises:  CorruptShard."""
    codec, at, parts = pa.Codec("zstd"), 0, []
    for offset, stored, size in zip(*(frames[name].tolist() for name in ("at", "stored", "size")),
                                    strict=True):  # fmt: skip
        if size > max(RATIO_FLOOR_BYTES, RATIO_MAX * stored):
            raise corrupt(url, offset, f"{stored} compressed bytes inflate to {size}")
        with foreign_faults(url, offset, "damaged compressed data"):
            parts.append(codec.decompress(body[at : at + stored], size))
        at += stored
    return memoryview(b"".join(parts))
