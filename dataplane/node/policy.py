"""The urls that a served node opens for its trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.config import NodeConfig
from dataplane.errors import DataplaneError
from dataplane.index.batches import KeepPreamble
from dataplane.index.processes import open_manifest
from dataplane.index.slow import LongWork
from dataplane.index.viewing import viewed
from dataplane.model import View
from dataplane.plan.manifest import Manifest
from dataplane.rpc import messages
from dataplane.store.urls import prefixes_of

if TYPE_CHECKING:
    from dataplane.node.early import EarlyOpening
    from dataplane.store.connect import Stores
    from dataplane.store.policy import UrlPolicy


_ADVICE = "`dataplane index … --where … -o FILE` does this once for all runs"

OpenManifest = Callable[[messages.DatasetSource, View, Manifest | None], Manifest]
"""Opens a view of a dataset; with the manifest of the dataset, if another node has given it."""


def policy_of(config: NodeConfig) -> UrlPolicy | None:
    """Return a node's policy; None for an embedded node: its trainer has started it, and may open
    the same urls itself.
    """
    if config.embedded:
        return None
    from dataplane.store.policy import UrlPolicy

    return UrlPolicy(allowed_urls(config))


def allowed_urls(config: NodeConfig) -> tuple[str, ...]:
    """Return the prefixes, normalised by `normalise`.

    Raises:  ConfigError: one is not a url.
    """
    return prefixes_of(config.allowed_urls)


def opening(
    config: NodeConfig,
    stores: Stores,
    keep: KeepPreamble,
    begin: Callable[[str], None] = lambda _: None,
    early: EarlyOpening | None = None,
) -> OpenManifest:
    """Return a function that opens views of datasets whose urls are allowed: both the requested
    urls and those of the shards, which a saved manifest or a symbolic link may place elsewhere. The
    stores check, too. `keep` gets the preambles that are read meanwhile. `begin` is called with
    each dataset, and starts the processes that read its blocks. `early` has begun with one of them.
    """
    policy = policy_of(config)
    if early is not None:
        early.hand_on(keep)
        with contextlib.suppress(DataplaneError):
            begin(early.url)

    def whole(source: messages.DatasetSource, given: Manifest | None) -> Manifest:
        if policy is not None:
            policy.check_names(source.urls)
        begun = None if early is None else early.take(source)
        if begun is not None:
            return begun.result()
        with contextlib.suppress(DataplaneError):
            begin(source.urls[0])
        manifest = given or open_manifest(config, stores, source, keep)
        if policy is not None:
            policy.check_all(manifest.shards.urls)
        return manifest

    def opened(source: messages.DatasetSource, view: View, given: Manifest | None) -> Manifest:
        """Open a dataset.

        Raises:  StoreDenied.  As `open_manifest` and `viewed`.
        """
        manifest = whole(source, given)
        with LongWork("counting rows", source.urls, "groups of blocks", _ADVICE) as work:
            return viewed(manifest, view, stores.connect, config, work)

    return opened
