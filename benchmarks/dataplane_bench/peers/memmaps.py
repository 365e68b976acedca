"""Samples as raw arrays in files, to be mapped into memory: the fastest form for torch.utils.data.

Single numbers of one dtype stand side by side in a matrix, a row a sample, as a table that one
trains on does; a batch of them is one gather, and its columns are views. A wider column has a file
of its own. Lists, texts and images are their values one after the other, and where each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import ColumnType, Workload, WorkloadColumn
from dataplane_bench.peers.samples import padded, random_resized_crop_flip

LAYOUT = "memmap"
DESCRIBES = (
    "arrays in mapped files, the numbers of one dtype side by side and delivered as views; shuffled"
    " over the whole epoch, or from S3, by ranges of these files, in a buffer"
)
_BATCH_ROWS = 4096

Crops = Callable[[Sequence[NDArray[np.uint8]], np.random.Generator], Any]
Packed = dict[str, Any]
"""A batch before its matrices are taken apart: what worker processes send."""


@dataclass(frozen=True, slots=True)
class Dense:
    """One file of rows of one shape: of a wide column, or of all single numbers of a dtype."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def is_matrix(self) -> bool:
        return self.file.endswith(".matrix")

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64))


def dense_files(workload: Workload) -> tuple[Dense, ...]:
    """The files of FIXED columns."""
    narrow: dict[str, list[str]] = {}
    wide = []
    for column in workload.of_kind(ColumnType.FIXED):
        if column.shape:
            wide.append(Dense(column.name, column.dtype, column.shape, (column.name,)))
        else:
            narrow.setdefault(column.dtype, []).append(column.name)
    matrices = [
        Dense(f"{dtype}.matrix", dtype, (len(names),), tuple(names))
        for dtype, names in narrow.items()
    ]
    return (*matrices, *wide)


def listed(workload: Workload) -> tuple[WorkloadColumn, ...]:
    """The columns whose samples differ in length."""
    return tuple(column for column in workload.columns if column.kind is not ColumnType.FIXED)


def values_dtype(column: WorkloadColumn) -> np.dtype[Any]:
    """The dtype of the file `<name>.values`."""
    return np.dtype(column.dtype if column.kind is ColumnType.RAGGED else "uint8")


def write(workload: Workload, folder: Path) -> None:
    """All files of a workload.

    Shapes:  <dense.file>: dtype[N, *shape].   <name>.values: dtype[total].
             <name>.offsets: int64[N + 1], of the values.
    """
    ends = {column.name: np.zeros(1, np.int64) for column in listed(workload)}
    for name, end in ends.items():
        (folder / f"{name}.offsets").write_bytes(end.tobytes())
    for rows in _source(workload):
        for dense in dense_files(workload):
            parts = [_fixed(rows[name], dense) for name in dense.names]
            _append(folder / dense.file, np.stack(parts, 1) if dense.is_matrix else parts[0])
        for column in listed(workload):
            lengths, values = _flat(rows[column.name], values_dtype(column))
            offsets = ends[column.name][-1] + np.cumsum(lengths)
            ends[column.name] = offsets if len(offsets) else ends[column.name]
            _append(folder / f"{column.name}.offsets", offsets)
            _append(folder / f"{column.name}.values", values)


def _source(workload: Workload) -> Iterator[pa.RecordBatch]:
    names = [column.name for column in workload.columns]
    for shard in workload.shards:
        yield from pq.ParquetFile(shard).iter_batches(_BATCH_ROWS, columns=names)


def _append(path: Path, array: NDArray[Any]) -> None:
    with path.open("ab") as file:
        file.write(np.ascontiguousarray(array).data)


def _fixed(values: pa.Array, dense: Dense) -> NDArray[Any]:
    flat = values
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    shape = () if dense.is_matrix else dense.shape
    return np.array(flat, dtype=dense.dtype).reshape(len(values), *shape)


