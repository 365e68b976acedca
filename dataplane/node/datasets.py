"""The datasets that the jobs of a node read, each planned once; the mixtures that they form, and
the orders of epochs.

Planning a table of 100,000 columns takes seconds, so it is done in threads, and the event loop
keeps serving other trainers.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
import weakref
from collections.abc import Sequence
from fractions import Fraction

from msgspec import structs
from msgspec.structs import replace

from dataplane.index.viewing import check_files, check_left_out, explaining_folders
from dataplane.model.config import JobSpec, MixtureSpec, NodeConfig, SourceSpec, check_source_count
from dataplane.model.errors import ConfigError
from dataplane.model.joined import FILES, IMAGE
from dataplane.model.records import (
    ColumnOptions,
    ColumnSpec,
    End,
    Exhausted,
    MixHistory,
    MixUnit,
    ScheduledShares,
    TakenMidway,
    Tombstone,
)
from dataplane.model.redact import redacted, unsigned
from dataplane.node.dataset import Dataset, can_pack, dataset_of
from dataplane.node.job_columns import columns_of
from dataplane.node.own_reads import Categories, FoundOnce
from dataplane.plan.changes import scheduled
from dataplane.plan.columns import categories_to_bytes
from dataplane.plan.counting import by_temperature, of_tokens, quantised
from dataplane.plan.defaults import BlockSizes, mixed_lanes, source_window
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import SampleOrder
from dataplane.plan.orders import delivered_order, is_reduced, mixed_of, with_mix
from dataplane.plan.views import joined_hash, samples_of
from dataplane.rpc.bounds import URLS_MAX
from dataplane.rpc.messages import MixtureAsked, OpenJob, SourceAsked
from dataplane.transforms.lists import check_lists
from dataplane.transforms.made_columns import MappedColumns
from dataplane.transforms.nulls import check_fills, check_nulls
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.death import WorkerBytes

_URLS_SHOWN_MAX = 16
_Signed = tuple[str, ...]
_PlanKey = tuple[JobSpec, _Signed, bool | None, bytes]


class Datasets:
    """The datasets being read, by the options on which jobs must agree to share blocks; and planned
    datasets, as long as a job uses them.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._read: dict[object, Dataset] = {}
        self._planned: weakref.WeakValueDictionary[_PlanKey, Dataset] = (
            weakref.WeakValueDictionary()
        )
        self._planning = FoundOnce[Dataset]("planning", remembered=0)
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._read)

    def new_id(self) -> int:
        """Return a unique number for a dataset, by which workers know the dataset."""
        return next(self._numbers)

    async def check(self, manifest: Manifest, spec: JobSpec) -> None:
        """Check that a job with this spec can read the manifest.

        Raises:  ConfigError: as `open`.
        """
        await asyncio.to_thread(self._plan, 0, manifest, spec, {})

    async def can_pack(
        self, manifest: Manifest, spec: JobSpec, mapped: MappedColumns | None
    ) -> bool:
        """Whether packing pays for the blocks of this dataset.

        Raises:  ConfigError: as `open`.
        """
        arena_bytes = self._config.block_arena_bytes

        def can() -> bool:
            with explaining_folders(manifest):
                return can_pack(manifest, spec, arena_bytes, columns_of(manifest, spec, mapped))

        return await asyncio.to_thread(can)

    async def open(
        self,
        manifest: Manifest,
        spec: JobSpec,
        categories: Categories,
        mapped: MappedColumns | None = None,
        *,
        packed: bool | None = None,
    ) -> Dataset:
        """Return the dataset for a job with this spec. `categories` are the values of codes,
        `mapped` the columns that its map makes. Its blocks are packed if that pays, unless `packed`
        decides.

        Raises:  ConfigError: the columns are wrong.
        """
        values = hashlib.blake2b(categories_to_bytes(categories)).digest() if categories else b""
        key = (spec, _signed(manifest), packed, values)
        dataset = self._planned.get(key)
        if dataset is None:
            of_job = manifest, spec, categories, mapped, packed
            dataset = await self._planning.of(
                key, lambda: asyncio.to_thread(self._plan, self.new_id(), *of_job)
            )
        dataset = self._planned[key] = self.keep(dataset)
        return dataset

    def keep(self, dataset: Dataset) -> Dataset:
        """Return the dataset to read: this one, unless an equal one is being read."""
        manifest = dataset.manifest
        key = dataset.digest, _signed(manifest)
        return self._read.setdefault(key, dataset)

    def forget(self, dataset: Dataset) -> None:
        """Forget a dataset that has no readers left."""
        self._read = {key: other for key, other in self._read.items() if other is not dataset}

    def _plan(
        self,
        number: int,
        manifest: Manifest,
        spec: JobSpec,
        categories: Categories,
        mapped: MappedColumns | None = None,
        packed: bool | None = None,
    ) -> Dataset:
        config = self._config
        with explaining_folders(manifest):
            columns = columns_of(manifest, spec, mapped)
            if packed is None:
                packed = can_pack(manifest, spec, config.block_arena_bytes, columns)
            dataset = dataset_of(
                number,
                manifest,
                spec,
                packed=packed,
                worker_bytes=WorkerBytes.of(config),
                arena_bytes=config.block_arena_bytes,
                known=columns,
                categories=categories,
            )
            check_left_out(manifest, spec.view.bad_max)
            is_exact = not (spec.view.bad_max or spec.view.where)
            if is_exact and manifest.format == FILES and IMAGE in columns.top_level:
                check_files(manifest, columns.schema)
            check_fills(dataset.columns.leaves)
            check_lists(dataset.columns.specs, spec.column_options)
            if mapped is None:  # a map may add or remove nulls
                check_nulls(dataset.columns.leaves, manifest.nulls, manifest.shards.urls)
            delivered_columns(dataset.columns.specs, spec)
            return dataset


