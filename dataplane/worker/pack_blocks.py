"""Blocks of documents, and the packs that are made from them.

Blocks hold documents rather than packs, so that blocks stay the same in all epochs. Which documents
share a pack is computed here, from their lengths and a key, when rows are first gathered from a
block in an epoch.

Invariants:
1. Packs are remembered for some blocks only. Forgotten packs are computed again when needed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.slab_layout import row_bytes
from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ConfigError, CorruptShard, RowOutOfBounds
from dataplane.model.records import ColumnSpec, PackPolicy, PackSpec
from dataplane.plan.packs import Int64, Packs, packs_of, without
from dataplane.rpc import tasks
from dataplane.transforms.packing import LABELS, LENGTHS, PACKING, batch_columns, packed_columns
from dataplane.worker.columns import BlockColumns

T = TypeVar("T")

_KEPT_BYTES_MAX = 128 << 20
_KEYS_KEPT = 2
"""Keys remembered for one block: an epoch may begin while the previous one ends."""
NO_LABEL = -100
"""The label where there is no next token; PyTorch's losses ignore it."""
# The numbers of pack columns' kinds, as in kernel.h.
TOKENS_KIND, LABELS_KIND = 0, 1
_KINDS = {"position_ids": 2, "document_ids": 3, "cu_seqlens": 4, "max_seqlen": 5, LENGTHS: 6}


class PackForm(Struct, frozen=True):
    """The rules by which a dataset's blocks become packs. `stored` are the columns of blocks;
    `specs` are the columns of packs, all FIXED.
    """

    pack: PackSpec
    stored: tuple[ColumnSpec, ...]
    specs: tuple[ColumnSpec, ...]
    outputs: tuple[tuple[int, ...], ...] = ()
    """For each column, the fields of a pack_column in kernel.h, without its address."""

    @classmethod
    def of(cls, stored: Sequence[ColumnSpec], pack: PackSpec) -> PackForm:
        """Plan the packs of these columns.   Raises:  ConfigError: a column cannot be packed."""
        form = cls(pack, tuple(stored), packed_columns(stored, pack))
        if form.counts:
            return form
        return replace(form, outputs=tuple(map(form._output, range(len(form.specs)))))

    def _output(self, at: int) -> tuple[int, ...]:
        spec, pack = self.specs[at], self.pack
        is_copied = at <= len(pack.carry)
        if not is_copied and spec.name != LABELS:
            return (_KINDS[spec.name], row_bytes(spec), 0, 0, 0, 0, 0, -1, 0)
        source = self.column(spec.name if is_copied else pack.column)
        dtype = np.dtype(self.stored[source].dtype)
        padding = NO_LABEL
        if is_copied:
            element = b"" if at else self.padding
            padding = int.from_bytes(element, "little", signed=len(element) == 8)
        kind, own_bytes = TOKENS_KIND if is_copied else LABELS_KIND, np.dtype(spec.dtype).itemsize
        mask, mask_bytes = -1, 0
        if not is_copied and pack.loss_mask:
            mask = self.column(pack.loss_mask)
            mask_bytes = np.dtype(self.stored[mask].dtype).itemsize
        form = (row_bytes(spec), source, dtype.itemsize, dtype.kind == "i", padding)
        return (kind, *form, own_bytes, mask, mask_bytes)

    @property
    def padding(self) -> bytes:
        """The padding of tokens."""
        return np.array(self.pack.pad_value).astype(self.specs[0].dtype).tobytes()

    @property
    def counts(self) -> bool:
        """Whether packs are only counted."""
        return self.pack.outputs == (PACKING,)

    @property
    def pads(self) -> bool:
        """Whether packs are padded batches."""
        return self.pack.policy is PackPolicy.PAD and not self.counts

    @property
    def batch_specs(self) -> tuple[ColumnSpec, ...]:
        """The columns of batches."""
        return batch_columns(self.specs, self.pack)

    def column(self, name: str) -> int:
        """Return the index of the stored column with this name."""
        return next(at for at, spec in enumerate(self.stored) if spec.name == name)


class PackBlock(Struct, frozen=True):
    """A block of documents, with its packs for each key. `packs` is None for an excerpt, whose rows
    are packs already.
    """

    columns: BlockColumns
    packs: tuple[Packs, ...] | None


class AskedPacks(NamedTuple):
    """The packs that are requested of a block: the keys with which they are drawn, None for packs
    that are not shuffled, and the documents that were removed from the block.
    """

    keys: tuple[int | None, ...]
    taken_out: tuple[TakenDocument, ...]

    @classmethod
    def of_blocks(cls, body: tasks.Assemble) -> tuple[Self, ...]:
        """Return the requested packs of each block of a slab."""
        blocks = len(body.block_keys)
        keys: Sequence[tuple[int | None, ...]] = ((None,),) * blocks
        if body.pack_keys:
            keys = _parts(body.pack_keys, body.pack_key_counts)
        taken_out: Sequence[tuple[TakenDocument, ...]] = ((),) * blocks
        if body.taken_out:
            taken_out = _parts(body.taken_out, body.taken_out_counts)
        return tuple(map(cls, keys, taken_out))

    @classmethod
    def of_excerpt(cls, place: tasks.ExcerptPlace) -> Self:
        """Return the requested packs of an excerpt."""
        return cls(place.pack_keys or (None,), place.taken_out)


