"""Opens the datasets of jobs, once for all that read them here: trainers, and nodes for which this
one makes slabs.

Invariants:
1. The ranks of one launch of a job see one manifest: it is opened once.
2. A dataset that nobody reads is forgotten, with its blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from dataplane.index.viewing import canonical_view, said_of_folders, with_view
from dataplane.model.changes import changes_of, resizes
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError, DataplaneError, SpecMismatch, rebuild
from dataplane.model.records import ColumnSpec, DatasetIdentity, MixUnit, View
from dataplane.model.redact import unsigned
from dataplane.node.counts import CategoryReader, PackCounter, PackedManifest, united
from dataplane.node.dataset import Dataset
from dataplane.node.datasets import (
    Datasets,
    Orders,
    check_columns,
    check_mixture,
    mixed_spec,
    requests_of,
    with_schedule,
    with_windows,
)
from dataplane.node.delivery import DeliveryArena
from dataplane.node.engine import Engine
from dataplane.node.own_reads import Categories, CollatedReader, FirstSource, MappedReader, OwnReads
from dataplane.node.shared_manifests import SharedManifests, Wanted
from dataplane.plan.counting import SHARES_SUM
from dataplane.plan.defaults import BlockSizes, with_shuffle
from dataplane.plan.manifest import Manifest
from dataplane.plan.orders import sample_count_of
from dataplane.plan.packed_blocks import with_counts
from dataplane.plan.packs import Packing
from dataplane.plan.shards import ShardTable
from dataplane.plan.stages import SourceRead, former_of, with_left
from dataplane.plan.views import identity_of_samples, mixed_identity, rows_only, samples_of
from dataplane.rpc import messages
from dataplane.rpc.bounds import check_name
from dataplane.scheduler import budgets
from dataplane.transforms.columns import shown
from dataplane.transforms.made_columns import CollatedColumns
from dataplane.transforms.options import in_order
from dataplane.transforms.packing import delivered_columns

OpenManifest = Callable[[messages.DatasetSource, View, Manifest | None], Manifest]
"""Opens a view of a dataset; with the manifest of the dataset, if another node has given it."""
_MANIFESTS_MAX = 16
_T = TypeVar("_T")


class Opened(Struct, frozen=True):
    """An opened manifest, with values that need a pass over its blocks, which runs in a thread.
    `rows` is the manifest of the view's rows, `packed` that of its samples, which may be packs;
    `folders` is the advice about the folders of its shards.
    """

    rows: Manifest
    view: View
    packed: PackedManifest
    identity: DatasetIdentity
    sizes: BlockSizes
    stored_bytes: int
    folders: str = ""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the samples."""
        return self.packed.manifest

    @property
    def packing(self) -> Packing | None:
        """The use of the tokens, if the samples are packs."""
        return self.packed.packing

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the whole dataset."""
        return self.manifest.fingerprint

    def handed_on(self) -> bytes:
        """Return the manifest of the whole dataset, with the counts for the view, as a file."""
        whole = self.rows.whole or self.rows
        if self.view.where and not self.view.limit:
            whole = with_view(whole, self.rows, self.view)
        if self.packed.counts is not None:
            whole = with_counts(whole, self.packed.name, self.packed.counts)
        return whole.to_bytes()


class OpenedJob(Struct, frozen=True):
    """The datasets of a job, one or those of a mixture; the columns that its collate function
    makes; and the shards of former datasets (`before`) from which the samples that are left were
    computed. If it is a former stage that is read to the end of an epoch, `finishing` has the
    request that opened it.
    """

    spec: JobSpec
    opened: tuple[Opened, ...]
    datasets: tuple[Dataset, ...]
    identity: DatasetIdentity
    sample_count: int
    collated: CollatedColumns | None = None
    before: tuple[ShardTable, ...] = ()
    finishing: messages.Finishing | None = None

    @property
    def columns(self) -> tuple[ColumnSpec, ...]:
        """The columns of its batches."""
        if self.collated is not None:
            return self.collated.specs
        return delivered_columns(self.datasets[0].columns.specs, self.spec)

    @property
    def codes(self) -> tuple[str, ...]:
        """Hashes of the files that define its functions."""
        made = [*(dataset.mapped for dataset in self.datasets), self.collated]
        return tuple(function.code for function in made if function is not None)

    @property
    def names_sources(self) -> bool:
        """Whether batches name the source of each sample."""
        return self.spec.mixture is not None and bool(self.spec.mixture.source_column)

    @property
    def largest(self) -> Dataset:
        """The dataset with the largest samples."""
        return max(self.datasets, key=lambda dataset: dataset.row_bytes)

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifests of all datasets."""
        return tuple(part.manifest for part in self.opened)

    @property
    def urls(self) -> tuple[str, ...]:
        """The urls of all datasets."""
        return tuple(url for part in self.opened for url in part.manifest.urls)

    @property
    def shard_count(self) -> int:
        """The number of shards of all datasets."""
        return sum(len(part.manifest.shards) for part in self.opened)

    @property
    def block_count(self) -> int:
        """The number of blocks of all datasets."""
        return sum(part.manifest.block_count for part in self.opened)


