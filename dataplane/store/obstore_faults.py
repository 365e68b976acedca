"""obstore's exceptions as ours.

obstore has one exception for nearly everything, and says the rest in its text: the HTTP status,
the store's own error code, and the kind of a broken connection. This is the one place that reads
that text. obstore >= 0.8 writes it so; the conformance suite would notice a change.
"""

from __future__ import annotations

import re

from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

from dataplane.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)

_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"(\w+)\"")
_ENDPOINT = re.compile(r"Error performing \w+ (https?://[^/\s?]+)")
_THROTTLES = ("SlowDown", "Throttl", "TooManyRequests", "RequestLimitExceeded", "ServerBusy")
_NO_TOKEN = re.compile(r"latest/api/token|169\.254\.|metadata\.google|credential", re.IGNORECASE)

Fault = StoreError | DatasetChangedError


def mapped(cause: Exception, url: str, base: str, span: tuple[int, int] | None) -> Fault:
    """The error of ours that says what obstore said. `span` is (offset, length) of a read."""
    text = str(cause)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    said = " ".join(part for part in (status and f"HTTP {status}", code) if part)
    if isinstance(cause, PreconditionError) or status == "412":
        return DatasetChangedError(f"{url} changed since it was indexed", shard=url)
    if isinstance(cause, FileNotFoundError) or status == "404":
        return _missing(url, base, code)
    if (
        isinstance(cause, (PermissionDeniedError, UnauthenticatedError, PermissionError))
        or status in ("401", "403")
        or ("error sending request" in text and _NO_TOKEN.search(text))
        or "missing credential" in text.lower()
    ):
        return _denied(url, text, said)
    if status in ("429", "503") or any(word in code for word in _THROTTLES):
        return StoreThrottled(f"{url}: the store asks to slow down ({said})", shard=url)
    if status.startswith("5") and status != "501":
        return StoreUnavailable(f"{url}: the store failed by its own account ({said})", shard=url)
    if "IncompleteBody" in text or "UnexpectedRange" in text or status == "416":
        return _short(url, text, span)
    if "NotPartial" in text:
        return StoreError(
            f"{url}: the server ignores Range: asked for {_bytes(span)} it sent the whole object. "
            "Serve the shards from a store that answers ranged reads with 206",
            shard=url,
        )
    if status in ("405", "501"):
        return StoreError(
            f"{url}: this server cannot do that ({said}). A plain http server cannot be listed: "
            "name each file; braces such as {000..127} need no listing",
            shard=url,
        )
    if "HttpError" in text or "reqwest" in text:
        return _unreachable(url, base, text)
    return StoreError(f"{url}: {_first_line(text)}", shard=url)


def _missing(url: str, base: str, code: str) -> ShardNotFound:
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return ShardNotFound(f"there is no bucket {base} (asked for {url})", shard=url)
    if url.startswith(base) and len(url) > len(base) + 1:
        return ShardNotFound(f"there is no object {url}, or no bucket {base}", shard=url)
    return ShardNotFound(f"there is no bucket {base}", shard=url)


def _denied(url: str, text: str, said: str) -> StoreDenied:
    if not said:
        return StoreDenied(
            f"{url}: no credentials found ({_first_line(text)}). Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or "
            "AZURE_STORAGE_ACCOUNT_KEY; for a public bucket AWS_SKIP_SIGNATURE=true",
            shard=url,
        )
    return StoreDenied(
        f"{url}: access refused ({said}): check the credentials, their right to read and list "
        "this bucket, and the region",
        shard=url,
    )


def _short(url: str, text: str, span: tuple[int, int] | None) -> TruncatedRead:
    offset, length = span or (0, 0)
    return TruncatedRead(
        f"{url}: fewer bytes came than asked for, {_bytes(span)} ({_first_line(text)})",
        shard=url,
        offset=offset,
        expected=length,
    )


def _unreachable(url: str, base: str, text: str) -> StoreUnavailable:
    found = _ENDPOINT.search(text)
    endpoint = found[1] if found else base
    if "kind: Timeout" in text or "TimedOut" in text:
        what = "did not answer in time: it is overloaded, or a firewall drops packets"
    elif "dns error" in text or "failed to lookup" in text:
        what = "has no address: check the host name (AWS_ENDPOINT_URL, AWS_REGION) and DNS"
    elif "ConnectionRefused" in text:
        what = "refused the connection: check that it runs, and the port of AWS_ENDPOINT_URL"
    elif "kind: Connect," in text:
        what = "cannot be connected to: check the endpoint, the network, the proxy and TLS"
    else:
        what = "broke off the connection"
    return StoreUnavailable(f"{url}: {endpoint} {what}", shard=url)


def _bytes(span: tuple[int, int] | None) -> str:
    return f"bytes [{span[0]}, {span[0] + span[1]})" if span else "the whole object"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next((group for group in found.groups() if group), "") if found else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
