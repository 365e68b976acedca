"""Manifests that this node sends to other nodes, which open the same datasets.

A manifest is sent as the bytes of its file, after their length, in an arena of its own: other nodes
read it piece by piece, like a raw block.

Invariants:
1. Each request is answered once. Until the bytes have been made, requests are refused; the other
   node repeats them.
2. Bytes that no node has requested for a while take no memory; they are made again on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct

from dataplane.arena.memfd import Arena
from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.model.errors import DataplaneError
from dataplane.model.records import BlockForm, Region
from dataplane.rpc.lending import NO_DATASET, Asked
from dataplane.store.reads import copy_into

IDLE_S = 60.0
HEAD_BYTES = 8
"""Before the manifest: its length, little-endian."""

Content = Callable[[], bytes]
"""The bytes of a manifest; it takes time, and is called in a thread."""
_trace = Trace("node")


class ManifestLender(Protocol):
    """The part of `Lending` that sends manifests."""

    def keys(self, job_id: str, generation: int, key: bytes) -> None:
        """Implement `Lending.keys`."""

    def lend_arena(self, arena_id: int, fd: int) -> None:
        """Implement `Lending.lend_arena`."""

    def return_arena(self, arena_id: int) -> None:
        """Implement `Lending.return_arena`."""

    def give(self, number: int, region: Region, arena_id: int, *, is_data: bool) -> None:
        """Implement `Lending.give`."""

    def refuse(self, number: int) -> None:
        """Implement `Lending.refuse`."""


class _Lent(Struct, eq=False):
    """One manifest, and the arena with its bytes, if some node requests them."""

    content: Content
    generation: int
    arena_id: int = 0
    size_bytes: int = 0
    asked_at: float = 0.0
    making: asyncio.Task[None] | None = None


class LentManifests:
    """The manifests of one node, by the line over which others request them. `numbers` are unique
    names of arenas. Call it only from the event loop.
    """

    def __init__(self, lender: ManifestLender, numbers: Iterator[int]) -> None:
        self._lender, self._numbers = lender, numbers
        self._lent: dict[str, _Lent] = {}
        self._given: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, line: str, generation: int, key: bytes, content: Content) -> None:
        """Send this manifest, from now on, to nodes that have the key."""
        self.forget(line)
        self._lent[line] = _Lent(content, generation)
        self._lender.keys(line, generation, key)

    def forget(self, line: str, generation: int = 0) -> None:
        """Stop sending a manifest: that of this generation, or of any if that is 0."""
        lent = self._lent.get(line)
        if lent is None or generation not in {0, lent.generation}:
            return
        del self._lent[line]
        self._drop_bytes(lent)
        self._lender.keys(line, 0, b"")

    def asked(self, ask: Asked) -> bool:
        """Handle another node's request for a part; return False if it is not for a manifest that
        is here.
        """
        lent = self._lent.get(ask.job_id)
        if lent is None:
            return False
        lent.asked_at = asyncio.get_running_loop().time()
        part = ask.request
        is_part = (part.dataset, part.block, part.form) == (NO_DATASET, 0, BlockForm.RAW)
        if not lent.arena_id and lent.making is None:
            lent.making = background.start("manifest", self._make(ask.job_id, lent))
        elif lent.arena_id and is_part and part.offset + part.length <= lent.size_bytes:
            self._given.add(ask.number)
            region = Region(part.offset, part.length)
            self._lender.give(ask.number, region, lent.arena_id, is_data=False)
            return True
        self._lender.refuse(ask.number)
        return True

    def given(self, number: int) -> bool:
        """Note that a part is no longer read; return False if it belongs to no manifest."""
        if number not in self._given:
            return False
        self._given.remove(number)
        return True

    def close(self) -> None:
        """Send nothing any more. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for lent in self._lent.values():
            self._drop_bytes(lent)
        self._lent.clear()

    async def _make(self, line: str, lent: _Lent) -> None:
        try:
            arena = await asyncio.to_thread(_arena_of, lent.content)
        except DataplaneError as error:  # out of memory
            _trace.failed("a manifest is not given to other nodes", why=str(error))
            return
        finally:
            lent.making = None
        if self._lent.get(line) is not lent:
            arena.close()
            return
        arena_id = lent.arena_id = next(self._numbers)
        lent.size_bytes = arena.size_bytes
        self._lender.lend_arena(arena_id, arena.fd)
        arena.close()  # the lender has its own descriptor
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        oldest, has_bytes = loop.time() - IDLE_S, False
        for lent in self._lent.values():
            if lent.asked_at <= oldest:
                self._drop_bytes(lent)
            has_bytes |= bool(lent.arena_id)
        if has_bytes:
            self._timer = loop.call_later(IDLE_S, self._look)

    def _drop_bytes(self, lent: _Lent) -> None:
        if lent.arena_id:
            self._lender.return_arena(lent.arena_id)
            lent.arena_id = 0


def _arena_of(content: Content) -> Arena:
    """Copy the content into an arena.

    Raises:  BudgetTooSmall: there is no memory for it.
    """
    found = content()
    arena = Arena.create("dataplane-manifest", HEAD_BYTES + len(found))
    try:
        arena.reserve(0, arena.size_bytes)
        copy_into(len(found).to_bytes(HEAD_BYTES, "little"), arena.view(0, HEAD_BYTES))
        copy_into(found, arena.view(HEAD_BYTES, len(found)))
    except BaseException:
        arena.close()
        raise
    return arena
