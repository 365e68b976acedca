"""Open a dataset while its node still starts: the dataset for which a trainer started the node.

Listing and indexing wait for the store most of the time, and a node spends its start on imports. So
an embedded node learns at its start which dataset its trainer will request.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from dataplane.config import NodeConfig
from dataplane.index.batches import KeepPreamble
from dataplane.index.processes import open_manifest
from dataplane.model import Region
from dataplane.node.index_ahead import IndexAhead
from dataplane.node.policy import policy_of
from dataplane.plan.manifest import Manifest
from dataplane.rpc.messages import DatasetSource
from dataplane.store.connect import Stores
from dataplane.store.outage import Outages

_AHEAD_S = 1.0
"""A dataset that is not indexed by then is large."""


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
    """Opens this dataset in a thread, with the facts that were collected ahead."""

    def __init__(
        self, config: NodeConfig, source: DatasetSource, ahead: IndexAhead | None = None
    ) -> None:
        self.stores = NodeStores(config)
        self._config, self._source, self._ahead = config, source, ahead
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
        """Return the dataset, if it is this one. Works once: each further job lists it again."""
        with self._lock:
            if self._taken or source != self._source:
                return None
            self._taken = True
        return self._opened

    def hand_on(self, keep: KeepPreamble) -> None:
        """Give `keep` the preambles that were read, and later ones."""
        with self._lock:
            self._keep, kept, self._kept = keep, self._kept, []
        for preamble in kept:
            keep(*preamble)

    def _open(self) -> None:
        try:
            found = None if self._ahead is None else self._ahead.found(_AHEAD_S)
            if found is not None:
                for at, offset, content in found.preambles:
                    url, _, etag = found.listed[at]
                    self._remember(url, etag, Region(offset, len(content)), content)
            opened = open_manifest(
                self._config, self.stores.stores, self._source, self._remember, found
            )
        except BaseException as error:  # noqa: BLE001 - raised for who takes it, also a panic
            self._opened.set_exception(error)
        else:
            self._opened.set_result(opened)

    def _remember(self, url: str, etag: str, place: Region, content: bytes) -> None:
        with self._lock:
            if self._keep is None:
                self._kept.append((url, etag, place, content))
                return
        self._keep(url, etag, place, content)