def _document(origin: tasks.Origin | None, row: int) -> str:
    """Describe a row of a block for the start of an error."""
    if origin is None:
        return ""
    if origin.of_view:
        return f"{origin.url}: row {row} of those of the view from row {origin.first_row} on: "
    return f"{origin.url}: row {origin.first_row + row}: "


def _placed(error: ConfigError, origin: tasks.Origin | None) -> ConfigError:
    """Return the error with the place where the block begins."""
    if origin is None:
        return error
    place = f"{origin.url}, from row {origin.first_row} on"
    return ConfigError(f"{place}: {error}", field="tombstones", shard=origin.url)


def _parts(values: Sequence[T], counts: Sequence[int]) -> list[tuple[T, ...]]:
    some = iter(values)
    return [tuple(itertools.islice(some, count)) for count in counts]


class KnownPacks:
    """The packs of the most recently used blocks, by the key of the block."""

    def __init__(self) -> None:
        self._packs: OrderedDict[int, dict[object, Packs]] = OrderedDict()
        self._bytes = 0

    def of(
        self,
        block_key: int,
        columns: BlockColumns,
        form: PackForm,
        keyed: int | None,
        origin: tasks.Origin | None,
        taken_out: tuple[TakenDocument, ...] = (),
    ) -> Packs:
        """Return the packs of a block, drawn with this key, without the documents that were taken
        out.

        Raises:  CorruptShard: a carried column has other lengths than the tokens, or the number of
        packs is not the counted one. RowOutOfBounds: a list has a negative length, or a removed
        document is not in the block.  ConfigError: no document with tokens is left.
        """
        known, name = self._packs.setdefault(block_key, {}), (keyed, taken_out)
        self._packs.move_to_end(block_key)
        found = known.get(name)
        if found is not None:
            return found
        while len(known) >= _KEYS_KEPT:
            self._bytes -= known.pop(next(iter(known))).nbytes
        lengths = document_lengths(columns, origin, form)
        made = packs_of(lengths, form.pack, keyed)
        if origin is not None and not form.counts:
            _check_count(len(made.starts) - 1, origin)
        try:
            made = without(made, lengths, form.pack, taken_out)
        except ConfigError as error:
            raise _placed(error, origin) from None
        known[name] = made
        self._bytes += made.nbytes
        while self._bytes > _KEPT_BYTES_MAX and len(self._packs) > 1:
            self.forget(next(iter(self._packs)))
        return made

    def forget(self, block_key: int) -> None:
        """Forget the packs of a block that is gone, or whose packs are not needed."""
        known = self._packs.pop(block_key, {})
        self._bytes -= sum(each.nbytes for each in known.values())


def _check_count(found: int, origin: tasks.Origin) -> None:
    if found == origin.pack_count:
        return
    raise CorruptShard(
        f"{origin.url}: the documents from row {origin.first_row} on make {found} packs, and made"
        f" {origin.pack_count} when they were counted. If a map makes their tokens, it must always"
        " return the same for the same rows: give it another `version` when a file that it opens,"
        " or code that it imports, changes",
        shard=origin.url,
        expected=origin.pack_count,
        found=found,
    )


def document_lengths(columns: BlockColumns, origin: tasks.Origin | None, form: PackForm) -> Int64:
    """Return the number of tokens of each document of a block.

    Shapes:  result: int64[rows].
    """
    name = form.pack.column
    lengths = _list_lengths(columns, form.column(name))
    if len(lengths) and lengths.min() < 0:
        raise RowOutOfBounds(f"the lists of column {name!r} have negative lengths", row=0)
    for other in form.pack.stored[1:]:
        others = _list_lengths(columns, form.column(other))
        differ = np.flatnonzero(others != lengths)
        if len(differ):
            row = int(differ[0])
            raise CorruptShard(
                f"{_document(origin, row)}column {other!r} has {others[row]} values and {name!r}"
                f" {lengths[row]}: columns are packed together only if each has one value a token."
                " Rewrite the shard or, to leave such rows out, pass"
                f' where="length({other}) == length({name})"; of columns that a map returns, let it'
                " return as many",
                shard=None if origin is None else origin.url,
                expected=int(lengths[row]),
                found=int(others[row]),
            )
    return lengths


def _list_lengths(columns: BlockColumns, at: int) -> Int64:
    if not columns.rows:
        return np.zeros(0, np.int64)
    start_bytes = int(columns.table[at, -1])
    starts = columns.starts[at].view.view(f"i{start_bytes}").astype(np.int64)
    lengths: Int64 = starts[1:] - starts[:-1]
    return lengths
