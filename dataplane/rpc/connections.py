"""The connections of a gRPC server, and which of them are closed when places run out.

gRPC accepts connections itself, up to a maximum number, and silently turns away all others. It has
no limit per host, and does not report the peers of its connections. So when few places are left, a
thread examines the sockets of this process, and shuts down connections that keep other hosts out.
gRPC sees a peer that hangs up, closes the connection, and thereby frees its place. The kernel turns
away for a while a host that reconnects again and again.

The limits are those of security/admission.py. A connection counts as greeted if a call on it was
allowed in the last `_RECENT_S`.

Invariants:
1. While fewer than three quarters of the places are taken, no connection is closed.
2. The event loop does the same work for each call, however many connections there are. The thread
   examines sockets only when places may run out, and for at most a twentieth of the time.

gRPC has no hook before it accepts a connection, so only a filter on the listening socket keeps out
a host that reconnects at once. Without the filter, a host with 10,000 new connections a second kept
other hosts out of 436 places for 9 s at a time; with the filter, they got their answers in 6 ms.

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
"""Nodes send heartbeats every few seconds, so their connections stay recent."""
_SILENT_S = 2.0
_PERIOD_S = 0.25
_PAUSE_MIN_S = 0.02
_PAUSE_FACTOR = 20
"""The pause after each examination, as a multiple of the processor time that it took."""
_EXCEEDED_MAX, _FORGOTTEN_S, _AWAY_S = 5, 60.0, 10.0
"""A host that had too many connections in more than `_EXCEEDED_MAX` examinations is turned away for
`_AWAY_S`. Each of these examinations came within `_FORGOTTEN_S` of the previous one.
"""
_LINE_S = 60.0
"""The log has at most one line per host in this time."""
_HANDSHAKE_LOOK_S, _HANDSHAKE_SEEN_S, _HANDSHAKE_KEPT_S = 2.0, 0.5, 15.0
"""Connections are searched for new handshakes at most once per `_HANDSHAKE_LOOK_S`. A search for
ended handshakes begins `_HANDSHAKE_SEEN_S` after a handshake began. A handshake is forgotten after
`_HANDSHAKE_KEPT_S`, which is longer than gRPC lets a handshake take.
"""
_HANDSHAKES_FEW, _HANDSHAKES_S = 20, 60.0
"""Probes may make up to `_HANDSHAKES_FEW` connections without a call in `_HANDSHAKES_S`."""
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
        """Return the sort key for closing: connections without a call first, the oldest of them
        first.
        """
        return self.called, self.seen

    def is_idle(self, now: float) -> bool:
        """Return whether no call was allowed on the connection lately."""
        return now - self.called > _RECENT_S


def admission_rules(count_max: int) -> AdmissionRules:
    """Return the rules for `count_max` places, half of which one host may have."""
    share = max(1, count_max // 2)
    return AdmissionRules(count_max, count_max // 4 + 1, source_max=share, grace_s=_SILENT_S)


def making_way(
    connections: Iterable[PeerConnection], rules: AdmissionRules, now: float
) -> list[tuple[PeerConnection, Reason]]:
    """Return the connections to close so that other hosts find places, and the reasons."""
    admission: Admission[PeerConnection] = Admission(rules)
    for connection in sorted(connections, key=PeerConnection.order):
        admission.came(connection, connection.host, connection.seen)
        if not connection.is_idle(now):
            admission.greeted(connection, "")
    return [(connection, reason) for connection, _, reason in admission.makes_way(now)]


class Handshakes:
    """The connections that end without a call, and their peers. gRPC reports neither the peers nor
    the number of failed TLS handshakes. It only announces that a handshake is about to begin on an
    open connection, so we find the peer by comparing all connections with the connections known
    before.
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
        """Note the first call on a connection."""
        with self._lock:
            self._greeted += 1
            if self._begun:
                self._begun.pop(_peer_of(peer), None)

    def ended(self, connected: Callable[[], Iterable[Peer]], now: float) -> tuple[Peer, int] | None:
        """Return a peer whose connection ended without a call, and the number of such connections
        since the last result. Return None while these are so few that they may be probes.
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
    """The connections of the gRPC server of this process, at most `count_max`. A thread examines
    them from `start` to `close`; the event loop reports calls with `called`.
    """

    def __init__(self, count_max: int) -> None:
        self._rules = admission_rules(count_max)
        self._near = count_max - self._rules.spare + 1
        self._lock = threading.Lock()
        self._called: OrderedDict[str, float] = OrderedDict()
        """The time of each peer's last call, the oldest first."""
        self._seen: dict[Peer, float] = {}
        self._closed: set[Peer] = set()
        self._untold: dict[str, tuple[int, str]] = {}
        self._told_at: dict[str, float] = {}
        self._exceeded: dict[str, tuple[int, float]] = {}
        """For each host with too many connections: in how many examinations, and when last."""
        self._away: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._handshakes = Handshakes()
        self._port = 0

    def handshaking(self) -> None:
        """Note that a TLS handshake begins on a new connection. Called by threads of gRPC."""
        self._handshakes.began(self._peers, time.monotonic())

    def start(self, port: int) -> None:
        """Start to examine the connections to this port."""
        self._port = port
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        background.watch("connections", future)
        self._thread = threading.Thread(
            target=self._watch, args=(port, future), name="dataplane-connections", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, after the examination in progress. May be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def called(self, peer: str) -> None:
        """Note that a call was allowed on the connection of this peer. `peer` is in gRPC's form."""
        now = time.monotonic()
        with self._lock:
            is_first = peer not in self._called
            self._called[peer] = now
            self._called.move_to_end(peer)
            for _ in range(2):  # remove up to two old peers per call, so that few are left
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
        except BaseException as error:  # noqa: BLE001 - `background` ends the process
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
        """Close connections that keep other hosts out. Return the number of closed connections."""
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
        """Turn away for a while hosts that reconnect as fast as their connections are closed."""
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
            if peer not in self._closed:  # otherwise gRPC is about to close the connection
                at = called_at.get(peer, _NEVER)
                found.append(PeerConnection(descriptor, peer, _host_of(peer[0]), seen, at))
        if len(found) < self._near:
            self._seen.clear()  # the next examination may be much later
        return found

    def _tell(self, now: float) -> None:
        """Log one line for each host without a line in the last `_LINE_S`."""
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
    """Yield the descriptor and the peer of each connection of this process to this port."""
    for descriptor in _descriptors():
        peer = _peer_at(descriptor, port)
        if peer is not None:
            yield descriptor, peer


def _listening(port: int) -> Iterator[socket.socket]:
    """Yield the sockets of this process that listen at this port. Each is valid until the next."""
    for descriptor in _descriptors():
        with _socket_at(descriptor, port) as sock:
            if sock is not None and _is_listening(sock):
                yield sock


def _is_listening(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # gRPC has closed the socket meanwhile


def _peer_at(descriptor: int, port: int) -> Peer | None:
    with _socket_at(descriptor, port) as sock:
        try:
            host, its_port = sock.getpeername()[:2] if sock is not None else ("", 0)
        except OSError:
            return None  # a listening socket, or a socket that was closed meanwhile
    return (_plain(host), its_port) if host else None


@contextlib.contextmanager
def _socket_at(descriptor: int, port: int) -> Iterator[socket.socket | None]:
    """Yield the socket with this descriptor, or None if its local port is another one. The
    descriptor stays open.
    """
    sock = None
    try:
        # Pass the family and the type: otherwise Python would query the descriptor for them.
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=descriptor)
        local = sock.getsockname()
    except OSError:
        local = None  # the descriptor is a file, or was closed meanwhile
    try:
        yield sock if isinstance(local, tuple) and local[1] == port else None
    finally:
        if sock is not None:
            sock.detach()


def _shut_down(one: PeerConnection, port: int) -> None:
    """Shut down a connection, if its descriptor still belongs to it."""
    try:
        # Check and shut down a copy of the descriptor: gRPC may close the original at any time, and
        # its number may then be reused.
        copy = os.dup(one.descriptor)
    except OSError:
        return
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=copy)
    except OSError:
        # The number now belongs to a file. Leave the copy open: closing it would release the file's
        # locks, see fcntl_locking(2).
        return
    with sock:
        if _peer_at(copy, port) == one.peer:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the peer has already closed the connection


def _peer_of(shown: str) -> Peer:
    """Parse a peer in gRPC's form: ipv4:10.0.0.9:51234 or ipv6:%5B2001:db8::1%5D:51234."""
    host, _, port = urllib.parse.unquote(shown).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdigit() else 0


def _plain(host: str) -> str:
    """Return an address without its scope; an IPv4 address without the prefix of an IPv6 socket."""
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def _turn_away(listener: socket.socket, hosts: Sequence[str]) -> None:
    """Have the kernel drop packets of these hosts to a listening socket, so that nobody seems to
    listen there. A host is an IPv4 address or an IPv6 network of 64 bits; only the last
    `_HOSTS_MAX` hosts are turned away. Open connections of these hosts stay open. Connections that
    are accepted later inherit the filter. If the kernel has no such filters, do nothing.
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
