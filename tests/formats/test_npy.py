"""NumPy's files: dtypes, shapes, and arrays that are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from shards import MemoryShard, npy_bytes, raw_block, read_rows

from dataplane.formats.npy import Npy
from dataplane.model.errors import CorruptShard, SchemaMismatch

NPY = Npy()


def values(array: np.ndarray) -> list[object]:
    return [row["array"] for row in read_rows(NPY, npy_bytes(array))]


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u1", "<i2", ">u2", "<i4", "<u4", "<i8", ">i8", "<u8", "<f2", "<f4", ">f8"]
)
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 1, 2, 2)])
def test_numbers_come_as_numpy_has_them(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    assert values(array) == array.tolist()
    assert NPY.index(MemoryShard(npy_bytes(array))).zero_copy == (
        array.dtype.isnative and dtype != "?"
    )


def test_texts_bytes_and_times() -> None:
    assert values(np.array(["a", "", "日本"])) == ["a", "", "日本"]
    assert values(np.array([b"ab", b"\0b", b""])) == [b"ab", b"\0b", b""]
    days = np.array(["2024-02-29", "NaT"], "<M8[s]")
    assert values(days) == days.tolist()


def test_numbers_are_not_copied() -> None:
    content = npy_bytes(np.arange(60, dtype=np.float32).reshape(20, 3))
    index = NPY.index(MemoryShard(content))
    block = raw_block(content, index, 0, "u")
    batch = NPY.decode(block, index.schema, ["array"])
    start = np.frombuffer(block.body, np.uint8).ctypes.data
    assert batch.column(0).values.buffers()[1].address == start


def test_a_large_array_is_indexed_by_its_header() -> None:
    array = np.zeros((3000, 1024), np.float32)
    shard = MemoryShard(npy_bytes(array))
    index = NPY.index(shard)
    assert [block.rows for block in index.blocks] == [1024, 1024, 952]
    assert shard.bytes_read <= 64 << 10


def test_an_array_without_rows_is_empty() -> None:
    index = NPY.index(MemoryShard(npy_bytes(np.zeros((0, 4), np.int32))))
    assert index.blocks == ()
    assert index.schema == pa.schema([("array", pa.list_(pa.int32(), 4))])


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([{"a": 1}], object), "Python objects.*unpickle; save numbers"),
        (np.asfortranarray(np.ones((3, 2))), "Fortran's order.*ascontiguousarray"),
        (np.ones(3, complex), "complex128 are not read.*view\\(float\\)"),
        (np.float64(3), "one value and no rows; save an array with at least one axis"),
        (np.ones((3, 0)), "no values"),
        (np.array([1, 2, 3], "M8[25s]"), r"multiples of a unit.*array\.astype\('M8\[s\]'\)"),
        (np.array([1, 2, 3], "m8[10ms]"), r"array\.astype\('m8\[ms\]'\)"),
        (np.zeros(2, [("t", "m8[7D]", (2,))]), r"array\.astype\('m8\[D\]'\)"),
    ],
)
def test_what_has_no_rows_of_numbers_is_refused(array: np.ndarray, words: str) -> None:
    with pytest.raises(SchemaMismatch, match=words):
        NPY.index(MemoryShard(npy_bytes(array)))


def test_two_arrays_in_a_file_are_refused() -> None:
    content = npy_bytes(np.ones(3))
    with pytest.raises(CorruptShard, match=r"something follows it: expected 24 bytes of 3 rows"):
        NPY.index(MemoryShard(content + content))


def test_an_array_of_more_axes_than_numpy_has_is_corrupt() -> None:
    header = repr({"descr": "<f4", "fortran_order": False, "shape": (4, *[1] * 5000)}).encode()
    content = b"\x93NUMPY\2\0" + len(header).to_bytes(4, "little") + header + bytes(16)
    with pytest.raises(CorruptShard, match="5001 axes, and NumPy's arrays have at most 64"):
        NPY.index(MemoryShard(content))