def _flat(values: pa.Array, dtype: np.dtype[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Lengths of lists, texts or byte strings, and their values one after the other."""
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        lengths = np.diff(np.array(values.offsets)).astype(np.int64)
        return lengths, np.array(values.flatten(), dtype=dtype)
    binary = values.cast(pa.large_binary())
    _, offsets, content = binary.buffers()
    bounds = np.frombuffer(offsets, np.int64)[binary.offset : binary.offset + len(binary) + 1]
    whole = np.frombuffer(content, np.uint8) if content is not None else np.zeros(0, np.uint8)
    return np.diff(bounds), whole[bounds[0] : bounds[-1]]


@dataclass(slots=True)
class MappedRows:
    """Samples in memory, mapped or read.

    Shapes:  dense: tensors dtype[count, *shape] by file.
             lists: values dtype[total] and offsets int64[count + 1] by column.
    """

    workload: Workload
    count: int
    dense: Mapping[str, Any]
    lists: Mapping[str, tuple[NDArray[Any], NDArray[np.int64]]]
    random: np.random.Generator = field(default_factory=np.random.default_rng)

    def gather(self, ids: NDArray[np.int64], crops: Crops | None = None) -> Packed:
        """These samples, as one batch; `crops` makes images of JPEGs, if not the usual decoder."""
        import torch

        index = torch.from_numpy(ids)
        packed: Packed = {name: rows.index_select(0, index) for name, rows in self.dense.items()}
        for column in listed(self.workload):
            values, offsets = self.lists[column.name]
            starts, ends = offsets[ids].tolist(), offsets[ids + 1].tolist()
            rows = [values[start:end] for start, end in zip(starts, ends, strict=True)]
            if crops and column.kind is ColumnType.IMAGE:
                packed[column.name] = crops(rows, self.random)
            else:
                packed |= collated(column, [made(column, row, self.random) for row in rows])
        return packed

    def sample(self, index: int) -> dict[str, Any]:
        """One sample alone, for loaders that ask for each."""
        parts = {name: rows[index] for name, rows in self.dense.items()}
        for column in listed(self.workload):
            values, offsets = self.lists[column.name]
            row = values[offsets[index] : offsets[index + 1]]
            parts[column.name] = made(column, row, self.random)
        return parts


def made(column: WorkloadColumn, row: NDArray[Any], random: np.random.Generator) -> Any:
    """One row of a listed column, as a trainer sees it."""
    match column.kind:
        case ColumnType.IMAGE:
            return random_resized_crop_flip(row, random)
        case ColumnType.STRING:
            return row.tobytes().decode()
        case _:
            return row


def collated(column: WorkloadColumn, rows: Sequence[Any]) -> Packed:
    """A batch of what `made` returned."""
    import torch

    match column.kind:
        case ColumnType.IMAGE:
            return {column.name: torch.from_numpy(np.stack(rows))}
        case ColumnType.STRING:
            return {column.name: list(rows)}
        case _:
            tensor, lengths = padded(rows)
            return {column.name: tensor, f"{column.name}.length": lengths}


def unpacked(matrices: Sequence[Dense], packed: Packed) -> Packed:
    """The batch with its matrices as columns.   Shapes:  a column: dtype[B], a view."""
    for matrix in matrices:
        packed |= zip(matrix.names, packed.pop(matrix.file).unbind(1), strict=True)
    return packed


def mapped(workload: Workload, folder: Path, random: np.random.Generator) -> MappedRows:
    """All samples of a folder that `write` wrote."""
    import torch

    # "c" (copy-on-write): torch wants writable arrays, and writes must not reach the file.
    def array(name: str, dtype: Any) -> NDArray[Any]:
        path = folder / name
        if not path.stat().st_size:
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="c").view(np.ndarray)

    return MappedRows(
        workload,
        workload.sample_count,
        {
            dense.file: torch.from_numpy(array(dense.file, dense.dtype).reshape(-1, *dense.shape))
            for dense in dense_files(workload)
        },
        {
            column.name: (
                array(f"{column.name}.values", values_dtype(column)),
                array(f"{column.name}.offsets", np.int64),
            )
            for column in listed(workload)
        },
        random,
    )