class DatasetOpener:
    """Opens the datasets of one node, and keeps the `orders` of their epochs. Manifests of other
    nodes come from `shared`, which is tried first.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        open_manifest: OpenManifest,
        shared: SharedManifests | None = None,
    ) -> None:
        self._engine = engine
        self._open_manifest = open_manifest
        self._shared, self.orders = shared, Orders()
        self._manifests: OrderedDict[Wanted, asyncio.Future[Opened]] = OrderedDict()
        self._readers: Counter[int] = Counter()
        self.datasets = Datasets(config)
        reads = OwnReads(engine, self.datasets.new_id)
        self._category_reader = CategoryReader(config, reads)
        self._mapped_reader = MappedReader(config, reads)
        self._collated_reader = CollatedReader(config, reads)
        self._pack_counter = PackCounter(config, reads, self._mapped_reader)

    async def manifest(self, request: messages.OpenJob) -> Opened:
        """Open the manifest that this job reads.

        Raises:  DataplaneError: the manifest cannot be opened; the next call tries again.
        """
        view, seed = samples_of(canonical_view(request.spec.view), request.spec.seed)
        key = Wanted(request.source, view, seed, request.job_id, request.incarnation)
        future = self._manifests.get(key)
        if future is None:
            future = asyncio.ensure_future(self._open(key))
            self._manifests[key] = future
            future.add_done_callback(partial(self._forget_failed, key))
            for old in [wanted for wanted in self._manifests if key.is_long_after(wanted)]:
                self._forget(old)
            others = [wanted for wanted in self._manifests if wanted.launch != key.launch]
            if len(others) > _MANIFESTS_MAX:
                self._forget(others[0])
        try:
            return await asyncio.shield(future)
        except ConfigError as error:
            if not (request.spec.view.map and str(error).startswith("where: there is no column")):
                raise
            raise ConfigError(
                f"{error}. where= comes before map=, so it is about stored columns", **error.nouns
            ) from None

    async def manifests(self, request: messages.OpenJob) -> tuple[Opened, ...]:
        """Open the manifests of all datasets that this job reads.

        Raises:  DataplaneError: one cannot be opened; the next call tries again.
        """
        if request.mixture is None:
            return (await self.manifest(request),)
        pairs = zip(request.mixture.sources, requests_of(request), strict=True)
        return tuple(await asyncio.gather(*itertools.starmap(self._manifest_of, pairs)))

    async def _manifest_of(self, source: messages.SourceAsked, request: messages.OpenJob) -> Opened:
        with naming(f"source {source.name!r}", source.source):
            return await self.manifest(request)

    async def job(self, request: messages.OpenJob, digest: str = "") -> OpenedJob:
        """Open the datasets of this job. Call `forget_unread` with each dataset if it is not read.
        If `digest` is given and differs from the job's, the job's manifests are forgotten.

        Raises:  ConfigError: the columns, or the mixture, are wrong, or the node does not run its
        functions.  FunctionError: a function fails over the first rows.  SpecMismatch: the job has
        another digest.  DataplaneError: a dataset cannot be opened; the next call tries again.
        """
        if request.finishes:
            return await self._finishing(request)
        if request.mixture is not None:
            return await self._mixture(request, digest)
        opened = await self.manifest(request)
        spec = _settled(spec_of(opened, request), opened.identity)
        (opened,), before = await self._with_left(request, spec, (opened,))
        self._check_digest(request, spec, digest)
        manifest, dp_size = opened.manifest, request.topology.dp_size
        mapped = await self._mapped_reader.of_job(manifest, spec)
        categories = await self._category_reader.of_job(
            manifest, spec, self.datasets.check, request.source.urls
        )
        dataset = await self.datasets.open(manifest, spec, categories, mapped)
        try:
            await self._inherit(opened, dataset)
            first = FirstSource(manifest, spec, mapped, categories)
            collated = await self._collated_reader.of_job(spec, dp_size, first)
        except BaseException:
            self.forget_unread(dataset)
            raise
        count = manifest.sample_count
        return OpenedJob(spec, (opened,), (dataset,), opened.identity, count, collated, before)

    async def _mixture(self, request: messages.OpenJob, digest: str) -> OpenedJob:
        assert request.mixture is not None
        check_mixture(request.mixture, request.spec.lanes)
        opened = await self.manifests(request)
        requests = with_windows(request, [part.sizes for part in opened])
        specs = tuple(map(spec_of, opened, requests))
        manifests = [part.manifest for part in opened]
        pairs = list(zip(manifests, specs, strict=True))
        # Pack the blocks of all sources or of none: a slab cannot have rows of both kinds.
        sources, mapped, packed = request.mixture.sources, [], True
        values, check = dict[str, Categories](), self.datasets.check
        for source, pair in zip(sources, pairs, strict=True):
            with naming(f"source {source.name!r}", source.source):
                mapped.append(await self._mapped_reader.of_job(*pair))
                packed = await self.datasets.can_pack(*pair, mapped[-1]) and packed
                of_source = await self._category_reader.of_job(*pair, check, source.source.urls)
                values[source.name] = of_source
        datasets = list[Dataset]()
        categories = await asyncio.to_thread(united, values)
        try:
            for source, opened_source, pair, made in zip(
                sources, opened, pairs, mapped, strict=True
            ):
                with naming(f"source {source.name!r}", source.source):
                    datasets.append(
                        await self.datasets.open(*pair, categories, made, packed=packed)
                    )
                await self._inherit(opened_source, datasets[-1])
            check_columns([source.name for source in sources], datasets)
            identity = mixed_identity([part.identity for part in opened])
            spec = _settled(mixed_spec(request, specs, datasets), identity)
            self._check_digest(request, spec, digest)
            delivered_columns(datasets[0].columns.specs, spec)
            opened, before = await self._with_left(request, spec, opened)
            manifests = [part.manifest for part in opened]
            counts = [manifest.sample_count for manifest in manifests]
            spec = await asyncio.to_thread(with_schedule, spec, counts)
            count = await asyncio.to_thread(sample_count_of, spec, manifests, 0)
            first = FirstSource(manifests[0], specs[0], mapped[0], categories)
            dp_size = request.topology.dp_size
            collated = await self._collated_reader.of_job(spec, dp_size, first)
        except BaseException:
            for dataset in datasets:
                self.forget_unread(dataset)
            raise
        return OpenedJob(spec, opened, tuple(datasets), identity, count, collated, before)

    async def _inherit(self, opened: Opened, dataset: Dataset) -> None:
        """Give the dataset the blocks that were decoded to count its packs."""
        former = opened.packed.take_counted()
        if former is not None:
            await self._engine.inherit(dataset, former)

    async def _with_left(
        self, request: messages.OpenJob, spec: JobSpec, opened: tuple[Opened, ...]
    ) -> tuple[tuple[Opened, ...], tuple[ShardTable, ...]]:
        """Add to the manifests which samples earlier stages left for the first epoch of this stage,
        if the job reads that epoch. Return also the shards of former datasets that were read.

        Raises:  ConfigError: the samples that earlier stages delivered cannot be computed.
        """
        stages = spec.stages
        if request.epoch > spec.first_epoch or not any(stage.unread for stage in stages[-1:]):
            return opened, ()
        manifests, before = await self._from_stages(with_left, request.source, spec, opened)
        with_them = tuple(
            replace(part, packed=replace(part.packed, manifest=manifest))
            for part, manifest in zip(opened, manifests, strict=True)
        )
        return with_them, tuple(former.manifest.shards for former in before)

    async def _finishing(self, request: messages.OpenJob) -> OpenedJob:
        """Open the last former stage of a job, whose epoch is read to its end; the job itself if
        nothing has changed since.

        Raises:  ConfigError: the datasets of the former stage are not known.  As `job`.
        """
        request = replace(request, finishes=False)
        now = await self.job(replace(request, epoch=request.spec.first_epoch + 1))
        if now.spec.stages != request.spec.stages:
            return now
        try:
            (spec, manifests), _ = await self._from_stages(
                former_of, request.source, now.spec, now.opened
            )
            stage = now.spec.stages[-1]
            batch = stage.global_batch or request.spec.global_batch  # 0 in states of older versions
            former = _former_request(request, replace(spec, global_batch=batch), now, manifests)
            opened = await self.job(former)
            if opened.spec.digest() != stage.digest:  # the user chose the window of a mixture
                former = replace(former, spec=replace(former.spec, window=spec.window))
                for dataset in opened.datasets:
                    self.forget_unread(dataset)
                opened = await self.job(former)
        finally:
            for dataset in now.datasets:
                self.forget_unread(dataset)
        ahead = messages.Finishing(former, now.spec, now.identity, now.sample_count)
        return replace(opened, finishing=ahead)

    async def _from_stages(
        self,
        compute: Callable[..., _T],
        source: messages.DatasetSource,
        spec: JobSpec,
        opened: tuple[Opened, ...],
    ) -> tuple[_T, list[SourceRead]]:
        """Call a function of plan/stages.py with a job's spec, its manifests, a function that opens
        views of datasets, and the datasets of former stages. Return also these datasets.

        Raises:  ConfigError: the state has only a part of its run's options.  As the function.
        """
        stages, loop = spec.stages, asyncio.get_running_loop()
        if stages[-1].cursor and stages[-1].spec is None:
            raise ConfigError(
                "the state does not have all options of its run: of a text above 2,000 characters "
                "(such as a long where=) it keeps the beginning, and a later version may have "
                "options of its own. So what the run delivered cannot be computed: pass "
                'change="restart"',
                field="change",
            )

        async def packed(rows: Manifest, view: View, seed: int) -> Manifest:
            counted = await self._pack_counter.packed(rows, view, seed, source.urls)
            former = counted.take_counted()
            if former is not None:
                self._engine.forget_dataset(former)
            return counted.manifest

        def viewed(whole: Manifest, view: View, seed: int) -> Manifest:
            view, seed = samples_of(canonical_view(view), seed)
            rows = self._open_manifest(source, rows_only(view), whole)
            return asyncio.run_coroutine_threadsafe(packed(rows, view, seed), loop).result()

        before = list[SourceRead]()

        def computed() -> _T:
            for number, stage in enumerate(stages):
                for name, urls in stage.before:
                    manifest = self._open_manifest(messages.DatasetSource(urls), View(), None)
                    before.append(SourceRead(name, View(), manifest, number))
            return compute(spec, [part.manifest for part in opened], viewed, before)

        return await asyncio.to_thread(computed), before

    def _check_digest(self, request: messages.OpenJob, spec: JobSpec, digest: str) -> None:
        own = changes_of(request.entries).job_digest(spec.slabs_digest)
        if digest and digest != own:
            self.forget_manifests(request.job_id)
            raise SpecMismatch(
                f"another node has a job of digest {digest}, and here its spec has "
                f"{own}: fingerprint {spec.fingerprint}, {spec.lanes} lanes, window "
                f"{spec.window}. The dataset was changed, or its shards are others here",
                field="digest",
                expected=digest,
                found=own,
            )

    def keep(self, job: OpenedJob) -> OpenedJob:
        """Replace datasets by equal ones that are being read, where there are any."""
        return replace(job, datasets=tuple(map(self.datasets.keep, job.datasets)))

    def open_delivery(self, delivery: DeliveryArena) -> None:
        """Allow slabs to be made in this arena; its datasets are in use until `close_delivery`."""
        self._readers.update(dataset.dataset_id for dataset in delivery.datasets)
        self._engine.open_delivery(delivery)

    def close_delivery(self, delivery: DeliveryArena) -> None:
        """Close an arena that has no users left."""
        self._engine.close_delivery(delivery)
        self._readers.subtract(dataset.dataset_id for dataset in delivery.datasets)
        for dataset in delivery.datasets:
            self.forget_unread(dataset)

    def forget_unread(self, dataset: Dataset) -> None:
        """Free a dataset's blocks, unless somebody reads it."""
        if not self._readers[dataset.dataset_id]:
            del self._readers[dataset.dataset_id]
            self._engine.forget_dataset(dataset)
            self.datasets.forget(dataset)

    def forget_manifests(self, job_id: str) -> None:
        """Forget a job's manifests, so that the next rank that opens it lists the dataset again."""
        for key in [key for key in self._manifests if key.job_id == job_id]:
            self._forget(key)

    def _forget(self, key: Wanted) -> None:
        future = self._manifests.pop(key)
        if future.done() and not future.cancelled() and future.exception() is None:
            former = future.result().packed.take_counted()
            if former is not None:
                self._engine.forget_dataset(former)
        if self._shared is not None:
            self._shared.forget(key)

    def _forget_failed(self, key: Wanted, done: asyncio.Future[Opened]) -> None:
        """Forget a failed opening, so that the next rank that opens this dataset tries again."""
        if (done.cancelled() or done.exception()) and self._manifests.get(key) is done:
            del self._manifests[key]

    async def _open(self, key: Wanted) -> Opened:
        async def make(given: Manifest | None) -> Opened:
            rows = await asyncio.to_thread(self._open_manifest, key.source, key.view, given)
            packed = await self._pack_counter.packed(rows, key.view, key.seed, key.source.urls)
            return await asyncio.to_thread(_opened, rows, key.view, packed)

        return await (make(None) if self._shared is None else self._shared.opened(key, make))