def _signed(manifest: Manifest) -> _Signed:
    """Return the signed urls: jobs with differently signed urls share no blocks, since the
    signatures expire at different times.
    """
    return tuple(url for url in manifest.urls[:_URLS_SHOWN_MAX] if unsigned(url) != url)


def shown(urls: Sequence[str]) -> str:
    """Format a dataset's urls for display."""
    shown = ", ".join(map(redacted, urls[:_URLS_SHOWN_MAX]))
    more = len(urls) - _URLS_SHOWN_MAX
    return f"{shown}, and {more} more" if more > 0 else shown


def declared(urls: Sequence[str]) -> tuple[str, ...]:
    """Return a dataset's urls for the coordinator, which checks them against the prefixes of a
    token: these urls, or their common beginning if there are many.
    """
    if len(urls) > URLS_MAX:
        start = os.path.commonprefix([min(urls), max(urls)])  # noqa: RUF071 - a prefix of characters
        return (f"{unsigned(start)}*",)
    return tuple(map(unsigned, urls))


# -- mixtures --------------------------------------------------------------------------------------
#
# Fill in the defaults of a mixture: lanes, windows, and the share of each source. Make the orders
# of epochs.
#
# The results depend only on the sources' manifests and the user's arguments, never on ranks or
# hosts, so that a job may be resumed on any number of hosts.


LANES_MAX = 1 << 20


def requests_of(request: OpenJob) -> tuple[OpenJob, ...]:
    """Return, for each source, a request for a job over it alone."""
    assert request.mixture is not None
    return tuple(
        replace(
            request,
            source=source.source,
            spec=replace(request.spec, view=source.view),
            mixture=None,
        )
        for source in request.mixture.sources
    )


def check_mixture(mixture: MixtureAsked, lanes: int) -> None:
    """Check the limits of a mixture.

    Raises:  ConfigError: too many sources or lanes, or two sources with the same name.
    """
    names = [source.name for source in mixture.sources]
    if lanes > LANES_MAX:
        raise ConfigError(
            f"lanes={lanes}: {LANES_MAX} are possible in a mixture, whose rounds have a"
            " place for each lane; leave it out, or choose a multiple of the number of ranks",
            field="lanes",
        )
    check_source_count(len(names))
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two sources of the mixture have the same name, {name!r:.80}: give each its own",
            field="sources",
        )


def with_windows(request: OpenJob, sizes: Sequence[BlockSizes]) -> tuple[OpenJob, ...]:
    """Return the requests of sources with the mixture's lanes, and a window for each. A source's
    window gets a part of the memory for open windows in proportion to its bytes.
    """
    requests, given = requests_of(request), request.spec
    if not given.shuffle:
        return requests
    lanes = given.lanes or mixed_lanes(sizes)
    windows = [given.window or source_window(size, lanes, sizes) for size in sizes]
    return tuple(
        replace(request, spec=replace(request.spec, lanes=lanes, window=window))
        for request, window in zip(requests, windows, strict=True)
    )


