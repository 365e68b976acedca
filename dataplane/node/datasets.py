"""The datasets that the jobs of a node read, each planned once.

A table of 100,000 columns takes seconds to plan, so that is done in threads: the event loop, and
with it every other trainer, goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from functools import partial

from dataplane.config import JobSpec, NodeConfig
from dataplane.node.categories import Categories
from dataplane.node.dataset import Dataset, can_pack, columns_of, dataset_of
from dataplane.plan.manifest import Manifest
from dataplane.redact import redacted, unsigned
from dataplane.transforms.images import delivered
from dataplane.transforms.lists import check_lists
from dataplane.transforms.nulls import check_fills, check_nulls
from dataplane.worker.limits import WorkerBytes

_URLS_SHOWN_MAX = 16
_Signed = tuple[str, ...]
_PlanKey = tuple[JobSpec, _Signed]


class Datasets:
    """What is read now, by what jobs must be equal in to share blocks; and what was planned, for as
    long as somebody has it.
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
        """A name for a dataset in the workers, that no other has."""
        return next(self._numbers)

    async def check(self, manifest: Manifest, spec: JobSpec) -> None:
        """Raises:  ConfigError: as `open`."""
        await asyncio.to_thread(self._plan, 0, manifest, spec, {})

    async def open(self, manifest: Manifest, spec: JobSpec, categories: Categories) -> Dataset:
        """How a job with this spec reads the manifest; codes are of these categories.

        Raises:  ConfigError: whatever is wrong with the columns.
        """
        key = (spec, _signed(manifest))
        dataset = self._planned.get(key)
        if dataset is None:
            future = self._planning.get(key)
            if future is None:
                loop, number = asyncio.get_running_loop(), self.new_id()
                future = loop.run_in_executor(None, self._plan, number, manifest, spec, categories)
                self._planning[key] = future
                future.add_done_callback(partial(self._end_planning, key))
            dataset = await asyncio.shield(future)
        dataset = self._planned[key] = self.keep(dataset, spec)
        return dataset

    def keep(self, dataset: Dataset, spec: JobSpec) -> Dataset:
        """The dataset that is read for this one: itself, unless an equal one is read already."""
        manifest = dataset.manifest
        key = (spec.fingerprint, spec.column_options, _signed(manifest), dataset.message.pack)
        return self._read.setdefault(key, dataset)

    def forget(self, dataset: Dataset) -> None:
        """Nobody reads it any more."""
        self._read = {key: each for key, each in self._read.items() if each is not dataset}

    def _plan(
        self, number: int, manifest: Manifest, spec: JobSpec, categories: Categories
    ) -> Dataset:
        config = self._config
        columns = columns_of(manifest, spec)
        dataset = dataset_of(
            number,
            manifest,
            spec,
            packed=can_pack(manifest, spec, config.block_arena_bytes, columns),
            worker_bytes=WorkerBytes.of(config),
            arena_bytes=config.block_arena_bytes,
            known=columns,
            categories=categories,
        )
        check_fills(dataset.columns.leaves)
        check_lists(dataset.columns.specs, spec.column_options)
        check_nulls(dataset.columns.leaves, manifest.nulls, manifest.shards.urls)
        delivered(dataset.columns.specs, spec.transforms)
        return dataset

    def _end_planning(self, key: _PlanKey, done: asyncio.Future[Dataset]) -> None:
        del self._planning[key]
        if not done.cancelled():
            done.exception()  # whoever waited has it; if nobody did, it is no news


def _signed(manifest: Manifest) -> _Signed:
    """Jobs whose urls were signed apart share no blocks: one signature ends before the other."""
    return tuple(url for url in manifest.urls[:_URLS_SHOWN_MAX] if unsigned(url) != url)


def shown(urls: Sequence[str]) -> str:
    """A dataset's urls as people see them."""
    shown = ", ".join(map(redacted, urls[:_URLS_SHOWN_MAX]))
    more = len(urls) - _URLS_SHOWN_MAX
    return f"{shown}, and {more} more" if more > 0 else shown
