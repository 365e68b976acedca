"""The manifests of datasets that several nodes open for one launch of a job. The coordinator
chooses a node that makes the manifest; the other nodes get it from nodes that have it.

Invariants:
1. A manifest of another node is used only if it is intact, and has the requested urls and format.
2. Failures here cost only time: at the end a node makes the manifest for itself, as it would
   without others.
3. Each wait is limited: a node waits for a maker as long as the coordinator hears from the maker,
   and for the coordinator as long as in a join.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.arena.memfd import Arena
from dataplane.base import background
from dataplane.base.suffixes import MANIFEST
from dataplane.base.trace import Trace
from dataplane.index.indexing import MANIFEST_BYTES_MAX, LongWork, work_on
from dataplane.index.journal import keep_given
from dataplane.model.config import VERSION, NodeConfig
from dataplane.model.errors import CorruptShard, DataplaneError, NeighbourGone, PeerLost
from dataplane.model.records import BlockForm, Region, View
from dataplane.model.redact import unsigned
from dataplane.neighbours.wire import Outcome
from dataplane.node.datasets import declared, shown
from dataplane.node.neighbours import Lending
from dataplane.node.places import pause
from dataplane.plan.manifest import Manifest
from dataplane.rpc.base import Coordination
from dataplane.rpc.fetches import Neighbour, Peer
from dataplane.rpc.lending import NO_DATASET, Asked
from dataplane.rpc.messages import DatasetSource
from dataplane.rpc.sharing import (
    ManifestState,
    ManifestTurn,
    ShareManifestRequest,
    ShareManifestResponse,
)
from dataplane.store.reads import copy_into
from dataplane.store.urls import literal_prefix, local_path, normalise

if TYPE_CHECKING:
    from dataplane.neighbours.asking import Lines


# -- manifests for other nodes --------------------------------------------------------------------
#
# Manifests that this node sends to other nodes, which open the same datasets.
#
# A manifest is sent as the bytes of its file, after their length, in an arena of its own: other
# nodes read it piece by piece, like a raw block.
#
# Invariants:
# 1. Each request is answered once. Until the bytes have been made, requests are refused; the other
#    node repeats them.
# 2. Bytes that no node has requested for a while take no memory; they are made again on request.

IDLE_S = 60.0
HEAD_BYTES = 8
"""The bytes before the manifest, which have its length, little-endian."""

Content = Callable[[], bytes]
"""Returns the bytes of a manifest. This takes time, so it is called in a thread."""
_trace = Trace("node")


class _Lent(Struct, eq=False):
    """One manifest, and the arena with its bytes, if some node requests them."""

    content: Content
    generation: int
    arena_id: int = 0
    size_bytes: int = 0
    asked_at: float = 0.0
    making: asyncio.Task[None] | None = None


class LentManifests:
    """The manifests of one node, by the line over which others request them. `numbers` yields
    unique names for arenas. Use this only from the event loop.
    """

    def __init__(self, lender: Lending, numbers: Iterator[int]) -> None:
        self._lender, self._numbers = lender, numbers
        self._lent: dict[str, _Lent] = {}

    def keep(self, line: str, generation: int, key: bytes, content: Content) -> None:
        """Send this manifest, from now on, to nodes that have the key."""
        self.forget(line)
        self._lent[line] = _Lent(content, generation)
        self._lender.keys(line, generation, key)

    def forget(self, line: str, generation: int = 0) -> None:
        """Stop sending the manifest of this line, if it has this generation; 0 stands for any."""
        lent = self._lent.get(line)
        if lent is None or generation not in {0, lent.generation}:
            return
        del self._lent[line]
        self._drop_bytes(lent)
        self._lender.keys(line, 0, b"")

    def asked(self, ask: Asked) -> bool:
        """Handle another node's request for part of a manifest; return False if the request is not
        for a manifest that is here.
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
            region = Region(part.offset, part.length)
            self._lender.give(ask.number, region, lent.arena_id, is_data=False)
            return True
        self._lender.refuse(ask.number)
        return True

    def tick(self) -> None:
        """Free the bytes of manifests that no node has requested for a while."""
        oldest = asyncio.get_running_loop().time() - IDLE_S
        for lent in self._lent.values():
            if lent.asked_at <= oldest:
                self._drop_bytes(lent)

    def close(self) -> None:
        """Send nothing any more. May be called twice."""
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

    def _drop_bytes(self, lent: _Lent) -> None:
        if lent.arena_id:
            self._lender.return_arena(lent.arena_id)
            lent.arena_id = 0


