"""A fetcher: a process that reads ranges of shards from object stores into the node's arenas.

Reading from a store takes processor time, most of it for TLS, in threads that share one interpreter
lock. In processes of their own they take none of the node's time, and as many processors as the
rate needs.

Invariants:
1. It writes only into the region of a read, and only until it reports the end of that read.
2. It parses none of the bytes that it reads. It has the node's credentials, since it does what the
   node's own stores do; it gets them over a socket that nobody else can open.
3. Each read ends with one message, whatever the store raises.
4. It exits when its socket closes, so fetchers do not outlive their node.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dataplane.arena.memfd import Arena
from dataplane.errors import DataplaneError, PeerLost, StoreError
from dataplane.fetcher.limits import READS_MAX
from dataplane.machine import collect_rarely
from dataplane.rpc import fetches, local, tasks
from dataplane.store.connect import Stores
from dataplane.store.gate import Pause, Share
from dataplane.store.outage import Observe, Outage
from dataplane.store.pieces import copy_into, fill
from dataplane.trace import configure

_LOOK_S = 0.25
"""While reads are under way, the node is told in such intervals why they are delayed."""


MakeStores = Callable[[Observe, Share], Stores]


class Reads:
    """The reads of this process. `make_stores` gets what the stores report to."""

    def __init__(
        self, sock: socket.socket, arenas: dict[int, Arena], make_stores: MakeStores
    ) -> None:
        self._sock = sock
        self._arenas = arenas
        self._stores = make_stores(self._observe, self._share)
        self._threads = ThreadPoolExecutor(READS_MAX, "dataplane-fetch")
        self._lock = threading.Lock()
        self._reading: Counter[str] = Counter()
        self._trouble: dict[str, str] = {}

    def serve(self) -> None:
        """Carry out the node's orders.   Raises:  PeerLost: the node is gone."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            with self._lock:
                is_idle = not self._reading and not self._trouble
            if not poll.poll(None if is_idle else _LOOK_S * 1000):
                self._look()
                continue
            body = local.receive(self._sock, fetches.ToFetcher)[0].body
            if isinstance(body, fetches.ReadRange):
                with self._lock:
                    self._reading[body.url] += 1
                self._threads.submit(self._serve, body)
            elif isinstance(body, fetches.CopyPreamble):
                self._threads.submit(self._serve, body)
            elif isinstance(body, fetches.StorePause):
                self._stores.slow_down(Pause(body.store, body.level, body.left_s))

    def close(self) -> None:
        """Wait for the reads that are under way."""
        self._threads.shutdown()

    def _serve(self, order: fetches.ReadBody) -> None:
        """In a thread: carry out an order, and report its end."""
        began = time.monotonic()
        error = self._done(order)
        took_s = time.monotonic() - began
        if isinstance(order, fetches.ReadRange):
            with self._lock:
                self._reading[order.url] -= 1
                if not self._reading[order.url]:
                    del self._reading[order.url]
        self._tell(fetches.ReadEnded(order.number, error, took_s, time.process_time()))

    def _done(self, order: fetches.ReadBody) -> DataplaneError | None:
        try:
            if isinstance(order, fetches.CopyPreamble):
                self._copy(order)
            else:
                self._read(order)
        except DataplaneError as error:
            return error
        except BaseException as error:  # noqa: BLE001 - also a library's panic: the node waits
            url = order.url if isinstance(order, fetches.ReadRange) else "a preamble"
            return StoreError(f"{url}: {type(error).__name__}: {error}", shard=url)
        return None

    def _read(self, order: fetches.ReadRange) -> None:
        arena, place = self._arenas[order.arena_id], order.into
        arena.populate_once(place.offset, place.length)
        with arena.view(place.offset, place.length) as into:
            store = self._stores.connect(order.url)
            fill(store, order.url, order.offset, order.etag, into)

    def _copy(self, order: fetches.CopyPreamble) -> None:
        kept, into = order.kept, order.into
        with (
            self._arenas[tasks.PREAMBLE_ARENA].view(kept.offset, kept.length) as source,
            self._arenas[tasks.BLOCK_ARENA].view(into.offset, into.length) as target,
        ):
            copy_into(target, source)

    def _look(self) -> None:
        """Tell the node what has changed of why reads are delayed."""
        with self._lock:
            urls = [*self._reading]
        found = {url: error for url in urls if (error := self._stores.trouble(url)) is not None}
        for url, error in found.items():
            if self._trouble.get(url) != str(error):
                self._trouble[url] = str(error)
                self._tell(fetches.ShardTrouble(url, error))
        for url in self._trouble.keys() - found.keys():
            del self._trouble[url]
            self._tell(fetches.ShardTrouble(url))

    def _observe(self, outage: Outage) -> None:
        seen = (outage.store, outage.since, outage.error, outage.asked, outage.until)
        self._tell(fetches.StoreSeen(*seen))

    def _share(self, pause: Pause) -> None:
        self._tell(fetches.StorePause(pause.store, pause.level, pause.left_s))

    def _tell(self, body: fetches.FromFetcherBody) -> None:
        try:
            local.send(self._sock, fetches.FromFetcher(body))
        except PeerLost:
            os._exit(0)


def run(sock: socket.socket) -> None:
    """Read what the node orders, until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    collect_rarely()
    try:
        first, descriptors = local.receive(sock, fetches.ToFetcher)
        start = first.body
        assert isinstance(start, fetches.StartFetching)
        configure(start.log_level, start.log_format)
        os.environb.clear()
        os.environb.update(entry.partition(b"=")[::2] for entry in start.environment)
        ids = (tasks.BLOCK_ARENA, tasks.PREAMBLE_ARENA)
        arenas = {
            number: Arena.attach(fd, os.fstat(fd).st_size)
            for number, fd in zip(ids, descriptors, strict=True)
        }

        def stores(observe: Observe, share: Share) -> Stores:
            return Stores(start.budget_s, start.request_timeout_s, observe, share=share)

        Reads(sock, arenas, stores).serve()
    except PeerLost:
        return


def main(descriptor: int, _memory_bytes: int) -> None:
    """The process: its socket is an inherited descriptor. Its threads do not keep it."""
    with socket.socket(fileno=descriptor) as sock:
        run(sock)
    os._exit(0)
