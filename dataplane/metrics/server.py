"""The metrics port for people and Prometheus: GET /metrics over HTTP, and paths that other rooms
add (page/server.py). The port has a thread of its own.

The rules are those of the coordinator's port (docs/security.md): a caller needs a token that may
read the status, TLS is used if it is set up, and without `insecure` only this host may use plain
text.

Invariants:
1. Only the functions that read a service's counts run on the event loop of the service.
2. A connection has `_REQUEST_S` for its request. There are at most `_COUNT_MAX` connections: the
   oldest connection that has not sent its request makes way for a new one.
3. Scrapes are made one at a time.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dataplane.base.meters import BOUNDS_S, Durations
from dataplane.base.trace import Trace, refusals
from dataplane.metrics.table import Kind, Reading, by_metric
from dataplane.model.errors import ConfigError
from dataplane.rpc.address import (
    TcpAddress,
    is_loopback,
    listening,
    network_of,
    parse,
    resolve,
)
from dataplane.security.admission import Admission, AdmissionRules
from dataplane.security.security import AUTHORIZATION, BEARER, Security
from dataplane.security.tls import Certificates, load_cert_chain
from dataplane.security.tokens import READERS, WrongTokenError

_trace = Trace("metrics")
_audit = Trace("security")

_REQUEST_S = 10.0
_READ_S = 10.0
"""How long a scrape waits for the event loop of the service."""
_COUNT_MAX = 32
_HEAD_BYTES_MAX = 16 << 10
_PATH = "/metrics"
_BASIC = "Basic "
_FORM = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (*map(str, BOUNDS_S), "+Inf")

Read = Callable[[], Iterable[Reading]]
T = TypeVar("T")


class Answer(Struct, frozen=True):
    """The answer to a request: its content type, its body, and additional header lines. A body may
    be a generator, whose pieces are sent as they come.
    """

    form: str
    body: bytes | AsyncGenerator[bytes]
    lines: tuple[str, ...] = ()


Respond = Callable[[], Awaitable[Answer]]


class RefusedError(Exception):
    """A request is refused with this status, for this reason."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class MetricsServer:
    """The metrics port at one address. Use: `start()`, `add()` functions, which are called on the
    event loop that called `start`, `close()`.
    """

    def __init__(self, address: str, security: Security) -> None:
        wanted = parse(address)
        if not isinstance(wanted, TcpAddress):
            raise ConfigError(
                f"{address!r} is no address for metrics: Prometheus reads them over TCP, so write "
                '"host:port" or ":port"',
                address=address,
            )
        self._wanted, self._security, self.address = wanted, security, ""
        self._reads: list[Read] = []
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._context: tuple[int, ssl.SSLContext] | None = None
        rules = AdmissionRules(_COUNT_MAX, silent_max=_COUNT_MAX - 1, greeting_s=_REQUEST_S)
        self._admission: Admission[asyncio.Task[None]] = Admission(rules)
        self._service: asyncio.AbstractEventLoop | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._listener: socket.socket | None = None
        self._scraping = asyncio.Lock()
        self._paths: dict[str, Respond] = {_PATH: self._scrape}

    def start(self) -> str:
        """Listen, and return the address, with its real port.

        Raises:  ConfigError: the address is taken, not of this machine, or not allowed.
        """
        address = resolve(self._wanted)
        loopback = is_loopback(address)
        self._security.check_listener(self._wanted.target, is_loopback=loopback)
        if self._security.tls is None and not loopback:
            what = "metrics are open to the network without TLS: tokens cross it in plain text"
            _audit.failed(what, address=address.target, by="--insecure")
        try:
            listener = listening(address, _COUNT_MAX)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for metrics at {address.target}: {error.strerror}; choose another "
                "address with --metrics-listen, or port 0 for a free one",
                address=address.target,
            ) from error
        listener.setblocking(False)
        self._listener = listener
        self._service = asyncio.get_running_loop()
        self._thread.start()
        self.address = TcpAddress(address.host, listener.getsockname()[1]).target
        _trace.noted("metrics are shown", address=self.address)
        return self.address

    def add(self, read: Read) -> None:
        """Add the readings that this function returns. The function must not wait."""
        self._reads.append(read)

    def serve(self, path: str, respond: Respond) -> None:
        """Add a path. `respond` answers its requests, in the thread of the port."""
        self._paths[path] = respond

    async def readings(self) -> list[Reading]:
        """Return the present readings of all added functions. For the thread of the port.

        Raises:  TimeoutError: the service does not answer.
        """
        return await self.on_service(self._read(), _READ_S)

    async def on_service(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` on the event loop of the service, and wait for its result in the thread of the
        port.

        Raises:  TimeoutError, and what the work raises.
        """
        assert self._service is not None, "it was started"
        running = asyncio.run_coroutine_threadsafe(work, self._service)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Stop listening, and wait for the thread to end. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())
        accepting.add_done_callback(self._on_end)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _trace.broke("metrics are no longer shown", by=error, error=repr(error))

    async def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _trace.failed("no connections for metrics accepted", error=error)
                await asyncio.sleep(1.0)
                continue
            task = self._loop.create_task(self._serve(sock, str(peer[0])))
            self._admission.came(task, network_of(str(peer[0])), self._loop.time())
            task.add_done_callback(self._admission.left)
            await asyncio.sleep(0)  # let the task begin: otherwise it would not close its socket
            for older, _, _ in self._admission.makes_way(self._loop.time()):
                older.cancel()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        """Answer one request, and hang up."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_REQUEST_S):
                reader = asyncio.StreamReader(limit=_HEAD_BYTES_MAX)
                protocol = asyncio.StreamReaderProtocol(reader)
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=self._tls()
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                head = await reader.readuntil(b"\r\n\r\n")
            try:
                status, answer = HTTPStatus.OK, await self._check(head, writer, peer)()
            except RefusedError as refused:
                why = f"{refused.why}\n".encode()
                status, answer = refused.status, Answer("text/plain; charset=utf-8", why)
            await _send(writer, status, answer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            # The peer is gone, sends or receives nothing, or does not speak HTTP.
            if writer is not None:
                writer.transport.abort()
        except ConfigError as error:
            _trace.failed("no connections for metrics accepted", error=error)
        finally:
            if writer is None:
                sock.close()
            else:
                writer.close()

    def _check(self, head: bytes, writer: asyncio.StreamWriter, peer: str) -> Respond:
        """Check the caller, then the request. Return the function that answers.

        Raises:  RefusedError.
        """
        request, *lines = head.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): text.strip() for name, _, text in fields}
        if headers.get(AUTHORIZATION, "").startswith(_BASIC):
            headers[AUTHORIZATION] = BEARER + _password(headers[AUTHORIZATION])
        try:
            caller = self._security.caller(headers)
        except WrongTokenError as error:
            raise self._refusal(HTTPStatus.UNAUTHORIZED, str(error), peer) from error
        if not caller.roles & READERS:
            raise self._refusal(HTTPStatus.FORBIDDEN, "its token may not read the status", peer)
        if caller.job or caller.datasets is not None:
            why = "its token is for one job or some datasets, and metrics are of all"
            raise self._refusal(HTTPStatus.FORBIDDEN, why, peer)
        if self._security.peers:
            shown = writer.get_extra_info("peercert") or {}
            uris = [name for kind, name in shown.get("subjectAltName", ()) if kind == "URI"]
            if not self._security.knows(uris):
                why = f"its certificate is for {', '.join(uris) or 'no URI'}, not in tls_peers"
                raise self._refusal(HTTPStatus.FORBIDDEN, why, peer)
        task = asyncio.current_task()
        if task is not None:
            self._admission.greeted(task, "")
        method, _, rest = request.partition(" ")
        if method != "GET":
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
        respond = self._paths.get(rest.partition(" ")[0].partition("?")[0])
        if respond is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._paths)}")
        return respond

    def _refusal(self, status: HTTPStatus, why: str, peer: str) -> RefusedError:
        _audit.refused("metrics refused", by=network_of(peer), peer=peer, why=why)
        return RefusedError(status, f"metrics are not shown to you: {why}")

    async def _scrape(self) -> Answer:
        async with self._scraping:
            try:
                readings = await self.readings()
            except TimeoutError as error:
                why = f"the service has not answered for {_READ_S:g} s"
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, why) from error
            readings += [
                Reading("dataplane_refusals_total", count, (event,))
                for event, count in list(refusals.items())
            ]
            text = generate_latest(_Families(readings)) + generate_latest(self._registry)
        return Answer(_FORM, text)

    async def _read(self) -> list[Reading]:
        return [reading for read in self._reads for reading in read()]

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context with the current certificates; None without TLS."""
        tls = self._security.tls
        if tls is None:
            return None
        version = tls.current()[1]
        if self._context is None or self._context[0] != version:
            self._context = version, _context(tls)
        return self._context[1]


def _context(tls: Certificates) -> ssl.SSLContext:
    pems = tls.current()[0]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert pems.cert is not None, "`check_listener` refuses to listen without a certificate"
    assert pems.key is not None
    load_cert_chain(context, pems.key + b"\n" + pems.cert)
    if pems.ca is not None:
        context.load_verify_locations(cadata=pems.ca.decode("ascii", "replace"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _password(basic: str) -> str:
    """Return the password of a browser: the user types the token as the password."""
    try:
        text = base64.b64decode(basic.removeprefix(_BASIC), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return text.partition(":")[2]


async def _send(writer: asyncio.StreamWriter, status: HTTPStatus, answer: Answer) -> None:
    """Send an answer.   Raises:  TimeoutError: the peer has received nothing for `_REQUEST_S`."""
    writer.write(_head(status, answer))
    if isinstance(answer.body, bytes):
        writer.write(answer.body)
        async with asyncio.timeout(_REQUEST_S):
            await writer.drain()
        return
    async with contextlib.aclosing(answer.body):
        async for piece in answer.body:
            writer.write(piece)
            async with asyncio.timeout(_REQUEST_S):
                await writer.drain()


def _head(status: HTTPStatus, answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {answer.form}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        *answer.lines,
    ]
    if isinstance(answer.body, bytes):
        lines.append(f"Content-Length: {len(answer.body)}")
    if status is HTTPStatus.UNAUTHORIZED:
        # The second line makes a browser ask its user for a password.
        lines += ["WWW-Authenticate: Bearer", 'WWW-Authenticate: Basic realm="dataplane token"']
    return "\r\n".join([*lines, "", ""]).encode()


class _Families(Collector):
    """The readings of one scrape, in the form of prometheus_client."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; prometheus_client calls this."""
        for metric, readings in by_metric(self._readings).items():
            name, about, labels = metric.name, metric.help, metric.labels
            if metric.kind is Kind.HISTOGRAM:
                durations = HistogramMetricFamily(name, about, labels=labels)
                for reading in readings:
                    assert isinstance(reading.value, Durations)
                    took = reading.value
                    durations.add_metric(reading.labels, _buckets(took), took.sum_s)
                yield durations
                continue
            is_counter = metric.kind is Kind.COUNTER
            family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
                name, about, labels=labels
            )
            for reading in readings:
                assert not isinstance(reading.value, Durations)
                value = reading.value() if callable(reading.value) else reading.value
                family.add_metric(reading.labels, value)
            yield family


def _buckets(took: Durations) -> list[tuple[str, float]]:
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip(_BUCKETS, took.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