def _arena_of(content: Content) -> Arena:
    """Copy the content into an arena.

    Raises:  BudgetTooSmall: there is no memory for it.
    """
    body = content()
    arena = Arena.create("dataplane-manifest", HEAD_BYTES + len(body))
    try:
        arena.reserve(0, arena.size_bytes)
        copy_into(len(body).to_bytes(HEAD_BYTES, "little"), arena.view(0, HEAD_BYTES))
        copy_into(body, arena.view(HEAD_BYTES, len(body)))
    except BaseException:
        arena.close()
        raise
    return arena


# -- manifests of the job --------------------------------------------------------------------------

_PAUSE_S_MAX = 60.0
"""The longest pause between two requests: enough for the coordinator to answer 30,000 requests, of
all nodes and all sources of a mixture."""
_PIECE_BYTES = 4 << 20
_PREFIXES_MAX = 64
_FETCHES_MAX = 4
"""Failed fetches before a node makes the manifest for itself: each waits for an answer."""
_REFUSED_S, _REFUSED_PAUSE_S = 60.0, 0.2
"""How long, and after which pauses, a refused request is repeated: a holder refuses until it has
made the bytes."""


class Wanted(Struct, frozen=True):
    """A dataset that is opened for one launch of a job. `seed` is the seed of the view's map, if
    the samples depend on it.
    """

    source: DatasetSource
    view: View
    seed: int
    job_id: str
    incarnation: str

    @property
    def launch(self) -> tuple[str, str]:
        """The job, and its launch."""
        return self.job_id, self.incarnation

    def is_long_after(self, other: Wanted) -> bool:
        """Whether this is a later listing of the same dataset, and `other` not the last before."""
        listed = other.source.listed
        same = replace(other, source=replace(other.source, listed=self.source.listed))
        return same == self and listed + 1 < self.source.listed

    @property
    def name(self) -> bytes:
        """A hash of all that the manifest depends on: 16 bytes."""
        source = self.source
        parts = (VERSION, source.urls, source.format, source.listed, self.view, self.seed)
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


class Shareable(Protocol):
    """The result of opening a dataset."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal datasets."""

    def handed_on(self) -> bytes:
        """Return the manifest's file, with all counts. Takes time; called in a thread."""


T = TypeVar("T", bound=Shareable)
Make = Callable[[Manifest | None], Awaitable[T]]
"""Opens a dataset, with the manifest of another node if there is one."""