def _former_request(
    request: messages.OpenJob, spec: JobSpec, now: OpenedJob, manifests: Sequence[Manifest]
) -> messages.OpenJob:
    """Return the request for a former stage with this spec, which read the manifests."""
    mixture = request.mixture
    asked = [request.source] if mixture is None else [source.source for source in mixture.sources]
    own = dict(zip((part.fingerprint for part in now.opened), asked, strict=True))
    wholes = [manifest.whole or manifest for manifest in manifests]
    listed = [messages.DatasetSource(tuple(whole.shards.urls), whole.format) for whole in wholes]
    places = [own.get(whole.fingerprint, at) for whole, at in zip(wholes, listed, strict=True)]
    images = tuple(
        replace(image, replaces=image.replaces or now.spec.replaces_images)
        for image in spec.transforms
    )
    spec = replace(spec, transforms=images, view=replace(spec.view, bad_max=now.spec.bad_max))
    if spec.mixture is None:
        return replace(request, source=places[0], spec=spec, mixture=None)
    unit = MixUnit.TOKENS if spec.mixture.tokens else MixUnit.SAMPLES
    sources = tuple(
        messages.SourceAsked(
            source.name, place, source.share / SHARES_SUM, passes_max=source.passes_max,
            view=replace(source.view, bad_max=now.spec.bad_max),
        )
        for source, place in zip(spec.mixture.sources, places, strict=True)
    )  # fmt: skip
    former = messages.MixtureAsked(
        sources, unit if spec.mixture.batch == 1 else MixUnit.BATCH, spec.mixture.exhausted,
        spec.mixture.length, source_column=spec.mixture.source_column,
    )  # fmt: skip
    every = messages.DatasetSource(tuple(url for place in places for url in place.urls))
    return replace(request, source=every, spec=replace(spec, window=0), mixture=former)


