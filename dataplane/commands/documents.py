"""The documents of packs, and the skipped steps and removed rows of a job, as `dataplane trace`,
`where`, `replay` and `tombstone` need them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataplane.commands.datasets import read_block, row_names, schema_of
from dataplane.commands.own_node import read_mapped
from dataplane.model.changes import (
    Changes,
    TakenDocument,
    changes_at,
    changes_of,
    dataset_of,
    in_force,
)
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import LedgerPosition
from dataplane.model.records import Tombstone
from dataplane.plan.order import TracedOrder
from dataplane.plan.packs import Int64, Packs, kept_tokens, packs_of, stand_ins, without
from dataplane.plan.tombstones import Place, RowsFor, StepRows, Substitutes, places_of
from dataplane.plan.views import rows_only

if TYPE_CHECKING:
    from dataplane.commands.traced import Traced, TracedSource

_INSTEAD_OF = "instead_of"


def documents_of(job: Traced, step: StepRows, epoch: int) -> list[dict[str, object]]:
    """Return the documents of these packs, in pack order: position and rank, shard and row, the
    first token, the number of tokens, their place in the pack, and the row that was removed there,
    if any. Reads the blocks' tokens.

    Raises:  CorruptShard.  DatasetChangedError.  StoreError and its subclasses.
    """
    return [facts for facts, _, _ in _pieces_of(job, step, epoch, None)]


def replayed_documents(
    job: Traced, step: StepRows, epoch: int, columns: Sequence[str] | None, prefix: str
) -> pa.Table:
    """Return the documents of these packs with their values. The facts of `documents_of` are in
    columns whose names begin with `prefix`. Packed columns have only the tokens that are in the
    pack. Without `columns`, only packed columns are returned.

    Raises:  ConfigError: there is no such column.  As documents_of.
    """
    packs = [source.view.pack for source in job.sources if source.view.pack is not None]
    packed_names = [packs[0].column, *packs[0].carry]
    names = packed_names if columns is None else list(columns)
    facts: list[dict[str, object]] = []
    values: dict[str, list[pa.Array]] = {name: [] for name in names}
    for found, batch, row in _pieces_of(job, step, epoch, names):
        facts.append(found)
        begin, count = cast(int, found["first_token"]), cast(int, found["tokens"])
        for name in names:
            column = batch.column(name).slice(row, 1)
            if name in packed_names:
                cut = column[0].values.slice(begin, count)
                column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), cut)
            values[name].append(column)
    table = pa.Table.from_pylist(
        [
            {f"{prefix}{name}": value for name, value in one.items() if name != _INSTEAD_OF}
            for one in facts
        ]
    )
    for name in names if facts else ():
        joined = pa.chunked_array(values[name]).unify_dictionaries()
        table = table.append_column(name, joined)
    return table.combine_chunks()


def _pieces_of(
    job: Traced, step: StepRows, epoch: int, columns: Sequence[str] | None
) -> Iterator[tuple[dict[str, object], pa.RecordBatch, int]]:
    """Yield, for each document of these packs, its facts, and its row with the tokens and these
    columns.
    """
    order = job.order(epoch)
    numbers = step.blocks + job.first_blocks[step.sources]
    keys: list[int | None] = [None] * len(numbers)
    if job.spec.shuffle:
        keys = order.pack_keys(step.positions % order.sample_count, numbers).tolist()
    names = [row_names(one.of_rows, rows_only(one.view)) for one in job.sources]
    left_out = LeftOut(job)
    changes = left_out.changes(epoch, int(step.positions[0])) if len(numbers) else Changes()
    batches: dict[int, pa.RecordBatch] = {}
    packs: dict[tuple[int, int | None], tuple[Packs, Packs]] = {}
    for at, (number, source, block, pack) in enumerate(
        zip(numbers.tolist(), step.sources.tolist(), step.blocks.tolist(),
            step.block_rows.tolist(), strict=True)
    ):  # fmt: skip
        of, keyed = job.sources[source], keys[at]
        of_rows = _block_of_rows(of, block)
        if number not in batches:
            batches[number] = _documents(job, of, of_rows, columns or ())
        if (number, keyed) not in packs:
            gone = left_out.documents(changes, number)
            packs[number, keyed] = _packs(of, batches[number], keyed, gone)
        whole, own = packs[number, keyed]
        some = slice(*own.starts[pack : pack + 2].tolist())
        pieces, blocks = own.pieces[:, some], np.full(some.stop - some.start, of_rows)
        shards, shard_rows = names[source].of(blocks, pieces[0].astype(np.int64))
        _, stood = names[source].of(blocks, whole.pieces[0, some].astype(np.int64))
        for piece, shard, row, other in zip(
            pieces.T.tolist(), shards.tolist(), shard_rows.tolist(), stood.tolist(), strict=True
        ):
            facts: dict[str, object] = {
                "position": int(step.positions[at]),
                "dp_rank": int(step.dp_ranks[at]),
                **job.place_of(source, shard),
                "row": row,
                "first_token": piece[1],
                "tokens": piece[2],
                "place": piece[3],
                "is_padding": bool(step.is_padding[at]),
                _INSTEAD_OF: None if other == row else other,
            }
            yield facts, batches[number], piece[0]


def _block_of_rows(source: TracedSource, block: int) -> int:
    """Convert a block's number to its number among the blocks that have rows."""
    assert source.rows is not None
    assert source.manifest.kept is not None
    kept = int(source.manifest.kept[block])
    return kept if source.rows.kept is None else int(source.rows.kept.searchsorted(kept))


