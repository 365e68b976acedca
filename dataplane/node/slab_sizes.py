"""Estimate the size of a job's slabs before any of its samples is read."""

from __future__ import annotations

from dataplane.arena.slab_layout import ALIGN_BYTES, SHAPE_BYTES, row_bytes, row_index_bytes
from dataplane.model.config import JobSpec
from dataplane.model.records import End, Kind, PackPolicy
from dataplane.node.dataset import Dataset
from dataplane.scheduler.walk import SlabSizes
from dataplane.transforms.made_columns import CollatedColumns
from dataplane.transforms.packing import delivered_columns, packed_columns

_BATCHES_MAX = 256
# One packet describes a slab: this many bytes for all batches, and this many per batch and column.
_TOLD_BYTES_MAX = 128 << 10
_TOLD_BYTES_A_PIECE = 16
# A batch of rows of different lengths may be larger than the mean suggests.
_SPREAD = 1.25
# Of the column that names the source of a sample.
_SOURCE_BYTES = 4
# A worker makes such a slab alone: more and smaller ones keep more workers busy.
_COLLATED_PARTS = 4
# What a worker takes for an image, until it has made some.
_IMAGE_S = 0.0005
# Weight of image-like bytes in a stored sample, relative to text or lists.
_BYTES_PARTS = 8


def slab_sizes(
    dataset: Dataset,
    spec: JobSpec,
    dp_size: int,
    slab_bytes: int,
    samples: int = 0,
    collated: CollatedColumns | None = None,
) -> SlabSizes:
    """Estimate slab sizes from the mean size of a sample: as many batches as fit into `slab_bytes`,
    at least one. `samples` is the length of an epoch; 0 for that of the dataset. A collate function
    makes batches of the `collated` columns.
    """
    samples = samples or dataset.manifest.sample_count
    if collated is not None:
        slab_bytes //= _COLLATED_PARTS
    largest = spec.global_batch if spec.end is End.PAD else min(spec.global_batch, samples)
    rows = -(-largest // dp_size)
    column_count = dataset.column_count if collated is None else len(collated.specs)
    padding = ALIGN_BYTES * (column_count + 1)
    exactly, others = _row_bytes(dataset, spec) if collated is None else (0, collated.row_bytes)
    batch_bytes = rows * exactly + int(rows * others * _SPREAD) + padding
    exact = rows * (exactly + others) + padding
    told_bytes = _TOLD_BYTES_A_PIECE * (column_count + 1)
    most = max(min(_BATCHES_MAX, _TOLD_BYTES_MAX // told_bytes), 1)
    batches = max(min(most, slab_bytes // exact), 1)
    index_bytes = row_index_bytes(batches * rows)
    slot_bytes = max(slab_bytes, batch_bytes) + index_bytes
    is_divisible = collated is None and _is_divisible(dataset, spec)
    row_s = _IMAGE_S * len(spec.transforms)
    return SlabSizes(batches, most, slot_bytes, batch_bytes, is_divisible, row_s, column_count)


def _is_divisible(dataset: Dataset, spec: JobSpec) -> bool:
    """Whether workers can write the rows of a slab in parallel, since each knows where its own rows
    go. Not if that depends on a function's result, on Arrow values, or on whether another row's
    image can be decoded. Slabs of texts and lists alone are not divided: finding the places of all
    rows takes about as long as copying them.
    """
    pack, columns = spec.view.pack, dataset.columns.specs
    if pack is not None:
        is_plain = pack.policy is not PackPolicy.PAD
    else:
        is_fixed = all(column.kind is Kind.FIXED for column in columns)
        is_plain = is_fixed or bool(spec.transforms)
        is_plain &= all(column.kind is not Kind.OBJECT for column in columns)
    replaces = any(image.replaces for image in spec.transforms)
    return is_plain and not replaces and not spec.view.collate


def _row_bytes(dataset: Dataset, spec: JobSpec) -> tuple[int, int]:
    """Return the bytes of one sample in a slab: exact for images and packs, approximate
    for others.
    """
    if (pack := spec.view.pack) is not None:
        columns = packed_columns(dataset.columns.specs, pack)
        shapes = SHAPE_BYTES * (pack.policy is PackPolicy.PAD)
        return sum(map(row_bytes, columns)) + shapes + _SOURCE_BYTES * (spec.mixture is not None), 0
    if not spec.transforms:
        return _SOURCE_BYTES * (spec.mixture is not None), dataset.row_bytes
    names = {image.column for image in spec.transforms}
    pixels, others, stored_parts, other_parts = 0, 0, 0, 0
    for column in delivered_columns(dataset.columns.specs, spec):
        size = row_bytes(column)
        if column.name in names:
            pixels += size
            stored_parts += _BYTES_PARTS
        elif column.kind is Kind.FIXED:
            others += size
        else:
            other_parts += _BYTES_PARTS if column.kind is Kind.BYTES else 1
    share = dataset.row_bytes * other_parts // (stored_parts + other_parts)
    return pixels, others + share
