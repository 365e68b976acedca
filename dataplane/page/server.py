"""The live page at the metrics port: `/` is the page, `/events` sends its figures once a second as
server-sent events, and `/status.json` is the output of `dataplane status --json`.

Invariants:
1. One event a second is made for all browsers together, and none while no browser watches.
2. A slow browser gets fewer events. At most one event waits for each browser.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import time
from collections.abc import AsyncGenerator
from http import HTTPStatus

import msgspec

from dataplane.metrics.server import Answer, MetricsServer, RefusedError
from dataplane.model.errors import AccessDenied, DataplaneError
from dataplane.model.redact import redacted
from dataplane.page.figures import PARTS, fleet, own_node, page_text
from dataplane.rpc.base import Coordination
from dataplane.rpc.membership import StatusRequest, StatusResponse

PERIOD_S = 1.0
WATCHERS_MAX = 16
STREAM_S = 600.0
"""A stream ends after this time. The browser connects again, if its credentials are still valid."""
_STATUS_S = 3.0
_REFUSED_S = 60.0
"""How long to wait after a coordinator has refused to give its status."""
_JSON = "application/json; charset=utf-8"


class Page:
    """The page of one service. `address` is the coordinator's address, for the commands that the
    page shows.
    """

    def __init__(self, server: MetricsServer, coordination: Coordination, address: str) -> None:
        self._server, self._coordination, self._address = server, coordination, address
        self._watchers = 0
        self._making = asyncio.Lock()
        self._number, self._made_at, self._event = 0, float("-inf"), b""
        self._status: StatusResponse | None = None
        self._refused, self._refused_at = "", float("-inf")
        server.serve("/", self._page)
        server.serve("/events", self._events)
        server.serve("/status.json", self._status_json)

    async def _page(self) -> Answer:
        return _page()

    async def _status_json(self) -> Answer:
        try:
            status = await self._asked()
        except (DataplaneError, TimeoutError) as error:
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, _problem(error)) from error
        return Answer(_JSON, msgspec.json.encode(status), ("Cache-Control: no-store",))

    async def _events(self) -> Answer:
        if self._watchers >= WATCHERS_MAX:
            why = f"{WATCHERS_MAX} browsers watch already: close one of them"
            raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, why)
        return Answer("text/event-stream", self._stream(), ("Cache-Control: no-store",))

    async def _stream(self) -> AsyncGenerator[bytes]:
        self._watchers += 1
        try:
            number, until = self._number, time.monotonic() + STREAM_S
            yield b"retry: 1000\n\n"
            while time.monotonic() < until:
                async with self._making:
                    if number == self._number:
                        await asyncio.sleep(self._made_at + PERIOD_S - time.monotonic())
                        self._event = await self._made()
                        self._number, self._made_at = number + 1, time.monotonic()
                number = self._number
                yield self._event
        finally:
            self._watchers -= 1

    async def _made(self) -> bytes:
        problem, own = self._refused, None
        try:
            own = own_node(await self._server.readings())
            if time.monotonic() > self._refused_at + _REFUSED_S:
                self._status, self._refused, problem = await self._asked(), "", ""
        except (DataplaneError, TimeoutError) as error:
            problem = _problem(error)
            if isinstance(error, AccessDenied):
                self._refused, self._refused_at = problem, time.monotonic()
        facts = {
            "time": time.time(),
            "address": self._address,
            "problem": problem,
            "fleet": None if self._status is None else fleet(self._status),
            "node": own,
        }
        return b"data: " + msgspec.json.encode(facts) + b"\n\n"

    async def _asked(self) -> StatusResponse:
        return await self._server.on_service(self._coordination.status(StatusRequest()), _STATUS_S)


def _problem(error: DataplaneError | TimeoutError) -> str:
    if isinstance(error, TimeoutError):
        return "the service does not answer at the moment; these are its last figures"
    return redacted(str(error))


@functools.cache
def _page() -> Answer:
    """Return the page. Its policy allows only the page's own script and style, and requests to its
    own service.
    """
    text = page_text()
    allowed = {
        kind: base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for kind, part in PARTS.findall(text)
    }
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        + "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in allowed.items())
    )
    lines = (f"Content-Security-Policy: {policy}", "Referrer-Policy: no-referrer")
    return Answer("text/html; charset=utf-8", text.encode(), (*lines, "Cache-Control: no-store"))
