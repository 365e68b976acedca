"""The values that several rooms share: frozen, and without behaviour."""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta, Struct

# -- weights -----------------------------------------------------------------------------------
#
# The weights of a mixture's sources, and the positions from which they apply.
#
# A position is a place in one epoch; see docs/order.md. Shares are in units of 2**-32.

Unsigned = Annotated[int, Meta(ge=0)]
"""A number in a message that must not be below zero: smaller ones are refused when it is read."""
_Place = tuple[int, int]


class ScheduledShares(Struct, frozen=True):
    """Shares that a schedule sets in advance, from this step on. Steps count from the first step of
    the job, through all of its epochs.
    """

    step: Unsigned
    shares: tuple[Unsigned, ...]


class ShareChange(Struct, frozen=True):
    """New shares, from the first round on that begins at this position of an epoch or later."""

    epoch: Unsigned
    position: Unsigned
    shares: tuple[Unsigned, ...]

    @property
    def place(self) -> _Place:
        """Return epoch and position."""
        return self.epoch, self.position


class MixHistory(Struct, frozen=True):
    """All shares of a job in order, past and planned ones, each with the place from which it
    applies; the first applies from the start. `length` is the length of an epoch in samples; 0
    means that none is set.
    """

    changes: tuple[ShareChange, ...]
    length: Unsigned = 0

    @property
    def digest(self) -> str:
        """Return 16 hex digits over the whole history."""
        return _digest(self.length, self.changes)

    def digest_at(self, epoch: int, position: int) -> str:
        """Return 16 hex digits over what decides the samples from this place to the next change."""
        return _digest(self.length, self.until(epoch, position))

    def until(self, epoch: int, position: int) -> tuple[ShareChange, ...]:
        """Return the changes at this place and before it."""
        return tuple(change for change in self.changes if change.place <= (epoch, position))

    def between(self, epoch: int, begin: int, end: int) -> tuple[int, ...]:
        """Return the positions between `begin` and `end`, exclusive, at which shares change."""
        return tuple(
            change.position
            for change in self.changes
            if change.epoch == epoch and begin < change.position < end
        )

    def last_change(self, epoch: int) -> int:
        """Return the last position of an epoch at which shares change; 0 if they stay the same."""
        return max((change.position for change in self.changes if change.epoch == epoch), default=0)


