"""An HTTP server whose objects open only to a GET with the right query, as presigned urls do."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SignedServer:
    """`objects` maps the target of a request, path and query as sent, to what it opens."""

    objects: dict[str, bytes] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, target: str, body: bytes) -> str:
        """The url of a new object."""
        self.objects[target] = body
        return f"{self.endpoint}{target}"


@contextlib.contextmanager
def signed_server() -> Iterator[SignedServer]:
    """Serve on a free port of 127.0.0.1."""
    state = SignedServer()

    class Answer(_Answer):
        signed = state

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = False
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="signed")
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Answer(http.server.BaseHTTPRequestHandler):
    signed: SignedServer
    timeout = 60

    def log_message(self, *args: Any) -> None:
        """Nothing: tests are silent."""

    def do_HEAD(self) -> None:
        self._answer(403)

    def do_GET(self) -> None:
        body = self.signed.objects.get(self.path)
        if body is None:
            paths = {target.partition("?")[0] for target in self.signed.objects}
            self._answer(403 if self.path.partition("?")[0] in paths else 404)
            return
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        if self.headers.get("If-Match", etag) != etag:
            self._answer(412)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None:
            self._answer(200, body, {"ETag": etag})
            return
        first, last = int(found[1]), min(int(found[2]), len(body) - 1)
        if first > last:
            self._answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        span = {"ETag": etag, "Content-Range": f"bytes {first}-{last}/{len(body)}"}
        self._answer(206, body[first : last + 1], span)

    def _answer(self, status: int, body: bytes = b"", more: dict[str, str] | None = None) -> None:
        self.signed.seen.append((self.command, self.path))
        self.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
