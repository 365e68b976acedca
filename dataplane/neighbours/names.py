"""The addresses of neighbours' host names. Thread-safe.

Nodes usually tell IP addresses, but one may be reached by a name only. The system's resolver takes
as long as its servers do, and cannot be told a deadline.

Invariants:
1. A name is looked up by one thread at a time, however many wait for it, and none waits longer than
   it wants to.
2. What was found is used for KEPT_S; a failure is told to those who waited for it.
"""

from __future__ import annotations

import concurrent.futures
import ipaddress
import socket
import threading
import time
from collections.abc import Callable

from dataplane.errors import ConfigError
from dataplane.rpc.address import TcpAddress, resolve

KEPT_S = 30.0

Found = concurrent.futures.Future[TcpAddress]


class Names:
    """Known names. `look_up` finds the address of one, and may take any time."""

    def __init__(self, look_up: Callable[[TcpAddress], TcpAddress] = resolve) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._known: dict[TcpAddress, tuple[float, Found]] = {}

    def find(
        self, address: TcpAddress, timeout_s: float
    ) -> tuple[socket.AddressFamily, tuple[str, int]]:
        """Return where to connect to.

        Raises:  ConfigError: it has no address.  TimeoutError.
        """
        found = address if _is_number(address.host) else self._named(address, timeout_s)
        family = socket.AF_INET6 if ":" in found.host else socket.AF_INET
        return family, (found.host, found.port)

    def _named(self, address: TcpAddress, timeout_s: float) -> TcpAddress:
        now = time.monotonic()
        with self._lock:
            since, found = self._known.get(address, (now, None))
            if found is None or (found.done() and (found.exception() or now - since > KEPT_S)):
                found = concurrent.futures.Future()
                self._known[address] = now, found
                thread = threading.Thread(target=self._find, args=(address, found), daemon=True)
                thread.start()
        try:
            return found.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError from None

    def _find(self, address: TcpAddress, found: Found) -> None:
        try:
            found.set_result(self._look_up(address))
        except ConfigError as error:
            found.set_exception(error)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