def mixed_spec(request: OpenJob, specs: Sequence[JobSpec], datasets: Sequence[Dataset]) -> JobSpec:
    """Return the spec of a mixture of these datasets; each spec is that of a job over one of them.

    Raises:  ConfigError: the weights are invalid.
    """
    mixture, first, former = request.mixture, specs[0], request.spec.mixture
    assert mixture is not None
    shares = _shares(mixture, datasets) if former is None else former.shares
    sources = tuple(
        SourceSpec(
            source.name, spec.fingerprint, share, _passes_max(source, mixture.exhausted),
            spec.window, spec.ramp, source.view,
        )
        for source, spec, share in zip(mixture.sources, specs, shares, strict=True)
    )  # fmt: skip
    if former is not None:  # a former stage, whose shares were computed when it began
        mixed = replace(former, sources=sources)
    else:
        batch = first.global_batch if mixture.unit is MixUnit.BATCH else 1
        tokens = mixture.length if mixture.unit is MixUnit.TOKENS else 0
        length = _in_samples(mixture, shares) if tokens else mixture.length * batch
        schedule = tuple(
            ScheduledShares(change.step, shares_of(mixture, change.weights, datasets))
            for change in mixture.schedule
        )
        mixed = MixtureSpec(
            sources, mixture.exhausted, length, batch, mixture.source_column, tokens, schedule
        )
    return replace(
        first,
        fingerprint=joined_hash(spec.fingerprint for spec in specs),
        window=max(spec.window for spec in specs),
        ramp=0,
        view=request.spec.view,
        mixture=mixed,
    )


def with_schedule(spec: JobSpec, counts: Sequence[int]) -> JobSpec:
    """Convert the spec's schedule to changes of the shares, if its sources have this many samples.

    Raises:  ConfigError: an epoch cannot be planned with these shares.
    """
    mixture = spec.mixture
    assert mixture is not None
    if not mixture.schedule:
        return spec
    mixed, batch = mixed_of(spec, counts), spec.global_batch
    changes = scheduled(mixed, (), (0, 0), mixture.schedule, batch, spec.end)
    return structs.replace(spec, mixture=structs.replace(mixture, changes=changes))


def shares_of(
    mixture: MixtureAsked, weights: Sequence[float], datasets: Sequence[Dataset]
) -> tuple[int, ...]:
    """Convert changed weights to shares, in the unit of the mixture.

    Raises:  ConfigError: the number of weights is not that of sources, or a weight is invalid.
    """
    if len(weights) != len(mixture.sources):
        raise ConfigError(
            f"{len(weights)} weights for {len(mixture.sources)} sources: give one for each",
            field="weight",
        )
    sources = tuple(
        replace(source, weight=weight, passes=0.0)
        for source, weight in zip(mixture.sources, weights, strict=True)
    )
    return _shares(replace(mixture, sources=sources, temperature=0.0), datasets)


def check_columns(names: Sequence[str], datasets: Sequence[Dataset]) -> None:
    """Check that the sources can be mixed.

    Raises:  ConfigError: the sources differ in their columns, which the message lists, or two
    sources are the same dataset.
    """
    if len({dataset.dataset_id for dataset in datasets}) < len(datasets):
        ids = [dataset.dataset_id for dataset in datasets]
        twins = [name for name, at in zip(names, ids, strict=True) if ids.count(at) > 1]
        raise ConfigError(
            f"sources {' and '.join(map(repr, twins[:2]))} read the same rows of the same dataset:"
            " make one source of them, with the sum of their weights",
            field="sources",
        )
    specs_of = [dataset.columns.specs for dataset in datasets]
    if all(specs == specs_of[0] for specs in specs_of):
        return
    if all(set(specs) == set(specs_of[0]) for specs in specs_of):
        order = ", ".join(repr(spec.name) for spec in specs_of[0])
        raise ConfigError(
            "the sources have the same columns in different orders: give one, such as"
            f" columns=[{order}]",
            field="columns",
        )
    raise ConfigError(
        "the sources have different columns, and a batch has samples of several:\n"
        f"{_table(names, specs_of)}\nChoose columns that all have with columns=[…], or bring others"
        " into one form, of one source with Source(…, map=f), of numbers with dtype={…}",
        field="columns",
    )


def _table(names: Sequence[str], specs_of: Sequence[Sequence[ColumnSpec]]) -> str:
    """Format the columns that differ as a table, with a line for each."""
    known = [{spec.name: spec for spec in specs} for specs in specs_of]
    columns = list(dict.fromkeys(spec.name for specs in specs_of for spec in specs))
    rows = [["column", *names]]
    for column in columns:
        specs = [spec.get(column) for spec in known]
        if any(spec != specs[0] for spec in specs):
            rows.append([column, *map(_shown, specs)])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _shown(spec: ColumnSpec | None) -> str:
    if spec is None:
        return "(none)"
    shape = f" {list(spec.shape)}" if spec.shape else ""
    kind = "" if spec.kind.value == "fixed" else f"{spec.kind.value} "
    return f"{kind}{spec.dtype}{shape}".strip()


