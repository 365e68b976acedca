"""Who holds the connections of a gRPC server, and which are closed when places run short.

gRPC accepts connections itself, up to a number that it is given, and turns away all others without
a word. It has no limit for each host, and does not say whose connections it has. So a thread looks
at the sockets of this process when few places are left, and shuts down those that keep others out.
To gRPC this is a peer that hangs up: it closes the connection, and the place is free. A host that
comes again and again is turned away by the kernel for a while.

The limits are those of security/admission.py, where a connection has greeted if a call on it was
allowed in the last `_RECENT_S`.

Invariants:
1. While fewer than three quarters of the places are taken, no connection is closed.
2. The event loop does the same work for each call, however many connections there are. The thread
   looks only when places may be short, and for a twentieth of the time at most.

gRPC has no hook before it accepts, so only a filter of the listening socket keeps out a host that
connects again at once. Without it, a host with 10,000 new connections a second kept others out of
436 places for 9 s at a time; with it, they got their answers in 6 ms.

Source: proc_pid_fd(5): since Linux 6.2 the size of this folder is the number of descriptors.
socket(7), SO_ATTACH_FILTER; Documentation/networking/filter.rst
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import ipaddress
import os
import socket
import struct
import threading
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from dataplane.base import background
from dataplane.base.trace import Trace
from dataplane.rpc.address import network_of
from dataplane.security.admission import Admission, AdmissionRules, Reason

_RECENT_S = 60.0
"""Nodes beat every few seconds."""
_SILENT_S = 2.0
_PERIOD_S = 0.25
_PAUSE_MIN_S = 0.02
_PAUSE_FACTOR = 20
"""The pause after a look, as a multiple of the processor time that the look took."""
_EXCEEDED_MAX, _FORGOTTEN_S, _AWAY_S = 5, 60.0, 10.0
"""A host that had too many connections in more looks than this within a minute is turned away for
a while.
"""
_LINE_S = 60.0
"""A host has one line of the log in this time."""
_HANDSHAKE_LOOK_S, _HANDSHAKE_SEEN_S, _HANDSHAKE_KEPT_S = 2.0, 0.5, 15.0
"""A look at the connections for handshakes at most every 2 s, an answer to it after half a second,
and longer than gRPC lets a handshake take.
"""
_HANDSHAKES_FEW, _HANDSHAKES_S = 20, 60.0
"""The number of connections without a call that probes make in this time."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_HOSTS_MAX = 32
_LOAD, _LOAD_BYTE, _SHIFT_RIGHT, _IS, _RETURN = 0x20, 0x30, 0x74, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_SOURCE_4, _SOURCE_6 = _IP_HEADER + 12, _IP_HEADER + 8
_DROP, _PASS = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)
_NEVER = float("-inf")
_DESCRIPTORS = Path("/proc/self/fd")
_host_of = functools.lru_cache(4096)(network_of)

_trace = Trace("security")

Peer = tuple[str, int]
"""The address of the other side, and its port."""


class PeerConnection(Struct, frozen=True):
    """One connection: its descriptor, its peer and the peer's host, when it was first seen, and
    when a call on it was last allowed.
    """

    descriptor: int
    peer: Peer
    host: str
    seen: float
    called: float = _NEVER

    def order(self) -> tuple[float, float]:
        """The order of closing: connections without a call first, and of these the oldest."""
        return self.called, self.seen

    def is_idle(self, now: float) -> bool:
        """Whether no call was allowed on it lately."""
        return now - self.called > _RECENT_S


