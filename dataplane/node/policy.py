"""What a served node opens for its trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.config import NodeConfig
from dataplane.index.indexing import Connect
from dataplane.index.processes import open_manifest
from dataplane.plan.manifest import Manifest
from dataplane.rpc import messages
from dataplane.store.urls import normalise

if TYPE_CHECKING:
    from dataplane.store.policy import UrlPolicy


def policy_of(config: NodeConfig) -> UrlPolicy | None:
    """None for an embedded node: its trainer has started it, and may open the same itself."""
    if config.embedded:
        return None
    from dataplane.store.policy import UrlPolicy

    return UrlPolicy(allowed_urls(config))


def allowed_urls(config: NodeConfig) -> tuple[str, ...]:
    """The prefixes as `normalise` writes urls.

    Raises:  ConfigError: one is not a url.
    """
    return tuple(map(normalise, config.allowed_urls.split()))


def opening(config: NodeConfig, connect: Connect) -> Callable[[messages.DatasetSource], Manifest]:
    """Opens datasets whose urls are allowed: those that are asked for, and those of the shards,
    which a saved manifest or a symbolic link may place elsewhere. The stores of `connect` check,
    too.
    """
    policy = policy_of(config)

    def opened(source: messages.DatasetSource) -> Manifest:
        """Raises:  StoreDenied.  As `open_manifest`."""
        if policy is not None:
            policy.check_names(source.urls)
        manifest = open_manifest(config, connect, source)
        if policy is not None:
            policy.check_all(manifest.shards.urls)
        return manifest

    return opened
