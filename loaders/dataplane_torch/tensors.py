"""Make tensors from pieces of a slab.

A tensor's storage is exactly its own bytes, so that saving or sending it does not include other
batches. It keeps the slab's memory object alive. arena/slab_layout.py defines shapes and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dataplane.arena.slab_layout import SIDE_BYTES, side_count, texts
from dataplane.client.stream import Batches
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Kind
from dataplane_torch.parts import RankParts
from dataplane_torch.torch_private.memory import new_shared_storage

Batch = dict[str, Any]
_Put = Callable[[Batches, int, Batch], None]
_MakeTensor = Callable[[Batches, int, torch.dtype, tuple[int, ...]], torch.Tensor]

_WHOLE = RankParts()
_SEQUENCE_DIMS = 2

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}
# All of these types except bfloat16, which numpy lacks.
_NUMPY = {dtype: np.dtype(name) for name, dtype in _DTYPES.items() if name != "bfloat16"}


class Ragged(NamedTuple):
    """Lists of different lengths: row i is values[offsets[i] : offsets[i + 1]].

    Shapes:  values: [sum of lengths].   offsets: int64[B + 1].
    """

    values: torch.Tensor
    offsets: torch.Tensor


class Decoder:
    """Make batches of one job as dicts. Tensors are views of the slab; with `shared`, they are
    copies in memory that other processes can map, as DataLoader workers need. `parts` says which
    columns a batch has, and which part of each sequence; with `for_device`, such a part is
    contiguous memory of its own, since devices copy contiguous memory. `is_empty` is true if
    batches have no columns.

    Raises:  ConfigError: a column's type has no tensor, or cannot be divided.
    """

    def __init__(
        self,
        specs: Sequence[ColumnSpec],
        *,
        shared: bool = False,
        for_device: bool = False,
        parts: RankParts = _WHOLE,
    ) -> None:
        _refuse_twins(specs)
        chosen = parts.chosen(specs)
        self._puts = [
            _put(spec, at, _maker(spec, parts, shared=shared, for_device=for_device))
            for at, spec in enumerate(specs)
            if spec.name in chosen
        ]
        self.is_empty = not self._puts

    def batch(self, batches: Batches, i: int) -> Batch:
        """Return the i-th batch, with columns in the job's order."""
        out: Batch = {}
        for put in self._puts:
            put(batches, i, out)
        return out


def _refuse_twins(specs: Sequence[ColumnSpec]) -> None:
    names = {spec.name for spec in specs}
    for spec in specs:
        if spec.kind is Kind.PADDED and f"{spec.name}.length" in names:
            raise ConfigError(
                f"the list lengths of {spec.name!r} would replace the existing column "
                f'"{spec.name}.length": pass lists="ragged", or leave one out with columns=[…]',
                field=spec.name,
            )