def _digest(length: int, changes: tuple[ShareChange, ...]) -> str:
    told = [length, [[change.epoch, change.position, *change.shares] for change in changes]]
    text = json.dumps(told, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class End(enum.StrEnum):
    """The treatment of samples that do not fill the last global batch of an epoch."""

    RAGGED = "ragged"
    DROP = "drop"
    PAD = "pad"


class Exhausted(enum.StrEnum):
    """The treatment of a mixture's source that has been read as often as allowed.

    STOP         the epoch ends
    RENORMALISE  the other sources continue; their shares keep their ratios
    CYCLE        the source is read again; an epoch ends when every source was read once
    """

    STOP = "stop"
    RENORMALISE = "renormalise"
    CYCLE = "cycle"


class ListPolicy(enum.StrEnum):
    """How a variable-length list column becomes tensors."""

    PADDED = "padded"
    RAGGED = "ragged"


class TruncationSide(enum.StrEnum):
    """The side from which a list that is too long loses values."""

    RIGHT = "right"
    LEFT = "left"


class NullPolicy(enum.StrEnum):
    """How nulls are delivered.

    FILL  as a given value, NaN, an empty list or None; if a value is needed and the job gives none,
          the job is refused
    MASK  likewise, and each column that may have nulls gets a column of bools that marks them
    """

    FILL = "fill"
    MASK = "mask"


class PackPolicy(enum.StrEnum):
    """How documents are put into packs.

    BEST_FIT  longest first, each into the fullest pack that still has room for it
    WRAP      all documents are concatenated, and the result is cut into packs
    PAD       documents of similar length are the rows of a padded batch
    """

    BEST_FIT = "best_fit"
    WRAP = "wrap"
    PAD = "pad"


class LongPolicy(enum.StrEnum):
    """The treatment of a document that is longer than a pack.

    FRAGMENT  it is cut into whole packs and a rest
    TRUNCATE  it keeps its first tokens
    DROP      it is left out
    """

    FRAGMENT = "fragment"
    TRUNCATE = "truncate"
    DROP = "drop"


class Kind(enum.StrEnum):
    """How the values of one batch column are stored in a slab.

    FIXED   one array [B, *shape]
    PADDED  one array [B, T], T the longest of the batch; lengths int64[B]
    RAGGED  values [sum of lengths]; offsets int64[B + 1]
    BYTES   values uint8[...]; offsets int64[B + 1]; then valid uint8[B]
    STRING  as BYTES, in UTF-8
    OBJECT  one Arrow IPC stream with one column: all types without a tensor form
    ARRAY   one array of any shape, made by a function of the user; its shape int64[...]. The spec's
            `shape` has a 0 for each dimension
    """

    FIXED = "fixed"
    PADDED = "padded"
    RAGGED = "ragged"
    BYTES = "bytes"
    STRING = "string"
    OBJECT = "object"
    ARRAY = "array"


class Cut(enum.StrEnum):
    """The part of an image that is kept after it was resized."""

    WHOLE = "whole"
    CENTER = "center"
    RANDOM = "random"


class Decoding(enum.StrEnum):
    """Whether a JPEG may be decoded at a half, a quarter or an eighth of its size, if that leaves
    at least as many pixels as the image steps need.

    AUTO   only for random cuts
    EXACT  never
    FAST   always
    """

    AUTO = "auto"
    EXACT = "exact"
    FAST = "fast"


class BlockForm(enum.StrEnum):
    """The form of a request from one node to another.

    RAW      a block, as the bytes of its shard without the preamble
    DECODED  a block, as the Arrow stream that a worker has made of it
    SLAB     a slab, which the other node's workers make
    """

    RAW = "raw"
    DECODED = "decoded"
    SLAB = "slab"


class ColumnSpec(Struct, frozen=True):
    """One column of every batch of a job. `dtype` is a numpy dtype name ("int32") or "bfloat16", or
    "" if none applies; `shape` is one sample's shape, () for a scalar.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[Unsigned, ...] = ()

    @property
    def value_bytes(self) -> int:
        """The size of one number in bytes; 1 for text."""
        return _value_bytes(self.dtype)


@functools.cache
def _value_bytes(dtype: str) -> int:
    bits = "".join(letter for letter in dtype if letter.isdigit())
    return int(bits) // 8 if bits else 1


class StepSpec(Struct, frozen=True):
    """An image step that has no fields in `ImageSpec`: its name and its parameters."""

    name: str
    numbers: tuple[float, ...] = ()


class ImageSpec(Struct, frozen=True):
    """How each encoded image of one column becomes pixels [height, width, 3] or [3, height, width].

    This is the form in which a list of image steps is sent and saved; `steps_of` in
    transforms/image_steps.py parses it. Saved digests cover the fields, so the first seven steps
    have fields here; all other steps are in `steps`, in the order in which they run.

    `resize` is () for none, (shorter side,), or (height, width), in pixels; it is applied before
    the cut. A random cut has a share of an image's area within `scale` (lowest, highest), and a
    ratio of width to height within `ratio` (lowest, highest). The share `flip` of the images is
    mirrored. `mean` and `std` have one value in 0..1 per colour, or are (). `decode` says at which
    size JPEGs are decoded. With `replaces`, another row is delivered where an image cannot be
    decoded.
    """

    column: str
    height: Unsigned
    width: Unsigned
    cut: Cut
    resize: tuple[Unsigned, ...] = ()
    scale: tuple[float, ...] = ()
    ratio: tuple[float, ...] = ()
    flip: float = 0.0
    layout: str = "HWC"
    dtype: str = "uint8"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    decode: Decoding = Decoding.AUTO
    steps: tuple[StepSpec, ...] = ()
    replaces: bool = False


class StackSpec(Struct, frozen=True):
    """Columns joined into one, [B, columns] in this order, with this dtype; "" keeps the dtype of
    the columns.
    """

    name: str
    columns: tuple[str, ...]
    dtype: str = ""


PACK_OUTPUTS = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")
PAD_OUTPUTS = ("lengths",)


class PackSpec(Struct, frozen=True):
    """Rows of tokens ("documents") joined into samples of equal length, with little padding.

    `column` is a list column of integers, `length` the tokens of a pack. `carry` are other list
    columns with one value per token, packed alongside. `outputs` are the columns that are made for
    each pack: "position_ids", "document_ids", "cu_seqlens", "max_seqlen", and "labels", the next
    token of each token. Each document takes a multiple of `multiple` tokens of its pack. A pack has
    at most `documents` documents; 0 derives that number from the length. Tokens are padded with
    `pad_value`, carried columns with zero. `dtype` is the type of the tokens, "" for the stored
    one. `loss_mask` is a column with one value per token: where it is 0, the token is not a label.
    `balanced` means that at each step all ranks have packs of about the same cost.

    With the policy PAD, a pack is a padded batch [rows, width] of at most `length` tokens, whose
    width is a multiple of `multiple`. Its outputs are "lengths", always, and "labels".
    """

    column: str
    length: Unsigned
    policy: PackPolicy = PackPolicy.BEST_FIT
    long: LongPolicy = LongPolicy.FRAGMENT
    carry: tuple[str, ...] = ()
    outputs: tuple[str, ...] = PACK_OUTPUTS
    multiple: Unsigned = 1
    documents: Unsigned = 0
    pad_value: int = 0
    balanced: bool = False
    loss_mask: str = ""
    dtype: str = ""

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored columns from which packs are made."""
        names = (self.column, *self.carry, *filter(None, (self.loss_mask,)))
        return tuple(dict.fromkeys(names))


ColumnValue = tuple[str, float]
"""A column's name, and a number for it."""
ColumnLength = tuple[str, Unsigned]
"""A column's name, and a number of values."""
ColumnDtype = tuple[str, str]
"""A column's name, and the type of its numbers."""


class ColumnOptions(Struct, frozen=True):
    """A job's options for its columns: which ones it reads, and in which form.

    `columns` are leaf columns in batch order; () means all. `lists` is the form of list columns.
    `fill_null` has the values that replace nulls, per column; `fill_null_all` replaces nulls in
    every other column whose type can hold it. `nulls` says whether nulls are marked. `stack` joins
    several columns into one. `pad_value` has the values that pad lists, per column;
    `pad_value_all` is for every other list column whose type can hold it, and the rest are padded
    with zero. `max_length` is the maximum length of lists, per column, and `max_length_all` that of
    every list column; 0 means no limit. `codes` are columns delivered as integers: the index of
    each value among the distinct values in the dataset. `dtype` has the types to which columns of
    numbers, and of lists of them, are converted. `distinct_in_lists`: a node finds the distinct
    values in columns of lists, which it reads as a list of these for each block.
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
    max_length_all: Unsigned = 0
    truncation_side: TruncationSide = TruncationSide.RIGHT
    codes: tuple[str, ...] = ()
    dtype: tuple[ColumnDtype, ...] = ()
    distinct_in_lists: bool = False


class View(Struct, frozen=True):
    """The rows that a job reads, and the functions that change them; by default all rows, as they
    are stored.

    `where` is a condition on columns, in canonical form. `sample` and the range from `split_from`
    to `split_to` are shares of all rows by the keyed hash of the row, in units of 2**-32; a
    `sample` or `split_to` of 0 means all. `limit` is a number of rows, 0 for all. `map` and
    `collate` are functions, as "package.module:function". With `pack`, the samples are packs of
    these rows. `bad_max` is the share of an epoch's samples that may be replaced by others since
    they cannot be read; 0 if one of them ends the run. `resizes`: the map may return another number
    of rows than it gets, and the samples are those that it returns. `per_epoch`: the map gets other
    random numbers in each epoch.
    """

    where: str = ""
    sample: Unsigned = 0
    split_from: Unsigned = 0
    split_to: Unsigned = 0
    limit: Unsigned = 0
    map: str = ""
    collate: str = ""
    pack: PackSpec | None = None
    bad_max: float = 0.0
    resizes: bool = False
    per_epoch: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether the number of samples of each block must be counted by making them."""
        return self.pack is not None or self.resizes

    @property
    def pads(self) -> bool:
        """Whether the samples of the view are padded batches."""
        return self.pack is not None and self.pack.policy is PackPolicy.PAD


class MixUnit(enum.StrEnum):
    """The unit of a mixture's weights: they are shares of its samples, of their tokens, or of its
    batches. In the last case, each batch has samples of one source only.
    """

    SAMPLES = "samples"
    TOKENS = "tokens"
    BATCH = "batch"


class ObjectInfo(Struct, frozen=True):
    """One object as a store lists it. `etag` identifies its content: equal ETags, equal bytes."""

    url: str
    size_bytes: Unsigned
    etag: str


class DatasetIdentity(Struct, frozen=True):
    """The identity of a dataset, independent of its location, as two hashes of 32 hex digits. Two
    copies of a dataset differ in fingerprint, but not in identity.

    `layout` covers format, schema, and the shards in order: names relative to their common root,
    sizes, and the rows and places of their blocks. `content` covers the shards' ETags as well.
    """

    content: str
    layout: str


class Region(Struct, frozen=True, array_like=True):
    """A piece of an arena, or of an object: offset and length in bytes."""

    offset: Unsigned
    length: Unsigned


@dataclass(frozen=True, slots=True)
class Topology:
    """A process's ranks: its data-parallel rank, and its rank among all processes.

    `pp_rank` is its stage among `pp_size` pipeline stages, `cp_rank` its part among `cp_size` parts
    of each sequence. `source` says where these values come from; it is not compared.
    """

    dp_rank: Unsigned = 0
    dp_size: Unsigned = 1
    rank: Unsigned = 0
    world_size: Unsigned = 1
    local_rank: Unsigned = 0
    local_world_size: Unsigned = 1
    pp_rank: Unsigned = 0
    pp_size: Unsigned = 1
    cp_rank: Unsigned = 0
    cp_size: Unsigned = 1
    source: str = field(default="", compare=False)

    @staticmethod
    def auto(
        *, device_mesh: object = None, batch_axes: Sequence[str | int] | None = None
    ) -> Topology:
        """Return the topology of this process, from the first of these that knows it: `device_mesh`
        or the mesh that is entered (`with mesh:`), Megatron-Core, DeepSpeed, Accelerate, Horovod,
        torch.distributed, the launcher's environment. `source` names it. Nothing is imported to
        find out: a framework that this process does not use is ignored.

        `batch_axes` are the names or numbers of the axes of the mesh along which batches differ.

        Raises:  ConfigError: the names of the mesh's axes do not say which of them are batch axes;
        or a framework or the environment contradicts itself.
        """
        # Import the module by name, since the model room imports no other room.
        found: Topology = importlib.import_module("dataplane_torch.topology").auto(
            device_mesh, batch_axes
        )
        return found


class Tombstone(Struct, frozen=True, order=True):
    """A row of a shard of a source that was removed, or with ALL_ROWS the shard; all numbers are
    0-based. `of_view` is the row's number among the rows of its block that are in the job's view,
    or None for the first one.
    """

    shard: Unsigned
    row: Unsigned
    source: Unsigned = 0
    of_view: Unsigned | None = None

    @property
    def numbers(self) -> list[int]:
        """Return the form that ledgers store: shard and row, then every other field whose value is
        not its default.
        """
        if self.of_view is not None:
            return [self.shard, self.row, self.source, self.of_view]
        return [self.shard, self.row, *([self.source] if self.source else [])]


class TakenMidway(Struct, frozen=True):
    """Rows that were removed while a job ran, from the first step on that begins at this place or
    later.
    """

    epoch: Unsigned
    position: Unsigned
    rows: tuple[Tombstone, ...]


class Stream(Struct, frozen=True):
    """The batches that one consumer reads: steps `first_step, first_step + step_stride, …` of the
    slice of `dp_rank` in `dp_size` that starts at `cursor` (samples consumed so far by all ranks).
    `mix` has the weights of a mixture; None means the weights of the job's spec. `gone` has the
    rows that were removed since the job's launch began.
    """

    epoch: Unsigned
    cursor: Unsigned
    dp_rank: Unsigned
    dp_size: Unsigned
    first_step: Unsigned = 0
    step_stride: Unsigned = 1
    mix: MixHistory | None = None
    gone: tuple[TakenMidway, ...] = ()


class StorePause(Struct, frozen=True, array_like=True, tag=True):
    """A store has asked for a slower rate: no process sends it a request for `left_s`. The next
    pause is longer if `level` is higher.
    """

    store: str
    level: Unsigned
    left_s: float