@contextlib.contextmanager
def naming(name: str, source: messages.DatasetSource) -> Iterator[None]:
    """Add the name of a mixture's source, or of a stage, to errors within.

    Raises:  DataplaneError: the same error, with the name, and the urls unless the error names a
    shard.
    """
    try:
        yield
    except DataplaneError as error:
        where = name + ("" if "shard" in error.nouns else f" ({shown(map(unsigned, source.urls))})")
        raise rebuild(type(error).__name__, f"{where}: {error}", error.nouns) from error


def _opened(rows: Manifest, view: View, packed: PackedManifest) -> Opened:
    manifest = packed.manifest
    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    identity, stored_bytes = identity_of_samples(manifest), int(manifest.block_length.sum())
    return Opened(rows, view, packed, identity, sizes, stored_bytes, said_of_folders(rows))


def check_names(request: messages.OpenJob) -> None:
    """Limit the lengths of names, since they are stored and logged. (The size of a packet limits
    urls and columns.)
    """
    check_name("job_id", request.job_id)
    check_name("incarnation", request.incarnation)
    check_name("member_id", request.member_id)
    check_name("sharing", request.sharing, needed=False)
    check_name("format", request.source.format, needed=False)
    for source in () if request.mixture is None else request.mixture.sources:
        check_name("source", source.name)
        check_name("format", source.source.format, needed=False)