def admission_rules(count_max: int) -> AdmissionRules:
    """Return the rules for so many places: a host may have half of them."""
    share = max(1, count_max // 2)
    return AdmissionRules(count_max, count_max // 4 + 1, source_max=share, grace_s=_SILENT_S)


def making_way(
    connections: Iterable[PeerConnection], rules: AdmissionRules, now: float
) -> list[tuple[PeerConnection, Reason]]:
    """Return the connections that go, so that others find places."""
    admission: Admission[PeerConnection] = Admission(rules)
    for connection in sorted(connections, key=PeerConnection.order):
        admission.came(connection, connection.host, connection.seen)
        if not connection.is_idle(now):
            admission.greeted(connection, "")
    return [(connection, reason) for connection, _, reason in admission.makes_way(now)]


class Handshakes:
    """The connections that end without a call, and their peers. gRPC reports neither the peers of
    failed TLS handshakes nor how many failed. It only announces that a handshake is about to begin
    on an open connection, so we find the peer by comparing all connections with those known before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._greeted = 0
        self._gone: Peer | None = None
        self._since, self._next_look = time.monotonic(), _NEVER
        self._known: set[Peer] = set()
        self._begun: dict[Peer, float] = {}

    def began(self, connected: Callable[[], Iterable[Peer]], now: float) -> None:
        """Note that a handshake begins. `connected` returns the peers of all connections."""
        with self._lock:
            self._count += 1
            if now < self._next_look:
                return
            self._next_look = now + _HANDSHAKE_LOOK_S
            peers = set(connected())
            self._begun.update(dict.fromkeys(peers - self._known, now))
            self._known = peers

    def greeted(self, peer: str) -> None:
        """The first call came on a connection."""
        with self._lock:
            self._greeted += 1
            if self._begun:
                self._begun.pop(_peer_of(peer), None)

    def ended(self, connected: Callable[[], Iterable[Peer]], now: float) -> tuple[Peer, int] | None:
        """Return a peer that has gone without a call, and how many have gone like that since the
        last result. Return None while there are so few of them that they may be probes.
        """
        with self._lock:
            if any(now - at > _HANDSHAKE_SEEN_S for at in self._begun.values()):
                there = set(connected())
                gone = [peer for peer in self._begun if peer not in there]
                self._gone = gone[-1] if gone else self._gone
                self._begun = {
                    peer: at
                    for peer, at in self._begun.items()
                    if peer in there and now - at < _HANDSHAKE_KEPT_S
                }
            count = self._count - self._greeted - len(self._begun)
            is_told = self._gone is not None and count > _HANDSHAKES_FEW
            found = (self._gone, count) if self._gone is not None and is_told else None
            if is_told or now - self._since > _HANDSHAKES_S:
                self._since, self._count, self._greeted = now, len(self._begun), 0
            return found


class OpenConnections:
    """The connections of the gRPC server of this process: `count_max` at most. A thread looks at
    them from `start` to `close`; the event loop says which of them `called`.
    """

    def __init__(self, count_max: int) -> None:
        self._rules = admission_rules(count_max)
        self._near = count_max - self._rules.spare + 1
        self._lock = threading.Lock()
        self._called: OrderedDict[str, float] = OrderedDict()
        """When the last call of each peer was, the oldest first."""
        self._seen: dict[Peer, float] = {}
        self._closed: set[Peer] = set()
        self._untold: dict[str, tuple[int, str]] = {}
        self._told_at: dict[str, float] = {}
        self._exceeded: dict[str, tuple[int, float]] = {}
        """For each host that had too many: in how many looks, and when last."""
        self._away: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handshakes = Handshakes()
        self._port = 0

    def handshaking(self) -> None:
        """A TLS handshake begins on a new connection. Called by threads of gRPC."""
        self._handshakes.began(self._peers, time.monotonic())

    def start(self, port: int) -> None:
        """Start looking at the connections to this port."""
        self._port = port
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        background.watch("connections", future)
        self._thread = threading.Thread(
            target=self._watch, args=(port, future), name="dataplane-connections", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop looking, after a look that is under way. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def called(self, peer: str) -> None:
        """A call was allowed on the connection of this peer, as gRPC writes it."""
        now = time.monotonic()
        with self._lock:
            is_first = peer not in self._called
            self._called[peer] = now
            self._called.move_to_end(peer)
            for _ in range(2):  # more than were added, so that the old ones get fewer
                oldest = next(iter(self._called))
                if now - self._called[oldest] <= _RECENT_S:
                    break
                del self._called[oldest]
        if is_first:
            self._handshakes.greeted(peer)

    # -- in the thread ---------------------------------------------------------------------------

    def _watch(self, port: int, future: concurrent.futures.Future[None]) -> None:
        pause_s = _PERIOD_S
        try:
            while not self._stop.wait(pause_s):
                began, closed = time.thread_time(), 0
                if _descriptor_count() >= self._near or self._away:
                    closed = self.look(port)
                self._tell_handshakes()
                took_s = time.thread_time() - began
                is_attacked = closed or self._away
                pause_s = max(_PAUSE_MIN_S if is_attacked else _PERIOD_S, _PAUSE_FACTOR * took_s)
        except BaseException as error:  # noqa: BLE001 - it ends the process, by `background`
            future.set_exception(error)
        else:
            future.set_result(None)

    def _peers(self) -> Iterator[Peer]:
        return (peer for _, peer in _connected(self._port)) if self._port else iter(())

    def _tell_handshakes(self) -> None:
        ended = self._handshakes.ended(self._peers, time.monotonic())
        if ended is not None:
            (host, port), count = ended
            _trace.refused(
                "connection without a call", by=_host_of(host), peer=f"{host}:{port}", count=count,
                why="its TLS handshake failed, or it hung up before its first call",
            )  # fmt: skip

    def look(self, port: int) -> int:
        """Close what keeps others out. Returns how many were closed."""
        now = time.monotonic()
        present = self._found(port, now)
        going = making_way(present, self._rules, now)
        of_all = f"of the {self._rules.count_max} connections that open files allow"
        for connection, reason in going:
            why = f"no call was made on it, and few {of_all} were left"
            if reason is Reason.SHARE:
                why = f"one host may have {self._rules.source_max} {of_all}"
            _shut_down(connection, port)
            count, _ = self._untold.get(connection.host, (0, ""))
            self._untold[connection.host] = (count + 1, why)
        self._closed = {connection.peer for connection, _ in going}
        self._turn_away({c.host for c, reason in going if reason is Reason.SHARE}, port, now)
        left = len(present) - len(going)
        if left >= self._rules.count_max:
            self._untold[""] = (left, "as many as open files allow, and all are in use")
        self._tell(now)
        return len(going)

    def _turn_away(self, hosts: set[str], port: int, now: float) -> None:
        """Turn away for a while those that come again as fast as their connections are closed."""
        for host in hosts:
            count, _ = self._exceeded.pop(host, (0, now))
            self._exceeded[host] = (count + 1, now)
        self._exceeded = {
            host: one for host, one in self._exceeded.items() if now - one[1] < _FORGOTTEN_S
        }
        away = {host: until for host, until in self._away.items() if now < until}
        for host in hosts:
            if self._exceeded[host][0] > _EXCEEDED_MAX:
                away[host] = now + _AWAY_S
            if self._exceeded[host][0] == _EXCEEDED_MAX + 1:
                why = "it connects again as fast as its connections are closed"
                _trace.refused("host turned away", by=host, peer=host, for_s=_AWAY_S, why=why)
        if away.keys() != self._away.keys():
            for listener in _listening(port):
                _turn_away(listener, list(away))
        self._away = away

    def _found(self, port: int, now: float) -> list[PeerConnection]:
        with self._lock:
            called = dict(self._called)
        called_at = {_peer_of(peer): at for peer, at in called.items()}
        before, self._seen = self._seen, {}
        found = []
        for descriptor, peer in _connected(port):
            seen = self._seen[peer] = before.get(peer, now)
            if peer not in self._closed:  # gRPC is about to close it
                at = called_at.get(peer, _NEVER)
                found.append(PeerConnection(descriptor, peer, _host_of(peer[0]), seen, at))
        if len(found) < self._near:
            self._seen.clear()  # the next look may be much later
        return found

    def _tell(self, now: float) -> None:
        """Write a line for each host that has had none for a while."""
        self._told_at = {host: at for host, at in self._told_at.items() if now - at < _LINE_S}
        for host in [host for host in self._untold if host not in self._told_at]:
            count, why = self._untold.pop(host)
            self._told_at[host] = now
            if host:
                _trace.refused("connections closed", by=host, peer=host, count=count, why=why)
            else:
                _trace.failed("nobody else can connect", connections=count, why=why)


def _descriptor_count() -> int:
    return _DESCRIPTORS.stat().st_size or len(_descriptors())


def _descriptors() -> list[int]:
    with os.scandir(_DESCRIPTORS) as found:
        return [int(one.name) for one in found]


def _connected(port: int) -> Iterator[tuple[int, Peer]]:
    """The descriptors of connections to this port of this process, and their peers."""
    for descriptor in _descriptors():
        peer = _peer_at(descriptor, port)
        if peer is not None:
            yield descriptor, peer


def _listening(port: int) -> Iterator[socket.socket]:
    """The sockets of this process that listen at this port; each until the next is asked for."""
    for descriptor in _descriptors():
        with _socket_at(descriptor, port) as sock:
            if sock is not None and _is_listening(sock):
                yield sock


def _is_listening(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # gRPC has closed it meanwhile


def _peer_at(descriptor: int, port: int) -> Peer | None:
    with _socket_at(descriptor, port) as sock:
        try:
            host, its_port = sock.getpeername()[:2] if sock is not None else ("", 0)
        except OSError:
            return None  # it listens, or was closed meanwhile
    return (_plain(host), its_port) if host else None


@contextlib.contextmanager
def _socket_at(descriptor: int, port: int) -> Iterator[socket.socket | None]:
    """The socket with this descriptor, if it has this port of this host. It stays open."""
    sock = None
    try:
        # With a family, so that nothing of it is looked up.
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
        local = sock.getsockname()
    except OSError:
        local = None  # a file, or closed meanwhile
    try:
        yield sock if isinstance(local, tuple) and local[1] == port else None
    finally:
        if sock is not None:
            sock.detach()


def _shut_down(one: PeerConnection, port: int) -> None:
    """Hang up, if the descriptor is still that connection."""
    try:
        # gRPC may close it at any time, and its number be used again.
        copy = os.dup(one.descriptor)
    except OSError:
        return
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        return  # now a file: closing the copy would release the locks on it, see fcntl_locking(2)
    with sock:
        if _peer_at(copy, port) == one.peer:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the peer was faster


def _peer_of(shown: str) -> Peer:
    """The peer that gRPC writes as ipv4:10.0.0.9:51234 or ipv6:%5B2001:db8::1%5D:51234."""
    host, _, port = urllib.parse.unquote(shown).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdigit() else 0


def _plain(host: str) -> str:
    """An address without its scope, and of IPv4 also where the socket is one of IPv6."""
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def _turn_away(listener: socket.socket, hosts: Sequence[str]) -> None:
    """Have the kernel drop the packets of these hosts to a listening socket: addresses, or networks
    of 64 bits of IPv6, the last 32 of them. To them, nobody listens there. Their open connections
    stay, and those accepted later pass the filter, which they inherit. Nobody is turned away where
    the kernel cannot do that.
    """
    with contextlib.suppress(OSError):
        if not hosts:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            return
        program = b"".join(struct.pack("=HBBI", *one) for one in _program(hosts[-_HOSTS_MAX:]))
        memory = ctypes.create_string_buffer(program, len(program))
        told = struct.pack("@HP", len(program) // 8, ctypes.addressof(memory))
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, told)


def _program(hosts: Sequence[str]) -> list[tuple[int, int, int, int]]:
    networks = [ipaddress.ip_network(host) for host in hosts]
    v4: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, _SOURCE_4)]
    v6: list[tuple[int, int, int, int]] = []
    for network in networks:
        packed = network.network_address.packed
        first = int.from_bytes(packed[:4])
        if network.version == 4:
            v4 += [(_IS, 0, 1, first), _DROP]
        else:
            second = int.from_bytes(packed[4:8])
            v6 += [(_LOAD, 0, 0, _SOURCE_6), (_IS, 0, 3, first)]
            v6 += [(_LOAD, 0, 0, _SOURCE_6 + 4), (_IS, 0, 1, second), _DROP]
    v4.append(_PASS)
    version = (_LOAD_BYTE, 0, 0, _IP_HEADER), (_SHIFT_RIGHT, 0, 0, 4)
    return [*version, (_IS, 0, len(v4), 4), *v4, *v6, _PASS]
