"""Decide which node makes the manifest of a dataset that several nodes of a launch open, and from
which node each of the others gets it. Pure; the coordinator owns one `ManifestTurns`, which is
never stored.

Indexing 10^6 shards takes minutes and 10^6 requests, and counting the rows of a condition reads the
dataset. So one node does it for all.

Invariants:
1. A manifest has at most one maker at a time. If the maker is silent for a while, the next node
   that asks becomes the maker.
2. All nodes get a manifest with the same fingerprint: a node that has made a different one must
   fetch the others'. If no node that has the manifest can deliver it, it is made again, and may
   then differ.
3. Nodes at loopback addresses and other nodes cannot reach each other, so the two groups share
   nothing.
4. The cost of a decision does not depend on how many nodes wait, or on how many have the manifest.
5. The number of requests per second of all waiting nodes together is limited: there may be a
   thousand nodes, and twenty sources of a mixture.
6. If two nodes in a row have made a manifest and no node could fetch it, nodes cannot reach each
   other. Then each makes its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from msgspec import Struct, field

from dataplane.coordinator.refusals import check_work
from dataplane.model.errors import ConfigError
from dataplane.rpc.bounds import URLS_MAX, check_count, check_data_address, check_name
from dataplane.rpc.sharing import (
    ManifestState,
    ManifestTurn,
    NodeWork,
    ShareManifestRequest,
    ShareManifestResponse,
)

MAKER_SHARE = 1 / 2
"""The share of a lease after which another node makes the manifest if its maker is silent."""
_WORDS = 4
"""The number of messages that a maker sends within `MAKER_SHARE` of a lease."""
FETCH_S = 60.0
"""How long a node that was sent to a holder counts as one of its readers."""
READERS_MAX = 8
"""The most readers of one holder. Few suffice, since each reader soon becomes a holder."""
_HOLDERS_MAX = 64
_MANIFESTS_MAX = 1024
_FAILURES_MAX = 2
_IN_VAIN_MAX = 2
_NAME_BYTES = 16
_FINGERPRINT_LENGTH_MAX = 64
_PAUSE_S_MIN, _PAUSE_S_MAX, _PAUSE_SHARE = 0.1, 5.0, 1 / 8
_BUSY_PAUSE_S = 0.5
ASKS_PER_S = 500
"""The rate of calls of all waiting nodes together. A call takes 0.6 ms, and heartbeats must not be
delayed."""
_PACED_S_MAX = 60.0
_LOOPBACK = ("127.", "[::1]:")

_Key = tuple[str, str, bytes, tuple[str, ...], bool]


class _Holder(Struct, eq=False):
    """A node that has the manifest, and the nodes that read it there, with their start times."""

    node_id: str
    address: str
    readers: dict[str, float] = field(default_factory=dict)


class _Shared(Struct, eq=False):
    """The state of one manifest."""

    line: str
    generation: int
    began: float
    maker: str = ""
    heard: float = 0.0
    work: NodeWork | None = None
    """The maker's progress."""
    failures: int = 0
    in_vain: int = 0
    """How many times in a row the manifest was made and no node could fetch it."""
    was_given: bool = False
    fingerprint: str = ""
    holders: deque[_Holder] = field(default_factory=deque)


