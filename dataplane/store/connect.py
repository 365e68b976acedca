"""Find the store of a url: one per scheme and authority, shared by all threads of the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dataplane.base.meters import RequestCounts
from dataplane.model.errors import StoreError
from dataplane.model.records import StorePause
from dataplane.model.redact import redacted
from dataplane.store.base import Store
from dataplane.store.faults import Clock
from dataplane.store.local import LocalStore
from dataplane.store.outage import Observe, Outages, Pauses
from dataplane.store.retry import Retrying
from dataplane.store.urls import base_of, normalise, scheme_of

if TYPE_CHECKING:
    from dataplane.store.url_policy import UrlPolicy

OBSTORE_SCHEMES = ("s3", "gs", "az", "adl", "abfs", "abfss", "http", "https")
_READ_FROM = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "FSSPEC_")


class Stores:
    """Opens stores and keeps them, since open connections make later reads fast.

    `request_timeout_s` bounds one request. If a store does not answer, a call retries until it has
    failed for `budget_s`. `observe` is called about stores that do not answer: see `outage`.
    `pauses` exchanges stores' requests to slow down with other processes. `policy` says which urls
    may be opened. With `is_settled`, the environment of the first call is kept, since reading it
    takes longer than finding a store.
    """

    def __init__(
        self,
        budget_s: float = 120.0,
        request_timeout_s: float = 30.0,
        observe: Observe | None = None,
        clock: Clock | None = None,
        policy: UrlPolicy | None = None,
        *,
        is_settled: bool = False,
    ) -> None:
        self._policy = policy
        self._is_settled = is_settled
        self._settings: int | None = None
        self._budget_s = budget_s
        self._request_timeout_s = request_timeout_s
        self._observe = observe or Outages().note
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int, int], Retrying] = {}
        self.pauses = Pauses(self._clock)
        self.pauses.join(self._slow_down)

    def connect(self, url: str) -> Retrying:
        """Return the store of this url, with retries. Credentials come from the environment, and a
        changed environment opens another store, unless it is settled.

        Raises:  ConfigError: there is no such scheme, or the environment does not configure access.
        """
        base = base_of(normalise(url))
        settings = self._settings
        if settings is None or not self._is_settled:
            settings = self._settings = hash(_relevant(os.environ))
        key = (base, os.getpid(), settings)
        with self._lock:
            store = self._open.get(key)
            if store is None:
                inner = open_store(base, self._request_timeout_s, self._policy)
                store = Retrying(
                    inner,
                    base,
                    self._budget_s,
                    self._clock,
                    self._observe,
                    self._share,
                    self.connect,
                )
                self._open[key] = store
                for pause in self.pauses.now():
                    if pause.store == base:
                        store.slow_down(pause)
            return store

    def trouble(self, url: str) -> StoreError | None:
        """Return why reads of this url are waiting now; None if they are not."""
        stores = self._of(base_of(url))
        return next((error for store in stores if (error := store.trouble(url))), None)

    def take_counts(self) -> list[tuple[str, RequestCounts]]:
        """Return the requests to stores since the last call, with the names of the stores."""
        with self._lock:
            stores = [(base, store.meter.take()) for (base, *_), store in self._open.items()]
        return [(redacted(base), counts) for base, counts in stores if counts is not None]

    def close(self) -> None:
        """Forget every store, and end the calls that wait for one; connections close when the last
        call over them ends.
        """
        with self._lock:
            stores = list(self._open.values())
            self._open.clear()
        for store in stores:
            store.close()

    def _of(self, base: str) -> list[Retrying]:
        with self._lock:
            return [store for (of, *_), store in self._open.items() if of == base]

    def _share(self, pause: StorePause) -> None:
        self.pauses.publish(pause, self._slow_down)

    def _slow_down(self, pause: StorePause) -> None:
        for store in self._of(pause.store):
            store.slow_down(pause)


def open_store(
    base: str, request_timeout_s: float = 30.0, policy: UrlPolicy | None = None
) -> Store:
    """Open a separate store, without retries, that opens only urls that `policy` allows; None
    allows all.

    Raises:  ConfigError: there is no such scheme, or the environment does not configure access.
    """
    if policy is None:
        return _opened(base, request_timeout_s)
    from dataplane.store.url_policy import PolicedStore

    if scheme_of(base) in ("http", "https"):
        from dataplane.store import connections

        if connections.is_possible(os.environ):
            from dataplane.store.http_store import HttpStore

            return PolicedStore(HttpStore(base, request_timeout_s, policy), policy)
    return PolicedStore(_opened(base, request_timeout_s), policy)


def _opened(base: str, request_timeout_s: float) -> Store:
    scheme = scheme_of(base)
    if scheme == "file":
        return LocalStore()
    if scheme in OBSTORE_SCHEMES:
        # A late import, since a process that only reads local files does not need Rust's runtime.
        from dataplane.store.obstore_store import ObstoreStore

        return ObstoreStore(base, request_timeout_s)
    from dataplane.store.fsspec_store import FsspecStore

    return FsspecStore(base, request_timeout_s)


def connect(url: str) -> Store:
    """Return the store of this url, from those that the whole process shares: `Stores.connect`."""
    return _SHARED.connect(url)


def forget() -> None:
    """Close the shared stores, after a change of configuration outside of the environment."""
    _SHARED.close()


def _relevant(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, value) for name, value in environment.items() if name.upper().startswith(_READ_FROM)
    )


_SHARED = Stores()