def _maker(spec: ColumnSpec, parts: RankParts, *, shared: bool, for_device: bool) -> _MakeTensor:
    """Return the function that makes the tensor of a column's values."""
    if spec.name not in parts.sequences or parts.cp_size == 1:
        return _shared_tensor if shared else _tensor

    def make(
        batches: Batches, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if len(shape) < _SEQUENCE_DIMS:  # the lengths of lists are not divided
            return (
                _shared_tensor(batches, offset, dtype, shape)
                if shared
                else _tensor(batches, offset, dtype, shape)
            )
        part = parts.cut(spec.name, _tensor(batches, offset, dtype, shape))
        if for_device:
            return part.contiguous()
        return _shared(part) if shared else part

    return make


def _put(spec: ColumnSpec, at: int, make: _MakeTensor) -> _Put:
    if spec.kind is Kind.FIXED:
        return _fixed(spec, at, make)
    if spec.kind is Kind.PADDED:
        return _padded(spec, at, make)
    if spec.kind is Kind.RAGGED:
        return _ragged(spec, at, make)
    if spec.kind is Kind.OBJECT:
        return _objects(spec, at)
    if spec.kind is Kind.ARRAY:
        return _arrays(spec, at, make)
    return _texts(spec, at)


def torch_dtype(spec: ColumnSpec) -> torch.dtype:
    """Return the dtype of a column's tensor.   Raises:  ConfigError: torch has no such dtype."""
    found = _DTYPES.get(spec.dtype)
    if found is None:
        raise ConfigError(
            f"torch has no type for column {spec.name!r} ({spec.dtype!r}): leave it out with "
            "columns=[…]",
            field=spec.name,
        )
    return found


def tensor_over(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    """Return a tensor whose storage is exactly its bytes of a buffer. It keeps the buffer alive."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    seen = _NUMPY.get(dtype)
    if seen is None:
        count = math.prod(shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
    # Go through numpy, which takes less than half the time of `frombuffer` and `view`.
    return torch.from_numpy(np.ndarray(shape, seen, memory, offset))


def _tensor(
    batches: Batches, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    return tensor_over(batches.memory, dtype, shape, offset)


def _shared_tensor(
    batches: Batches, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    return _shared(_tensor(batches, offset, dtype, shape))


def _shared(source: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy. As in torch's own collate, data is copied once, into memory that
    the trainer reads.
    """
    if not source.numel():
        return source
    storage = new_shared_storage(source.nbytes)
    out: torch.Tensor = torch.empty(0, dtype=source.dtype, device="cpu").set_(storage)
    return out.view(source.shape).copy_(source)


def _fixed(spec: ColumnSpec, at: int, make: _MakeTensor) -> _Put:
    name, shape, dtype = spec.name, spec.shape, torch_dtype(spec)

    def put(batches: Batches, i: int, out: Batch) -> None:
        offset = batches.columns[at].values[i]
        out[name] = make(batches, offset, dtype, (batches.batches[i].rows, *shape))

    return put


def _padded(spec: ColumnSpec, at: int, make: _MakeTensor) -> _Put:
    name, length_name, dtype = spec.name, f"{spec.name}.length", torch_dtype(spec)

    def put(batches: Batches, i: int, out: Batch) -> None:
        column, rows = batches.columns[at], batches.batches[i].rows
        out[name] = make(batches, column.values[i], dtype, (rows, column.width[i]))
        side = side_count(Kind.PADDED, rows)
        out[length_name] = make(batches, column.lengths[i], torch.int64, (side,))

    return put


def _ragged(spec: ColumnSpec, at: int, make: _MakeTensor) -> _Put:
    name, dtype = spec.name, torch_dtype(spec)

    def put(batches: Batches, i: int, out: Batch) -> None:
        column, rows = batches.columns[at], batches.batches[i].rows
        values = make(batches, column.values[i], dtype, (column.width[i],))
        side = side_count(Kind.RAGGED, rows)
        out[name] = Ragged(values, make(batches, column.lengths[i], torch.int64, (side,)))

    return put


def _arrays(spec: ColumnSpec, at: int, make: _MakeTensor) -> _Put:
    name, dtype, side_bytes = spec.name, torch_dtype(spec), SIDE_BYTES * len(spec.shape)

    def put(batches: Batches, i: int, out: Batch) -> None:
        column = batches.columns[at]
        side = column.lengths[i]
        shape = tuple(batches.memory[side : side + side_bytes].view(np.int64).tolist())
        out[name] = make(batches, column.values[i], dtype, shape)

    return put


def _texts(spec: ColumnSpec, at: int) -> _Put:
    def put(batches: Batches, i: int, out: Batch) -> None:
        piece = texts(batches.memory, batches.columns[at], i, batches.batches[i].rows)
        out[spec.name] = piece.listed(spec)

    return put


def _objects(spec: ColumnSpec, at: int) -> _Put:
    name = spec.name

    def put(batches: Batches, i: int, out: Batch) -> None:
        column = batches.columns[at]
        start, size = column.values[i], column.width[i]
        out[name] = _objects_of(batches.memory[start : start + size].tobytes()) if size else []

    return put


def _objects_of(wire: bytes) -> list[Any]:
    import pyarrow as pa

    found: list[Any] = pa.ipc.open_stream(wire).read_all().column(0).to_pylist()
    return found
