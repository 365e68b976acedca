"""The columns of batches whose samples are packs; plan/packs.py assigns documents to packs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Kind, PackPolicy, PackSpec
from dataplane.plan.packs import Packing, documents_max
from dataplane.transforms.images import delivered
from dataplane.transforms.lists import LISTS

LABELS, LENGTHS = "labels", "lengths"
PACKING = "packing"
"""The only column of the batches that a node makes to count packs: the Packing of each block."""


def delivered_columns(specs: Sequence[ColumnSpec], spec: JobSpec) -> tuple[ColumnSpec, ...]:
    """Return the columns of a job's batches, from those of its decoded blocks.

    Raises:  ConfigError: a column has no images, or cannot be packed.
    """
    found = delivered(specs, spec.transforms)
    if spec.view.pack is not None:
        found = batch_columns(packed_columns(found, spec.view.pack), spec.view.pack)
    name = "" if spec.mixture is None else spec.mixture.source_column
    if name and any(each.name == name for each in found):
        raise ConfigError(
            f"source_column={name!r}: the sources have a column of this name: choose another name",
            field="source_column",
        )
    return (*found, ColumnSpec(name, Kind.FIXED, "int32")) if name else found


def packed_columns(specs: Sequence[ColumnSpec], pack: PackSpec) -> tuple[ColumnSpec, ...]:
    """Return the columns of packs: the packed columns, then the columns made for each pack.

    Raises:  ConfigError: a column is missing, or has no numbers for tokens.
    """
    known = {spec.name: spec for spec in specs}
    columns = [_packed(name, known, pack) for name in (pack.column, *pack.carry)]
    if not columns[0].dtype.lstrip("u").startswith("int"):
        raise ConfigError(
            f"column {pack.column!r} has lists of {columns[0].dtype}: packs need lists of integers,"
            " the tokens of documents",
            field=pack.column,
        )
    if pack.dtype:
        columns[0] = _cast(columns[0], pack)
    if pack.loss_mask:
        mask = _packed(pack.loss_mask, known, pack)
        if mask.dtype != "bool" and not mask.dtype.lstrip("u").startswith("int"):
            raise ConfigError(
                f"column {pack.loss_mask!r} has lists of {mask.dtype}: loss_mask= in Pack(…) needs"
                " lists of bools or integers, which are 0 for tokens without a loss",
                field=pack.loss_mask,
            )
    bounds = np.iinfo(columns[0].dtype)
    if not bounds.min <= pack.pad_value <= bounds.max:
        raise ConfigError(
            f"pad_value={pack.pad_value} in Pack({pack.column!r}, …) does not fit into"
            f" {columns[0].dtype}, the type of its tokens: choose one from {bounds.min} to"
            f" {bounds.max}",
            field=pack.column,
        )
    if pack.outputs == (PACKING,):
        return (ColumnSpec(PACKING, Kind.FIXED, "int64", (len(Packing.__struct_fields__),)),)
    return (*columns, *(_output(name, pack) for name in pack.outputs))


def batch_columns(columns: tuple[ColumnSpec, ...], pack: PackSpec) -> tuple[ColumnSpec, ...]:
    """Convert the columns of packs to those of batches. Each padded batch has its own shape."""
    if pack.policy is not PackPolicy.PAD or pack.outputs == (PACKING,):
        return columns
    return tuple(
        ColumnSpec(
            column.name, Kind.ARRAY, column.dtype, (0,) if column.name == LENGTHS else (0, 0)
        )
        for column in columns
    )


def _packed(name: str, known: dict[str, ColumnSpec], pack: PackSpec) -> ColumnSpec:
    spec = known.get(name)
    if spec is not None and spec.kind is Kind.STRING:
        raise ConfigError(
            f"pack= needs lists of tokens, and column {name!r} is text: tokenise it, with map=",
            field=name,
        )
    if spec is None or spec.kind not in LISTS or spec.shape:
        raise ConfigError(
            f"pack= needs column {name!r} to be lists of numbers, one number per token, but it is"
            f" {'missing' if spec is None else 'not'}: name columns of lists in Pack(column,"
            " carry=[…], loss_mask=…)",
            field=name,
        )
    return ColumnSpec(name, Kind.FIXED, spec.dtype, (pack.length,))


def _cast(tokens: ColumnSpec, pack: PackSpec) -> ColumnSpec:
    """Return the tokens in the requested type, which must hold all values of the stored one."""
    if not np.can_cast(tokens.dtype, pack.dtype):
        raise ConfigError(
            f"dtype={pack.dtype!r} in Pack({pack.column!r}, …) cannot hold all values of"
            f" {tokens.dtype}, the type of its tokens: leave it out"
            + ("" if pack.dtype == "int64" or tokens.dtype == "uint64" else ', or pass "int64"'),
            field=pack.column,
        )
    return structs.replace(tokens, dtype=pack.dtype)


def _output(name: str, pack: PackSpec) -> ColumnSpec:
    shapes = {
        "position_ids": (pack.length,),
        "document_ids": (pack.length,),
        "cu_seqlens": (documents_max(pack) + 2,),
        "max_seqlen": (),
        LENGTHS: (documents_max(pack),),
    }
    if name == LABELS:
        return ColumnSpec(name, Kind.FIXED, "int64", (pack.length,))
    return ColumnSpec(name, Kind.FIXED, "int32", shapes[name])
