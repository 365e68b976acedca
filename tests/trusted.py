"""What servers and clients in one test process show each other."""

from __future__ import annotations

from dataplane.security.security import Security
from dataplane.security.tokens import TokenSource

TOKEN = "a-token-that-only-tests-know-0123456789"
TRUSTED = Security(TokenSource("the tests", (TOKEN,)))
STRANGER = Security()
