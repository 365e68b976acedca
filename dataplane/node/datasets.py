"""The datasets that the jobs of a node read, each planned once.

Planning a table of 100,000 columns takes seconds, so it is done in threads, and the event loop
keeps serving other trainers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import Sequence
from functools import partial

from dataplane.index.folders import explaining_folders
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.redact import redacted, unsigned
from dataplane.node.categories import Categories
from dataplane.node.dataset import Dataset, can_pack, dataset_of
from dataplane.node.job_columns import columns_of
from dataplane.plan.manifest import Manifest
from dataplane.rpc.bounds import URLS_MAX
from dataplane.transforms.lists import check_lists
from dataplane.transforms.made_columns import MappedColumns
from dataplane.transforms.nulls import check_fills, check_nulls
from dataplane.transforms.packing import delivered_columns
from dataplane.worker.limits import WorkerBytes

_URLS_SHOWN_MAX = 16
_Signed = tuple[str, ...]
_PlanKey = tuple[JobSpec, _Signed, bool | None]


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
        self._planning: dict[_PlanKey, asyncio.Future[Dataset]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._read)

    def new_id(self) -> int:
        """A unique name for a dataset, used with the workers."""
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
        key = (spec, _signed(manifest), packed)
        dataset = self._planned.get(key)
        if dataset is None:
            future = self._planning.get(key)
            if future is None:
                loop, number = asyncio.get_running_loop(), self.new_id()
                future = loop.run_in_executor(
                    None, self._plan, number, manifest, spec, categories, mapped, packed
                )
                self._planning[key] = future
                future.add_done_callback(partial(self._end_planning, key))
            dataset = await asyncio.shield(future)
        dataset = self._planned[key] = self.keep(dataset)
        return dataset

    def keep(self, dataset: Dataset) -> Dataset:
        """Return the dataset to read: this one, unless an equal one is being read."""
        manifest = dataset.manifest
        key = dataset.digest, _signed(manifest)
        return self._read.setdefault(key, dataset)

    def forget(self, dataset: Dataset) -> None:
        """Forget a dataset that has no readers left."""
        self._read = {key: each for key, each in self._read.items() if each is not dataset}

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
            check_fills(dataset.columns.leaves)
            check_lists(dataset.columns.specs, spec.column_options)
            if mapped is None:  # else its nulls are not those of the shards
                check_nulls(dataset.columns.leaves, manifest.nulls, manifest.shards.urls)
            delivered_columns(dataset.columns.specs, spec)
            return dataset

    def _end_planning(self, key: _PlanKey, done: asyncio.Future[Dataset]) -> None:
        del self._planning[key]
        if not done.cancelled():
            done.exception()  # callers that waited have it; without callers it does not matter


def _signed(manifest: Manifest) -> _Signed:
    """Return the signatures of urls: jobs with differently signed urls share no blocks, since the
    signatures expire at different times.
    """
    return tuple(url for url in manifest.urls[:_URLS_SHOWN_MAX] if unsigned(url) != url)


def shown(urls: Sequence[str]) -> str:
    """A dataset's urls for display."""
    shown = ", ".join(map(redacted, urls[:_URLS_SHOWN_MAX]))
    more = len(urls) - _URLS_SHOWN_MAX
    return f"{shown}, and {more} more" if more > 0 else shown


def declared(urls: Sequence[str]) -> tuple[str, ...]:
    """Return a dataset's urls for the coordinator, which checks them against the prefixes of a
    token: these urls, or their common beginning if there are many.
    """
    if len(urls) > URLS_MAX:
        start = os.path.commonprefix([min(urls), max(urls)])  # noqa: RUF071 - of characters
        return (f"{unsigned(start)}*",)
    return tuple(map(unsigned, urls))
