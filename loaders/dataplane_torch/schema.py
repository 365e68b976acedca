"""The columns that a loader over urls will yield, which are known before any batch is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.records import Kind
from dataplane.rpc.messages import DescribedColumn
from dataplane_torch.parts import RankParts
from dataplane_torch.tensors import torch_dtype

_PYTHON: Final = {Kind.STRING: "str", Kind.BYTES: "bytes", Kind.OBJECT: "objects"}


class BatchColumn(Struct, frozen=True):
    """One key of every batch.

    `stored_type` is Arrow's name for the type in the shards, "" for columns that the loader adds
    (lengths, masks). `unit` (D, s, ms, us, ns) and `time_zone` describe times, which are yielded as
    the stored integers. `category_count` is the number of distinct values of a column of codes.
    `is_collated`: a collate function makes the column.
    `comes_as` is "tensor", "ragged" (`Ragged`), or, for a list, the type of its values: "str",
    "bytes" or "objects".

    Shapes:  `shape` is the shape of the tensor, or of the values of a Ragged; a size is None if it
    differs between batches. Lists have at most `length_max` values; None means no limit.
    """

    name: str
    stored_type: str
    comes_as: str
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] | None = None
    unit: str | None = None
    time_zone: str | None = None
    length_max: int | None = None
    category_count: int | None = None
    is_collated: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.described}"

    @property
    def described(self) -> str:
        """The type and shape as text, such as "int32 [B, T], T <= 512"."""
        if self.dtype is None:
            values = "Python values" if self.comes_as == "objects" else self.comes_as
            return f"list of {values}{self._times}"
        dtype = str(self.dtype).removeprefix("torch.")
        most = f" <= {self.length_max}" if self.length_max is not None else ""
        if self.comes_as == "ragged":
            lists = f", lists{most}" if most else ""
            return f"Ragged of {dtype}{lists}{self._times}"
        if self.category_count is not None:
            return f"{dtype} [B], codes of {self.category_count} values"
        shape = self.shape or ()
        names = ["?"] * len(shape) if self.is_collated else ["B", "T"]
        sizes = [names[at] if size is None else str(size) for at, size in enumerate(shape)]
        return f"{dtype} [{', '.join(sizes)}]{f', T{most}' if most else ''}{self._times}"

    @property
    def _times(self) -> str:
        zone = f" {self.time_zone}" if self.time_zone else ""
        return f" ({self.unit}{zone})" if self.unit else ""


class Schema(Struct, frozen=True):
    """The keys of every batch, in order. It prints as a table; `schema["name"]` is one column."""

    columns: tuple[BatchColumn, ...]

    def __getitem__(self, name: str) -> BatchColumn:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def __iter__(self) -> Iterator[BatchColumn]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __str__(self) -> str:
        rows = [(column.name, column.stored_type, column.described) for column in self.columns]
        return _table([("column", "stored as", "comes as"), *rows])


def schema_of(columns: Sequence[DescribedColumn], parts: RankParts, *, is_collated: bool) -> Schema:
    """Return the schema of batches: of the columns that a node describes, those that a rank gets.

    Raises:  ConfigError: a column's type has no tensor.
    """
    keys = (key for column in columns for key in _keys(column, is_collated=is_collated))
    return Schema(tuple(_part(key, parts) for key in keys if parts.has(key.name)))


def _part(column: BatchColumn, parts: RankParts) -> BatchColumn:
    shape = column.shape
    if column.name not in parts.sequences or shape is None or shape[1] is None:
        return column
    return replace(column, shape=(shape[0], parts.length(column.name, shape[1]), *shape[2:]))


def _keys(column: DescribedColumn, *, is_collated: bool) -> Iterator[BatchColumn]:
    spec, stored = column.spec, column.stored_type
    if spec.kind in _PYTHON:
        times = column.unit or None, column.time_zone or None
        yield BatchColumn(spec.name, stored, _PYTHON[spec.kind], None, None, *times)
        return
    shapes: dict[Kind, tuple[int | None, ...]] = {
        Kind.FIXED: (None, *spec.shape),
        Kind.PADDED: (None, None),
        Kind.RAGGED: (None,),
        Kind.ARRAY: (None,) * len(spec.shape),
    }
    yield BatchColumn(
        spec.name,
        stored,
        "ragged" if spec.kind is Kind.RAGGED else "tensor",
        torch_dtype(spec),
        shapes[spec.kind],
        column.unit or None,
        column.time_zone or None,
        column.length_max or None,
        column.category_count,
        is_collated,
    )
    if spec.kind is Kind.PADDED:
        yield BatchColumn(f"{spec.name}.length", "", "tensor", torch.int64, (None,))


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
