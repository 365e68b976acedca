"""The manifests that a node opens for its trainers, under its policy (index/indexing.py has their
sources), and those that it opens early.

Listing and indexing wait for the store most of the time, and a node spends its start on imports. So
an embedded node learns at its start which dataset its trainer will request, and opens it at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dataplane.index.indexing import KeepPreamble, LongWork, open_manifest
from dataplane.index.viewing import viewed
from dataplane.model.config import NodeConfig
from dataplane.model.errors import DataplaneError
from dataplane.model.records import Region, View
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.store.connect import Stores
from dataplane.store.outage import Outages
from dataplane.store.urls import prefixes_of

if TYPE_CHECKING:
    from dataplane.store.url_policy import UrlPolicy

_ADVICE = "`dataplane index … --where … -o FILE` does this once for all runs"


def policy_of(config: NodeConfig) -> UrlPolicy | None:
    """Return a node's policy; None for an embedded node: its trainer has started it, and may open
    the same urls itself.

    Raises:  ConfigError: one of the allowed prefixes is not a url.
    """
    if config.embedded:
        return None
    from dataplane.store.url_policy import UrlPolicy

    return UrlPolicy(prefixes_of(config.allowed_urls))


class NodeStores:
    """The stores of a node, and their outages."""

    def __init__(self, config: NodeConfig) -> None:
        self.outages = Outages()
        self.stores = Stores(
            config.stall_timeout_s,
            config.fetch_timeout_s,
            self.outages.note,
            policy=policy_of(config),
            is_settled=True,
        )


class EarlyOpening:
    """Opens this dataset in a thread."""

    def __init__(self, config: NodeConfig, source: DatasetSource) -> None:
        self.stores = NodeStores(config)
        self._config, self._source = config, source
        self._lock = threading.Lock()
        self._taken = False
        self._keep: KeepPreamble | None = None
        self._kept: list[tuple[str, str, Region, bytes]] = []
        self._opened: Future[Manifest] = Future()
        threading.Thread(target=self._open, name="dataplane-early", daemon=True).start()

    @property
    def url(self) -> str:
        """The first url of the dataset."""
        return self._source.urls[0]

    def take(self, source: DatasetSource) -> Future[Manifest] | None:
        """Return the manifest if `source` is this dataset. Works once: later jobs list it again."""
        with self._lock:
            if self._taken or source != self._source:
                return None
            self._taken = True
        return self._opened

    def hand_on(self, keep: KeepPreamble) -> None:
        """Pass the preambles that were read, and those that are read later, to `keep`."""
        with self._lock:
            self._keep, kept, self._kept = keep, self._kept, []
        for preamble in kept:
            keep(*preamble)

    def _open(self) -> None:
        try:
            stores = self.stores.stores
            opened = open_manifest(
                self._config, stores, self._source, keep=self._remember, leaves_out=True
            )
        except BaseException as error:  # noqa: BLE001 - raised for the caller, even a panic
            self._opened.set_exception(error)
        else:
            self._opened.set_result(opened)

    def _remember(self, url: str, etag: str, place: Region, content: bytes) -> None:
        with self._lock:
            if self._keep is None:
                self._kept.append((url, etag, place, content))
                return
        self._keep(url, etag, place, content)


class ManifestSources:
    """Opens views of datasets whose urls are allowed: both the requested urls and those of the
    shards, which a saved manifest or a symbolic link may place elsewhere. The stores check, too.
    `keep` gets the preambles that are read meanwhile. `begin` is called with a url of each
    dataset, and starts the fetchers. `early` has begun to open one of the datasets.
    """

    def __init__(
        self,
        config: NodeConfig,
        stores: Stores,
        keep: KeepPreamble,
        begin: Callable[[str], None] = lambda _: None,
        early: EarlyOpening | None = None,
    ) -> None:
        self._config, self._stores, self._keep = config, stores, keep
        self._begin, self._early = begin, early
        self._policy = policy_of(config)
        if early is not None:
            early.hand_on(keep)
            with contextlib.suppress(DataplaneError):
                begin(early.url)

    def open(self, source: DatasetSource, view: View, given: Manifest | None) -> Manifest:
        """Open a view of a dataset; `given` is the dataset's manifest, if another node has it.

        Raises:  StoreDenied.  As `open_manifest` and `viewed`.
        """
        manifest = self._whole(source, given)
        with LongWork("counting rows", source.urls, "groups of blocks", _ADVICE) as work:
            return viewed(manifest, view, self._stores.connect, self._config, work)

    def _whole(self, source: DatasetSource, given: Manifest | None) -> Manifest:
        if self._policy is not None:
            self._policy.check_names(source.urls)
        begun = None if self._early is None else self._early.take(source)
        if begun is not None:
            return begun.result()
        with contextlib.suppress(DataplaneError):
            self._begin(source.urls[0])
        manifest = open_manifest(
            self._config, self._stores, source, given=given, keep=self._keep, leaves_out=True
        )
        if self._policy is not None:
            self._policy.check_all(manifest.shards.urls)
        return manifest