def packs_with(
    job: Traced,
    left_out: LeftOut,
    source: int,
    at: tuple[int, int],
    epochs: Iterable[int],
    cursor: int,
) -> Iterator[tuple[int, Place, int, int, dict[str, object]]]:
    """Yield the places, in each epoch, of packs that have tokens of a row, or would have them if
    the row had not been removed. Each place comes with the document that the plan has there, the
    one that is delivered (the given row is one of these, or both), and the range of its tokens.
    `at` is a block among those that have rows, and a row of it. Reads the block's tokens.

    Raises:  CorruptShard.  DatasetChangedError.  StoreError and its subclasses.
    """
    of, (block, row) = job.sources[source], at
    assert of.rows is not None
    assert of.view.pack is not None
    assert of.manifest.kept is not None
    kept = block if of.rows.kept is None else int(of.rows.kept[block])
    of_packs = int(of.manifest.kept.searchsorted(kept))
    if of_packs == of.manifest.block_count or of.manifest.kept[of_packs] != kept:
        return  # the block has no packs
    lengths = _lengths(_documents(job, of, block), of.view.pack.column)
    number = int(job.first_blocks[source]) + of_packs
    rows = (row, *left_out.taken_rows(number))
    for epoch in epochs:
        order = job.order(epoch)
        steps = job.steps(order, epoch, cursor)
        for keyed in order.keys_of_packs(number) if job.spec.shuffle else [None]:
            whole = packs_of(lengths, of.view.pack, keyed)
            made = functools.lru_cache(8)(partial(without, whole, lengths, of.view.pack))
            for piece in np.flatnonzero(np.isin(whole.pieces[0], rows)).tolist():
                pack = int(whole.starts.searchsorted(piece, side="right")) - 1
                for place in places_of(steps, order, number, pack):
                    if keyed not in (None, _key_at(order, place, number)):
                        continue
                    changes = left_out.changes(epoch, place.position)
                    now = made(left_out.documents(changes, number))
                    stood, given = int(whole.pieces[0, piece]), int(now.pieces[0, piece])
                    if row in (stood, given):
                        said = _said(now if row == given else whole, piece)
                        yield epoch, place, stood, given, said


def _said(packs: Packs, piece: int) -> dict[str, object]:
    names = ("first_token", "tokens", "place")
    return dict(zip(names, packs.pieces[1:, piece].tolist(), strict=True))


def _key_at(order: TracedOrder, place: Place, block: int) -> int:
    """Return the key from which the packs of the block at this place are drawn."""
    position = place.position % order.sample_count
    return int(order.pack_keys(np.array([position]), np.array([block]))[0])


def _packs(
    source: TracedSource, batch: pa.RecordBatch, keyed: int | None, gone: Sequence[TakenDocument]
) -> tuple[Packs, Packs]:
    """Return the packs of a block of rows, with and without the removed documents."""
    pack = source.view.pack
    assert pack is not None
    lengths = _lengths(batch, pack.column)
    whole = packs_of(lengths, pack, keyed)
    return whole, without(whole, lengths, pack, gone)