def check_blocks(dataset: Dataset, budget: int) -> None:
    """Check that one block fits into the block arena: raw and decoded together, while it is
    decoded.
    """
    marks = dataset.blocks.marks
    largest = dataset.largest_block
    need = int(marks.raw[largest] + marks.decoded[largest])
    if need > budget:
        url = dataset.url(largest)
        raise budgets.block_too_large(url, need, budget)


def spec_of(opened: Opened, request: messages.OpenJob) -> JobSpec:
    """Return the requested spec, with every default filled in."""
    given = request.spec
    return replace(
        with_shuffle(given, opened.sizes),
        fingerprint=opened.manifest.fingerprint,
        transforms=tuple(sorted(given.transforms, key=lambda image: image.column)),
        column_options=in_order(given.column_options),
        view=canonical_view(given.view),
        mixture=None,
    )


def _settled(spec: JobSpec, identity: DatasetIdentity) -> JobSpec:
    """Return the spec without its last former stage, if that was a job with this very spec: nothing
    has changed since its state was saved, and no schedule ended it.
    """
    if not spec.stages or spec.stages[-1].planned:
        return spec
    *others, last = spec.stages
    before = replace(spec, stages=tuple(others))
    has_same = last.dataset.content == identity.content
    is_same = has_same and last.spec is not None and last.spec.facts() == before.facts()
    is_same |= before.digest() == last.digest and (has_same or not resizes(spec))
    return before if is_same else spec


def software_of(job: OpenedJob, pixels: str) -> str:
    """Name the software that, besides its spec, determines a job's batches: the image decoder, and
    the code of the job's functions; "" if there is neither.
    """
    return " ".join(filter(None, (pixels, *job.codes)))


async def pixels_of(spec: JobSpec) -> str:
    """Name the software that decodes this job's images on this host; "" without images."""
    return await asyncio.to_thread(_maker_name) if spec.transforms else ""


def _maker_name() -> str:
    # This imports Pillow, which a node without images does not need.
    from dataplane.transforms.pixels_library import maker

    return maker().name
