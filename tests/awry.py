"""A small S3 server over real HTTP that misbehaves on request, as real ones do."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import http.server
import re
import socket
import ssl
import struct
import threading
import urllib.parse
import xml.sax.saxutils
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dataplane_bench.s3 import Certificate

_DRIPPED = 100
_DRIP_S = 0.02
_PAGE = 1000
_REPEATS = 5


class Mood(enum.Enum):
    """How the server answers a request."""

    WELL = "as S3 would"
    SLOW_DOWN = "503 SlowDown"
    TOO_MANY = "429"
    INTERNAL = "500 InternalError"
    LATE = "408 RequestTimeout"
    DENIED = "403 AccessDenied"
    UNMET = "412 PreconditionFailed"
    NO_BUCKET = "404 NoSuchBucket"
    REFUSED = "what `refusal` says"
    TRUNCATED = "half of the promised body, then a clean close"
    SHORT = "a whole and valid answer with one byte less than asked for"
    RESET = "half of the body, then RST"
    WHOLE = "200 and the whole object, whatever range was asked for"
    UNPINNED = "ignores If-Match"
    ELSEWHERE = "307, a redirect"
    NO_TOKEN = "a list goes on after this page, and does not say where"
    AGAIN = "pages of a list are all the first one"
    UNORDERED = "a list goes from the last key to the first, and starts at no other"
    HINTED = "103 Early Hints, and then the answer"
    SLOW = "as S3 would, after a fifth of a second"
    HANG = "nothing, until the server closes"
    STALL = "half of the body, then nothing until the server closes"
    DRIP = "the last bytes of the body one by one"
    DRIP_HEAD = "a head that comes byte by byte, and does not end"


@dataclass(slots=True)
class Awry:
    """Each request uses up one of `moods`; then `usual` applies. `seen` lists (method, range).
    Headers that are `altered` have another value in each answer; None leaves them out, and etags of lists, too.
    `listed` is the time of objects in lists. Requests signed with the key `expired` are refused.
    """

    objects: dict[str, bytes]
    usual: Mood = Mood.WELL
    moods: deque[Mood] = field(default_factory=deque)
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    altered: dict[str, str | None] = field(default_factory=dict)
    listed: str = "2026-10-21T07:28:00.000Z"
    refusal: tuple[int, str] = (400, "")
    expired: str = "no key"
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: set[socket.socket] = field(default_factory=set)
    port: int = 0
    certificate: Certificate | None = None

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self.certificate else ''}://127.0.0.1:{self.port}"

    def be(self, *moods: Mood, then: Mood = Mood.WELL) -> None:
        with self.lock:
            self.moods, self.usual = deque(moods), then
            self.seen.clear()

    def next_mood(self, method: str, asked: str | None) -> Mood:
        with self.lock:
            self.seen.append((method, asked))
            return self.moods.popleft() if self.moods else self.usual

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "thing",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            **({"SSL_CERT_FILE": str(self.certificate.authority)} if self.certificate else {}),
        }


@contextlib.contextmanager
def awry_server(
    objects: dict[str, bytes], certificate: Certificate | None = None
) -> Iterator[Awry]:
    """Serve `objects` ("bucket/key" -> body) on a free port of 127.0.0.1, over TLS if there is a
    certificate.
    """
    state = Awry(objects, certificate=certificate)

    class Answer(_Answer):
        awry = state

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = False
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is part of the test."""

    server = Server(("127.0.0.1", 0), Answer)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.certificate, certificate.key)
        # The handshake is the first read, in the thread of the connection.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="awry")
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        with state.lock:
            # Idle connections of a client's pool would hold the server open.
            for connection in state.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join()