def check_documents(job: Traced, taken: Substitutes, workers: int) -> None:
    """Check that each block from which documents were removed has another document with tokens.
    Reads the tokens of these blocks.

    Raises:  ConfigError: a block has no such document; names its shard.  As `documents_of`.
    """

    def check(number: int) -> None:
        at = int(job.first_blocks.searchsorted(number, side="right")) - 1
        source, block = job.sources[at], number - int(job.first_blocks[at])
        assert source.view.pack is not None
        of_rows = _block_of_rows(source, block)
        lengths = _lengths(_documents(job, source, of_rows), source.view.pack.column)
        try:
            stand_ins(kept_tokens(lengths, source.view.pack), taken.documents(number))
        except ConfigError as error:
            url = source.manifest.shards.urls[int(source.manifest.block_shard[block])]
            raise ConfigError(f"{url}: {error}", shard=url) from error

    # A user's function is called by one thread only.
    is_mapped = any(source.view.map for source in job.sources)
    with ThreadPoolExecutor(1 if is_mapped else workers) as threads:
        for _ in threads.map(check, taken.gone):
            pass


def _lengths(batch: pa.RecordBatch, column: str) -> Int64:
    """Return how many tokens each row has."""
    lengths = pc.fill_null(pc.list_value_length(batch.column(column)), 0).cast(pa.int64())
    found: Int64 = lengths.to_numpy(zero_copy_only=False)
    return found


def _documents(
    job: Traced, source: TracedSource, block: int, columns: Sequence[str] = ()
) -> pa.RecordBatch:
    """Read the rows of a block, with their tokens and these columns; a map is applied if there is
    one.

    Raises:  ConfigError: there is no such column.
    """
    view, rows = source.view, source.rows
    assert view.pack is not None
    assert rows is not None
    schema, names = schema_of(rows), [*dict.fromkeys((view.pack.column, *columns))]
    if not view.map:
        _expect_columns(names, schema.names)
        return read_block(rows, block, schema, names, view=rows_only(view))
    batch = read_mapped(rows, block, view, job.spec.seed)
    _expect_columns(names, batch.schema.names)
    return batch


def _expect_columns(names: Sequence[str], known: Sequence[str]) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(f"no column {missing}: there are {', '.join(known)}", field="columns")


# -- skipped steps and removed rows ------------------------------------------------------------

_NOTHING = Changes()


class LeftOut:
    """The skipped steps and removed rows of one job."""

    def __init__(self, job: Traced) -> None:
        self._job, self._ledger = job, job.ledger
        self._substitutes = functools.lru_cache(maxsize=16)(self._made)

    def changes(self, epoch: int, position: int) -> Changes:
        """Return the changes that apply to this position: those of the launch that read the
        position last, or that will read it.
        """
        ledger = self._ledger
        if ledger is None:
            return _NOTHING
        return changes_at(ledger, LedgerPosition(epoch, position))

    def rows_for(self, changes: Changes) -> RowsFor | None:
        """Return the rows that replace removed ones; None if no rows were removed."""
        return self._substitutes(changes.tombstones).of if changes.tombstones else None

    def documents(self, changes: Changes, block: int) -> tuple[TakenDocument, ...]:
        """Return the documents that were removed from a block if samples are packs. Blocks are
        numbered as in the order.
        """
        return self._substitutes(changes.tombstones).documents(block)

    def taken_rows(self, block: int) -> tuple[int, ...]:
        """Return the rows that were ever removed from a block. Blocks are numbered
        as in the order.
        """
        every = self._every()
        return () if every is None else every.gone.get(block, ())

    def replaced_by(self, block: int, row: int) -> list[tuple[int, int]]:
        """Return the rows of shards that were ever removed that this row of a block replaces."""
        every = self._every()
        if every is None:
            return []
        counts = [source.manifest.block_rows for source in self._job.sources]
        return every.replaced_by(block, row, np.concatenate(counts))

    def _every(self) -> Substitutes | None:
        ledger = self._ledger
        if ledger is None:
            return None
        entries = in_force(ledger.entries, ledger.spec, dataset_of(ledger.spec, ledger.dataset))
        return self._substitutes(changes_of(entries).tombstones)

    def given(self, epoch: int, position: int, block: int, stood: int) -> tuple[int, int]:
        """Return the block and the row that is delivered where the plan has the row `stood` of a
        block.
        """
        rows_for = self.rows_for(self.changes(epoch, position))
        if rows_for is None:
            return block, stood
        (given,), (row,) = rows_for(np.array([block]), np.array([stood]))
        return int(given), int(row)

    def is_skipped(self, epoch: int, position: int) -> bool:
        """Return whether the job skips this position."""
        gaps = self.changes(epoch, position).gaps(epoch).ranges
        return any(begin <= position < end for begin, end in gaps)

    def _made(self, tombstones: tuple[Tombstone, ...]) -> Substitutes:
        manifests = [source.manifest for source in self._job.sources]
        return Substitutes(self._job.spec, manifests, tombstones)
