"""Scrapes of metrics, as Prometheus makes them."""

from __future__ import annotations

import ssl
import time
import urllib.request
from collections.abc import Callable

from fleet import Service
from prometheus_client.parser import text_string_to_metric_families

Values = dict[tuple[str, ...], float]
"""By the values of labels, in the order of their names."""


def page(address: str, token: str = "", tls: ssl.SSLContext | None = None, **how: str) -> str:
    """The text at /metrics, or at another `path`, for another `method`."""
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{address}{how.get('path', '/metrics')}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method=how.get("method", "GET"))
    with urllib.request.urlopen(request, timeout=60, context=tls) as answer:
        return str(answer.read().decode())


def values(text: str, name: str) -> Values:
    """The samples of this name."""
    return {
        tuple(sample.labels[label] for label in sorted(sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def address_in(service: Service) -> str:
    """Where a service shows its metrics, from its log."""
    assert service.log is not None
    (line, *_) = service.log.wait_for("metrics are shown")
    return line.split("address=")[1].split()[0].strip('"')


def until(read: Callable[[], Values], is_so: Callable[[Values], bool]) -> Values:
    """Return the page once the condition holds; the deadline only ends a hang."""
    deadline = time.monotonic() + 120
    while not is_so(samples := read()):
        assert time.monotonic() < deadline, samples
    return samples