def etag_of(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


class _Answer(http.server.BaseHTTPRequestHandler):
    awry: Awry
    protocol_version = "HTTP/1.1"
    timeout = 60
    wbufsize = 0
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.awry.lock:
            self.awry.open.add(self.connection)
            if self.awry.closing.is_set():  # too late to be shut down with the others
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        with self.awry.lock:
            self.awry.open.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        """Nothing: tests are silent."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        """Answer a client that asks the machine for a role's credentials."""
        self._refuse(404, "NotFound")

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        asked = self.headers.get("Range")
        mood = self.awry.next_mood(self.command, asked)
        if mood is Mood.HANG:
            self.awry.closing.wait()
            self.close_connection = True
            return
        if mood is Mood.SLOW:
            self.awry.closing.wait(0.2)
        if mood is Mood.DRIP_HEAD:
            self._drip(b"HTTP/1.1 206 " + _DRIPPED * b"x")
            self.close_connection = True
            return
        refusals = {
            Mood.SLOW_DOWN: (503, "SlowDown"),
            Mood.TOO_MANY: (429, "TooManyRequests"),
            Mood.INTERNAL: (500, "InternalError"),
            Mood.LATE: (408, "RequestTimeout"),
            Mood.ELSEWHERE: (307, "TemporaryRedirect"),
            Mood.DENIED: (403, "AccessDenied"),
            Mood.UNMET: (412, "PreconditionFailed"),
            Mood.NO_BUCKET: (404, "NoSuchBucket"),
        }
        signed = f"{self.path} {self.headers.get('Authorization')}"
        if mood in refusals:
            self._refuse(*refusals[mood])
        elif mood is Mood.REFUSED:
            self._answer_refusal(*self.awry.refusal)
        elif self.awry.expired in signed:
            self._refuse(400, "ExpiredToken")
        elif "list-type=2" in url.query:
            self._list(urllib.parse.unquote(url.path).strip("/"), url.query, mood)
        else:
            self._object(urllib.parse.unquote(url.path).lstrip("/"), asked, mood)

    def _object(self, name: str, asked: str | None, mood: Mood) -> None:
        body = self.awry.objects.get(name)
        if body is None:
            self._refuse(404, "NoSuchKey")
            return
        wanted = self.headers.get("If-Match")
        if wanted not in (None, "*", etag_of(body)) and mood is not Mood.UNPINNED:
            self._refuse(412, "PreconditionFailed")
            return
        status, first, last = 200, 0, len(body) - 1
        if asked and mood is not Mood.WHOLE:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
            assert match is not None
            first, last = int(match[1]), min(int(match[2] or last), last)
            status = 206
            if first >= len(body):
                self._refuse(416, "InvalidRange")
                return
            last -= mood is Mood.SHORT
        part = body[first : last + 1]
        headers = {"ETag": etag_of(body), "Content-Length": str(len(part))}
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        if mood is Mood.HINTED:
            self.send_response_only(103)
            self.send_header("Link", "</style.css>; rel=preload")
            self.end_headers()
        self._head(status, headers)
        if self.command == "HEAD":
            return
        if mood in (Mood.TRUNCATED, Mood.RESET, Mood.STALL):
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
            if mood is Mood.STALL:
                self.awry.closing.wait()
            if mood is Mood.RESET:
                # With a linger time of zero, close() sends RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            return
        if mood is Mood.DRIP:
            self.wfile.write(part[:-_DRIPPED])
            self._drip(part[-_DRIPPED:])
            return
        self.wfile.write(part)

    def _drip(self, text: bytes) -> None:
        """Send it in much less than any time in which nothing comes, but never fast."""
        for at in range(len(text)):
            if not self.awry.closing.wait(_DRIP_S):
                self.wfile.write(text[at : at + 1])

    def _list(self, bucket: str, query: str, mood: Mood) -> None:
        options = dict(urllib.parse.parse_qsl(query))
        token = options.get("continuation-token", "")
        after = "" if mood is Mood.AGAIN else token or options.get("start-after", "")
        whole = f"{bucket}/{options.get('prefix', '')}"
        names = sorted(name for name in self.awry.objects if name.startswith(whole))
        if mood is Mood.UNORDERED:
            names = [name for name in reversed(names) if not token or name < f"{bucket}/{token}"]
        else:
            names = [name for name in names if name > f"{bucket}/{after}"]
        names = [name.removeprefix(f"{bucket}/") for name in names]
        page, has_more = names[:_PAGE], len(names) > _PAGE
        entries = "".join(self._entry(key, self.awry.objects[f"{bucket}/{key}"]) for key in page)
        if has_more and mood is not Mood.NO_TOKEN and token.count("+") < _REPEATS:
            following = f"{token}+" if mood is Mood.AGAIN else page[-1]
            entries += f"<NextContinuationToken>{following}</NextContinuationToken>"
        text = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount><MaxKeys>{_PAGE}</MaxKeys>"
            f"<IsTruncated>{str(has_more).lower()}</IsTruncated>{entries}</ListBucketResult>"
        ).encode()
        self._head(200, {"Content-Length": str(len(text))})
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
        self._answer_refusal(status, text)

    def _answer_refusal(self, status: int, text: str) -> None:
        body = b"" if self.command == "HEAD" else text.encode()
        self._head(status, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        dated = {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
        for name, value in {**headers, **dated, **self.awry.altered}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _entry(self, key: str, body: bytes) -> str:
        name, etag = xml.sax.saxutils.escape(key), xml.sax.saxutils.escape(etag_of(body))
        shown = f"<ETag>{etag}</ETag>" if self.awry.altered.get("ETag", "") is not None else ""
        return (
            f"<Contents><Key>{name}</Key><LastModified>{self.awry.listed}</LastModified>{shown}"
            f"<Size>{len(body)}</Size></Contents>"
        )
