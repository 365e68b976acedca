"""The nouns that several rooms share: frozen values without behaviour."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass


class End(enum.StrEnum):
    """What happens at the end of an epoch whose samples do not fill the last global batch."""

    RAGGED = "ragged"
    DROP = "drop"
    PAD = "pad"


class ListPolicy(enum.StrEnum):
    """How a variable-length list column becomes tensors."""

    PADDED = "padded"
    RAGGED = "ragged"


class TruncationSide(enum.StrEnum):
    """The side from which a list that is too long loses values."""

    RIGHT = "right"
    LEFT = "left"


class NullPolicy(enum.StrEnum):
    """What becomes of nulls.

    FILL  a value takes their place, NaN, an empty list or None; a job is refused that has none
    MASK  the same, and a column of bools beside each that may have nulls says where they were
    """

    FILL = "fill"
    MASK = "mask"


class Kind(enum.StrEnum):
    """How the values of one batch column lie in a slab.

    FIXED   one array [B, *shape]
    PADDED  one array [B, T], T the longest of the batch; lengths int64[B]
    RAGGED  values [sum of lengths]; offsets int64[B + 1]
    BYTES   values uint8[...]; offsets int64[B + 1]; then valid uint8[B]
    STRING  as BYTES, in UTF-8
    OBJECT  one Arrow IPC stream with one column: whatever has no tensor form
    """

    FIXED = "fixed"
    PADDED = "padded"
    RAGGED = "ragged"
    BYTES = "bytes"
    STRING = "string"
    OBJECT = "object"


class Cut(enum.StrEnum):
    """Which part of an image, after it was resized, is kept."""

    WHOLE = "whole"
    CENTER = "center"
    RANDOM = "random"


class Decoding(enum.StrEnum):
    """Whether a JPEG may be decoded at a half, a quarter or an eighth, where that leaves at least
    as many pixels as are wanted.

    AUTO   random cuts only
    EXACT  never
    FAST   always
    """

    AUTO = "auto"
    EXACT = "exact"
    FAST = "fast"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of every batch of a job. `dtype` is a numpy dtype name ("int32") or "bfloat16", ""
    where none applies; `shape` is one sample's shape, () for a scalar.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def value_bytes(self) -> int:
        """The size of one number, or of one letter."""
        return _value_bytes(self.dtype)


@functools.cache
def _value_bytes(dtype: str) -> int:
    bits = "".join(letter for letter in dtype if letter.isdigit())
    return int(bits) // 8 if bits else 1


@dataclass(frozen=True, slots=True)
class StepSpec:
    """An image step that has no fields of its own in an `ImageSpec`: its name, its parameters."""

    name: str
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How each encoded image of one column becomes pixels [height, width, 3] or [3, height, width].

    This is the form in which a list of image steps is sent and saved; `steps_of` in
    transforms/image_steps.py reads it. The first seven steps have fields here, which saved digests
    cover. All other steps are in `steps`, in the order in which they run.

    `resize` is () for none, (shorter side,), or (height, width), in pixels; then comes the cut.
    `scale` is the share of an image's area that a random cut takes, `ratio` its width by its height
    (lowest, highest). The share `flip` of the images is mirrored. `mean` and `std` are of values in
    0..1, one a colour, () for none. `decode` says at which size JPEGs are decoded.
    """

    column: str
    height: int
    width: int
    cut: Cut
    resize: tuple[int, ...] = ()
    scale: tuple[float, ...] = ()
    ratio: tuple[float, ...] = ()
    flip: float = 0.0
    layout: str = "HWC"
    dtype: str = "uint8"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    decode: Decoding = Decoding.AUTO
    steps: tuple[StepSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class StackSpec:
    """Columns that come as one, [B, columns] in this order, of this dtype; "" for their own."""

    name: str
    columns: tuple[str, ...]
    dtype: str = ""


ColumnValue = tuple[str, float]
"""A column's name, and a number for it."""
ColumnLength = tuple[str, int]
"""A column's name, and a number of values."""


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """What a job says about its columns: which it wants, and what they come as.

    `columns` are leaf columns in batch order, none for all of them. `lists` says what list columns
    become. `fill_null` replaces nulls, per column, and `fill_null_all` in every column of which it
    is a value. `stack` makes one column of several. `nulls` says whether nulls are marked.
    `pad_value` is what padded lists are filled up with, per column, and `pad_value_all` in every
    list column of which it is a value; zero otherwise. `max_length` cuts lists to so many values,
    per column, and `max_length_all` in every list column; 0 does not. `codes` are columns that come
    as integers, each the index of a value among all that the dataset has.
    """

    columns: tuple[str, ...] = ()
    lists: ListPolicy = ListPolicy.PADDED
    fill_null: tuple[ColumnValue, ...] = ()
    stack: tuple[StackSpec, ...] = ()
    fill_null_all: float | None = None
    nulls: NullPolicy = NullPolicy.FILL
    pad_value: tuple[ColumnValue, ...] = ()
    pad_value_all: float | None = None
    max_length: tuple[ColumnLength, ...] = ()
    max_length_all: int = 0
    truncation_side: TruncationSide = TruncationSide.RIGHT
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a store lists it. `etag` pins its content: two equal etags, equal bytes."""

    url: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class DatasetIdentity:
    """A dataset wherever it lies, as two hashes of 32 hex digits.

    `layout` covers format, schema, and the shards in order: names relative to their common root,
    sizes, and the rows and places of their blocks. `content` covers the shards' ETags as well.
    """

    content: str
    layout: str


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of an arena, or of an object: offset and length in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a process stands: its data-parallel place, and the process-wide one."""

    dp_rank: int = 0
    dp_size: int = 1
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """The batches one consumer walks: steps `first_step, first_step + step_stride, …` of the slice
    of `dp_rank` in `dp_size` that starts at `cursor` (samples consumed so far by all ranks).
    """

    epoch: int
    cursor: int
    dp_rank: int
    dp_size: int
    first_step: int = 0
    step_stride: int = 1