class SharedManifests:
    """The shared manifests of one node. Others reach the node at `address`, if at all. `lent` sends
    them the manifests that the node has.
    """

    def __init__(
        self,
        config: NodeConfig,
        coordination: Coordination,
        node_id: str,
        address: str,
        lent: LentManifests | None,
    ) -> None:
        self._config, self._coordination, self._node_id = config, coordination, node_id
        self._address = address if lent is not None else ""
        self._lent = lent
        self._lines: dict[Wanted, tuple[str, int]] = {}

    async def opened(self, wanted: Wanted, make: Make[T]) -> T:
        """Open a dataset with `make`, using the manifest of another node if some node has the
        manifest or makes it.

        Raises:  AccessDenied: the node's token does not allow these urls.  As `make`.
        """
        if self._config.embedded or not _is_for_all(wanted):
            return await make(None)
        request = ShareManifestRequest(
            self._node_id, wanted.job_id, wanted.incarnation, wanted.name,
            declared([normalise(url) for url in wanted.source.urls]), self._address,
        )  # fmt: skip
        holder = refused_by = ""
        failed = 0
        while True:
            answer = await self._asked(replace(request, refused_by=refused_by))
            refused_by = ""
            if answer is None or answer.turn in {ManifestTurn.ALONE, ManifestTurn.KEEP}:
                return await make(None)
            if answer.turn is ManifestTurn.MAKE:
                return await self._made(wanted, request, make, answer.pause_s)
            if failed == _FETCHES_MAX:
                return await make(None)
            if answer.turn is ManifestTurn.FETCH:
                manifest = await self._fetched(wanted, answer)
                if manifest is not None:
                    return await self._kept(wanted, request, await make(manifest))
                refused_by, failed = answer.node_id, failed + 1
                continue
            if holder != answer.node_id:
                holder = answer.node_id
                urls = ", ".join(request.urls)
                _trace.noted("another node opens the dataset", node=holder, dataset=urls)
            await self._pause(wanted, answer)

    async def _pause(self, wanted: Wanted, answer: ShareManifestResponse) -> None:
        """Pause while another node makes the manifest, and show the progress of that node."""
        pause_s, work = _jittered(answer.pause_s), answer.work
        if work is None:
            await asyncio.sleep(pause_s)
            return
        what = f"node {answer.node_id}: {work.what}"
        with LongWork(what, wanted.source.urls, work.unit) as shown:
            shown.advance(work.done, work.total)
            await asyncio.sleep(pause_s)

    def forget(self, wanted: Wanted) -> None:
        """Send the manifest of this dataset to nobody any more, since it is closed here."""
        line = self._lines.pop(wanted, None)
        if line is not None and self._lent is not None:
            self._lent.forget(*line)

    async def _asked(self, request: ShareManifestRequest) -> ShareManifestResponse | None:
        """Send a request. Return the answer; None if there is none within the stall timeout.

        Raises:  DataplaneError: the coordinator refuses.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                return await self._coordination.share_manifest(request)
            except PeerLost:
                if loop.time() - began >= self._config.stall_timeout_s:
                    return None
            await pause()

    async def _made(
        self, wanted: Wanted, request: ShareManifestRequest, make: Make[T], word_s: float
    ) -> T:
        """Make the manifest, also for other nodes, and report progress to the coordinator every
        `word_s`.
        """
        renewing = background.start("manifest", self._renew(wanted, request, word_s))
        try:
            opened = await make(None)
        except BaseException:
            # Report the failure, so that another node tries: the fault may lie with this node.
            failed = replace(request, state=ManifestState.FAILED)
            background.start("manifest", self._say(failed))
            raise
        finally:
            renewing.cancel()
        return await self._kept(wanted, request, opened, make)

    async def _kept(
        self,
        wanted: Wanted,
        request: ShareManifestRequest,
        opened: T,
        make: Make[T] | None = None,
    ) -> T:
        """Offer a manifest to other nodes. If they have a different one, use theirs instead."""
        held = replace(request, state=ManifestState.HELD, fingerprint=opened.fingerprint)
        try:
            answer = await self._coordination.share_manifest(held)
        except DataplaneError as error:
            _trace.failed("a manifest is not shared", dataset=request.urls, why=str(error))
            return opened
        if answer.turn is ManifestTurn.KEEP and self._lent is not None:
            self.forget(wanted)  # the line from before a restart of the coordinator
            self._lines[wanted] = answer.line, answer.generation
            self._lent.keep(answer.line, answer.generation, answer.key, opened.handed_on)
        elif answer.turn is ManifestTurn.FETCH and make is not None:
            theirs = await self._fetched(wanted, answer)
            if theirs is not None:
                return await self._kept(wanted, request, await make(theirs))
        return opened

    async def _renew(self, wanted: Wanted, request: ShareManifestRequest, word_s: float) -> None:
        while True:
            await asyncio.sleep(word_s)
            work = work_on(wanted.source.urls)
            await self._say(replace(request, state=ManifestState.MAKING, work=work))

    async def _say(self, request: ShareManifestRequest) -> None:
        with contextlib.suppress(DataplaneError):
            await self._coordination.share_manifest(request)

    async def _fetched(self, wanted: Wanted, answer: ShareManifestResponse) -> Manifest | None:
        """Fetch the manifest of another node; None if that node does not send it, or sends a
        wrong one.
        """
        began = asyncio.get_running_loop().time()
        try:
            content = await self._read(answer)
            manifest = await asyncio.to_thread(_checked, content, answer.node_id, wanted)
        except DataplaneError as error:
            why = str(error)
            _trace.failed("no manifest from another node", node=answer.node_id, why=why)
            return None
        took_s = round(asyncio.get_running_loop().time() - began, 3)
        shards = len(manifest.shards)
        _trace.noted(
            "manifest from another node", node=answer.node_id, shards=shards,
            bytes=len(content), took_s=took_s,
        )  # fmt: skip
        try:
            await asyncio.to_thread(self._remember, manifest, content)
        except DataplaneError as error:  # such as a full disk: the manifest is still good
            _trace.failed("a manifest is not kept for the next time", why=str(error))
        return manifest

    def _remember(self, manifest: Manifest, content: bytearray) -> None:
        if self._config.cache_dir:
            keep_given(self._config.cache_dir, manifest, content)

    async def _read(self, answer: ShareManifestResponse) -> bytearray:
        """Read the bytes of another node's manifest.

        Raises:  NeighbourGone.
        """
        from dataplane.neighbours.asking import Lines  # not needed on a single host
        from dataplane.neighbours.line_tls import LineTls

        tls = self._config.data_tls
        lines = Lines(None if tls is None else LineTls(tls))
        peer = Peer(
            answer.address, answer.line, answer.generation, answer.key, self._node_id,
            answer.node_id,
        )  # fmt: skip
        try:
            head = bytearray(HEAD_BYTES)
            await _read_piece(lines, peer, 0, head)
            length = int.from_bytes(head, "little")
            if not 0 < length <= MANIFEST_BYTES_MAX:
                raise NeighbourGone(
                    f"the node {peer.node_id} says that its manifest has {length} bytes",
                    peer=peer.node_id,
                )
            content = bytearray()
            while len(content) < length:
                piece = bytearray(min(_PIECE_BYTES, length - len(content)))
                await _read_piece(lines, peer, HEAD_BYTES + len(content), piece)
                content += piece
        finally:
            lines.close()
        return content


async def _read_piece(lines: Lines, peer: Peer, at: int, into: bytearray) -> None:
    """Read the piece of a manifest that begins at this byte.

    Raises:  NeighbourGone.
    """
    loop = asyncio.get_running_loop()
    began, piece = loop.time(), Neighbour(peer, NO_DATASET, 0, at)
    while True:
        view = memoryview(into)
        answer = await asyncio.to_thread(lines.read, piece, [view])
        if answer.outcome is Outcome.GIVEN:
            return
        if loop.time() - began > _REFUSED_S:
            raise NeighbourGone(
                f"the node {peer.node_id} at {peer.address} refuses its manifest",
                peer=peer.node_id,
            )
        await asyncio.sleep(_jittered(_REFUSED_PAUSE_S))


def _checked(content: bytearray, node_id: str, wanted: Wanted) -> Manifest:
    """Parse and check another node's manifest.

    Raises:  CorruptShard, ConfigError: it is damaged, or of another dataset.
    """
    name = f"the manifest of node {node_id}"
    manifest = Manifest.from_bytes(content, name)
    urls, format_ = tuple(map(normalise, wanted.source.urls)), wanted.source.format
    if manifest.urls != urls or format_ not in {"", manifest.format}:
        raise CorruptShard(f"{name} is of another dataset", expected=shown(urls))
    is_below = np.zeros(len(manifest.shards), np.bool_)
    for prefix in _prefixes(urls):
        is_below |= manifest.shards.urls.starting_with(prefix.encode())
    if not is_below.all():
        url = manifest.shards.urls[int(is_below.argmin())]
        raise CorruptShard(f"{name} has a shard that lies elsewhere: {url}", expected=shown(urls))
    return manifest


def _prefixes(urls: Sequence[str]) -> Sequence[str]:
    """Return prefixes: each shard of a dataset with these urls has a url that begins with one."""
    starts = [literal_prefix(url).partition("{")[0] for url in urls]
    return starts if len(starts) <= _PREFIXES_MAX else [os.path.commonprefix(starts)]  # noqa: RUF071


def _is_for_all(wanted: Wanted) -> bool:
    """Whether all nodes see the same dataset by these urls, and no url is a saved manifest."""
    return not any(
        local_path(url) is not None or unsigned(url) != url or url.endswith(MANIFEST)
        for url in map(normalise, wanted.source.urls)
    )


def _jittered(pause_s: float) -> float:
    return min(pause_s, _PAUSE_S_MAX) * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
