"""The store of a url: one per scheme and authority, shared by all threads of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from dataplane.store.base import Store
from dataplane.store.local import LocalStore
from dataplane.store.retry import RETRY_TABLE, Clock, Retrying, RetryTable
from dataplane.store.urls import base_of, normalise, scheme_of

OBSTORE_SCHEMES = ("s3", "gs", "az", "adl", "abfs", "abfss", "http", "https")
_READ_FROM = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "FSSPEC_")


class Stores:
    """Opens stores and keeps them: their connections are what makes a second read quick.

    `request_timeout_s` bounds one request, `budget_s` a call with all its retries.
    """

    def __init__(
        self,
        table: RetryTable = RETRY_TABLE,
        budget_s: float = 120.0,
        request_timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._table = table
        self._budget_s = budget_s
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int, int], Retrying] = {}

    def connect(self, url: str) -> Store:
        """The store of this url, with retries. Credentials come from the environment, and a
        changed environment opens another store.

        Raises:  ConfigError: no such scheme, or an environment that does not say how.
        """
        base = base_of(normalise(url))
        key = (base, os.getpid(), hash(_relevant(os.environ)))
        with self._lock:
            store = self._open.get(key)
            if store is None:
                inner = open_store(base, self._request_timeout_s)
                store = Retrying(inner, self._table, self._budget_s, self._clock)
                self._open[key] = store
            return store

    def close(self) -> None:
        """Forget every store; their connections close when their last call ends."""
        with self._lock:
            self._open.clear()


def open_store(base: str, request_timeout_s: float = 30.0) -> Store:
    """A store of its own, without retries.

    Raises:  ConfigError: no such scheme, or an environment that does not say how.
    """
    scheme = scheme_of(base)
    if scheme == "file":
        return LocalStore()
    if scheme in OBSTORE_SCHEMES:
        # Late, since a process that only reads local files needs no runtime of Rust's.
        from dataplane.store.obstore_store import ObstoreStore

        return ObstoreStore(base, request_timeout_s)
    from dataplane.store.fsspec_store import FsspecStore

    return FsspecStore(base)


def connect(url: str) -> Store:
    """The store of this url, from those that the whole process shares. See `Stores.connect`."""
    return _SHARED.connect(url)


def forget() -> None:
    """Close the shared stores: after a change that no environment variable shows, and in tests."""
    _SHARED.close()


def _relevant(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value) for name, value in environment.items() if name.upper().startswith(_READ_FROM)
    )


_SHARED = Stores()