def _shares(mixture: MixtureAsked, datasets: Sequence[Dataset]) -> tuple[int, ...]:
    sources, counts = mixture.sources, [dataset.manifest.sample_count for dataset in datasets]
    row_bytes = [dataset.row_bytes for dataset in datasets]
    if mixture.temperature:
        return quantised(by_temperature(counts, mixture.temperature))
    if any(source.passes for source in sources):
        passes = [Fraction(source.passes) for source in sources]
        return quantised([passed * count for passed, count in zip(passes, counts, strict=True)])
    weights = [source.weight for source in sources]
    if mixture.unit is not MixUnit.TOKENS:
        return quantised(weights)
    lengths = _mean_lengths(mixture)
    # Without lengths, use the bytes of a sample, which are in proportion to its tokens.
    return quantised(of_tokens(weights, lengths if all(lengths) else row_bytes))


def _mean_lengths(mixture: MixtureAsked) -> list[float]:
    """Return the mean number of tokens in a sample of each source, 0 if unknown: given by the user,
    or the length of a pack.
    """
    packs = [source.view.pack for source in mixture.sources]
    return [
        source.mean_length or (0.0 if pack is None else pack.length)
        for source, pack in zip(mixture.sources, packs, strict=True)
    ]


def _in_samples(mixture: MixtureAsked, shares: Sequence[int]) -> int:
    """Return the length of an epoch in samples, from its length in tokens."""
    lengths = [Fraction(length) for length in _mean_lengths(mixture)]
    if not all(lengths):
        missing = mixture.sources[lengths.index(Fraction(0))].name
        raise ConfigError(
            f"a length of {mixture.length} tokens needs the mean length of the samples of each"
            f" source, and that of {missing!r} is missing: Source(…, mean_length=…)",
            field="mean_length",
        )
    tokens = sum(share * length for share, length in zip(shares, lengths, strict=True))
    return max(math.floor(mixture.length * sum(shares) / tokens), 1)


def _passes_max(source: SourceAsked, exhausted: Exhausted) -> int:
    if source.passes_max or exhausted is Exhausted.CYCLE:
        return source.passes_max
    return max(math.ceil(source.passes), 1)


# -- orders ---------------------------------------------------------------------------------------
#
# The orders of epochs, which the ranks of a job share.


_ORDERS_MAX = 8


def lacks_left(request: OpenJob, spec: JobSpec) -> bool:
    """Whether a job that was opened so has no part that earlier stages left for its first epoch."""
    return request.epoch > spec.first_epoch and any(stage.unread for stage in spec.stages[-1:])


def check_left(request: OpenJob, spec: JobSpec, epoch: int) -> None:
    """Check that a job that was opened so can read this epoch.

    Raises:  ConfigError: it was opened for later epochs, and this one has only what was unread.
    """
    if epoch == spec.first_epoch and lacks_left(request, spec):
        raise ConfigError(
            f"this loader continues in epoch {request.epoch}, and epoch {epoch} has only what was"
            f" unread before: choose it with set_epoch({epoch}) after the state is loaded",
            field="epoch",
        )


class Orders:
    """The orders that were used last."""

    def __init__(self) -> None:
        self._orders = FoundOnce[SampleOrder]("order", _ORDERS_MAX)

    async def of(
        self,
        spec: JobSpec,
        manifests: Sequence[Manifest],
        epoch: int,
        mix: MixHistory | None = None,
        tombstones: Sequence[Tombstone] = (),
        midway: tuple[TakenMidway, ...] = (),
    ) -> SampleOrder:
        """Return the order of an epoch of a job over these datasets, with the weights of `mix`, and
        without the removed rows, those included that were removed `midway`.

        Raises:  DataplaneError: the order cannot be made; the next call tries again.
        """
        spec = with_mix(spec, mix)
        # The key has all options except those on which no order depends, so that an option that is
        # added later is part of the key unless it is named here.
        named = replace(
            spec,
            global_batch=1,
            end=End.RAGGED,
            transforms=(),
            column_options=ColumnOptions(),
            view=samples_of(spec.view, spec.seed)[0],
        )
        key = (named, epoch, tuple(tombstones), midway, is_reduced(spec, manifests, epoch))
        of_epoch = spec, manifests, epoch, tombstones, midway
        return await self._orders.of(key, lambda: asyncio.to_thread(delivered_order, *of_epoch))