class ManifestTurns:
    """The manifests of all jobs. Only the most recently requested ones are remembered."""

    def __init__(self, lease_s: float) -> None:
        self._maker_s = lease_s * MAKER_SHARE
        self._shared: OrderedDict[_Key, _Shared] = OrderedDict()
        self._last_generation = 0
        self._next_ask = 0.0

    def decide(self, request: ShareManifestRequest, now: float) -> ShareManifestResponse:
        """Return the answer to a node, without the key. A node may repeat its request. `now` is in
        seconds since 1970.

        Raises:  ConfigError: the request is not one that a node would send.
        """
        _check(request)
        shared = self._of(request, now)
        if request.state is ManifestState.HELD:
            return self._held(shared, request)
        if request.state is ManifestState.FAILED:
            if shared.maker == request.node_id:
                shared.maker = ""
                shared.failures += 1
            return ShareManifestResponse(ManifestTurn.ALONE)
        if request.state is ManifestState.MAKING:
            if shared.maker in {"", request.node_id}:
                shared.maker, shared.heard = request.node_id, now
                shared.work = request.work
            return self._make()
        return self._wanted(shared, request, now)

    def _of(self, request: ShareManifestRequest, now: float) -> _Shared:
        is_near = request.data_address.startswith(_LOOPBACK)
        key = (request.job_id, request.incarnation, request.name, request.urls, is_near)
        shared = self._shared.get(key)
        if shared is None:
            # Choose a generation that no job and no earlier coordinator has used.
            self._last_generation = max(self._last_generation + 1, int(now * 1000))
            # Name the line after the launch, so that each launch of a job has a data connection of
            # its own, even between the same two nodes.
            line = f"manifest {request.name.hex()} {self._last_generation}"
            shared = self._shared[key] = _Shared(line, self._last_generation, now)
            if len(self._shared) > _MANIFESTS_MAX:
                self._shared.popitem(last=False)
        self._shared.move_to_end(key)
        return shared

    def _held(self, shared: _Shared, request: ShareManifestRequest) -> ShareManifestResponse:
        node_id = request.node_id
        has_made = shared.maker == node_id
        if has_made:
            shared.maker = ""
        for holder in shared.holders:
            holder.readers.pop(node_id, None)
        if not request.data_address:
            return ShareManifestResponse(ManifestTurn.ALONE)
        others = [holder for holder in shared.holders if holder.node_id != node_id]
        if others and shared.fingerprint != request.fingerprint:
            return self._from(shared, others[0], ManifestTurn.FETCH)
        shared.fingerprint, shared.failures = request.fingerprint, 0
        shared.was_given = not has_made or (shared.was_given and bool(others))
        if shared.was_given:
            shared.in_vain = 0
        if len(others) < _HOLDERS_MAX:
            shared.holders = deque((*others, _Holder(node_id, request.data_address)))
        return self._from(shared, None, ManifestTurn.KEEP)

    def _wanted(
        self, shared: _Shared, request: ShareManifestRequest, now: float
    ) -> ShareManifestResponse:
        # Neither of these nodes has the manifest any more, perhaps since a restart.
        gone = {request.refused_by, request.node_id}
        left = [holder for holder in shared.holders if holder.node_id not in gone]
        if shared.holders and not left and request.refused_by and not shared.was_given:
            shared.in_vain += 1
        shared.holders = deque(left)
        if shared.holders:
            return self._holder(shared, request.node_id, now)
        is_made = shared.maker and now - shared.heard < self._maker_s
        if is_made and shared.maker != request.node_id:
            pause_s = min(max((now - shared.began) * _PAUSE_SHARE, _PAUSE_S_MIN), _PAUSE_S_MAX)
            return self._wait(shared.maker, pause_s, now, shared.work)
        is_of_use = shared.failures < _FAILURES_MAX and shared.in_vain < _IN_VAIN_MAX
        if not request.data_address or not is_of_use:
            return ShareManifestResponse(ManifestTurn.ALONE)
        if not shared.maker:
            shared.began = now
        shared.maker, shared.heard, shared.work = request.node_id, now, None
        return self._make()

    def _holder(self, shared: _Shared, node_id: str, now: float) -> ShareManifestResponse:
        """Return the next holder that is not busy, in turn."""
        for _ in range(len(shared.holders)):
            shared.holders.rotate(-1)
            one = shared.holders[-1]
            late = [name for name, since in one.readers.items() if now - since > FETCH_S]
            for name in late:
                del one.readers[name]
            if node_id in one.readers or len(one.readers) < READERS_MAX:
                one.readers[node_id] = now
                return self._from(shared, one, ManifestTurn.FETCH)
        return self._wait(shared.holders[0].node_id, _BUSY_PAUSE_S, now)

    def _wait(
        self, node_id: str, pause_s: float, now: float, work: NodeWork | None = None
    ) -> ShareManifestResponse:
        """Tell this node to wait at least this long, and longer if many nodes wait."""
        # Bound the wait, in case the clock was set back.
        self._next_ask = min(max(self._next_ask, now), now + _PACED_S_MAX) + 1 / ASKS_PER_S
        pause_s = max(pause_s, self._next_ask - now)
        return ShareManifestResponse(ManifestTurn.WAIT, node_id, pause_s=pause_s, work=work)

    def _make(self) -> ShareManifestResponse:
        return ShareManifestResponse(ManifestTurn.MAKE, pause_s=self._maker_s / _WORDS)

    def _from(
        self, shared: _Shared, holder: _Holder | None, turn: ManifestTurn
    ) -> ShareManifestResponse:
        node_id, address = ("", "") if holder is None else (holder.node_id, holder.address)
        return ShareManifestResponse(turn, node_id, address, shared.line, shared.generation)


def _check(request: ShareManifestRequest) -> None:
    """Check a request's fields.

    Raises:  ConfigError: names the field.
    """
    check_name("node_id", request.node_id)
    check_name("job_id", request.job_id)
    check_name("incarnation", request.incarnation)
    check_name("refused_by", request.refused_by, needed=False)
    check_name("fingerprint", request.fingerprint, needed=False, most=_FINGERPRINT_LENGTH_MAX)
    if request.data_address:
        check_data_address(request.data_address)
    if len(request.name) != _NAME_BYTES:
        raise ConfigError(
            f"name has {len(request.name)} bytes, expected {_NAME_BYTES}: start a node of the same"
            " version as the coordinator",
            field="name",
        )
    if request.work is not None:
        check_work(request.work)
    check_count("urls", request.urls, URLS_MAX)
