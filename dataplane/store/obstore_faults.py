"""Converts obstore's exceptions to ours.

obstore has one exception for nearly everything, with the details in its text: the HTTP status, the
store's own error code, and the kind of a broken connection. This is the one place that reads that
text. obstore >= 0.8 writes it so; the conformance suite would notice a change.
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
from dataplane.store.unreachable import Why, passes_with_time, unreachable

_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"(\w+)\"")
_ENDPOINT = re.compile(r"Error performing \w+ (https?://[^/\s?]+)")
_ASKED = re.compile(r"Error performing \w+ (\S+)")
_THROTTLES = ("SlowDown", "Throttl", "TooManyRequests", "RequestLimitExceeded", "ServerBusy")
_GIVES_CREDENTIALS = re.compile(
    r"latest/api/token|//169\.254\.|metadata\.google|/credentials\b|//sts\.|//oauth2\.|/oauth2/"
)
_WHYS = (
    (("kind: Timeout", "TimedOut"), Why.LATE),
    (("dns error", "failed to lookup"), Why.NO_ADDRESS),
    (("ConnectionRefused",), Why.REFUSED),
    (("HostUnreachable", "NetworkUnreachable", "NetworkDown"), Why.NO_ROUTE),
    (("kind: Connect,",), Why.UNKNOWN),
)
# A server that speaks plain HTTP, and a bad certificate: retries within a call cannot help.
_NO_TLS = "InvalidContentType"
_NOT_TRUSTED = re.compile(r"InvalidCertificate\(([^;]*?)\),?\n", re.DOTALL)

Fault = StoreError | DatasetChangedError


def mapped(
    cause: Exception, url: str, base: str, span: tuple[int, int] | None, *, had_credentials: bool
) -> Fault:
    """Our error for an error of obstore. `span` is (offset, length) of a read. With
    `had_credentials`, missing credentials now are an outage, not a denial.
    """
    text = str(cause)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    said = " ".join(part for part in (status and f"HTTP {status}", code) if part)
    # Only reads have a condition.
    if span is not None and (isinstance(cause, PreconditionError) or status == "412"):
        return DatasetChangedError(f"{url} changed since it was indexed", shard=url)
    if isinstance(cause, FileNotFoundError) or status == "404":
        return _missing(url, base, code)
    if _is_denied(cause, status, text):
        return _denied(url, text, said, had_credentials=had_credentials)
    if status in ("429", "503") or any(word in code for word in _THROTTLES):
        return StoreThrottled(f"{url}: the store asks to slow down ({said})", shard=url)
    # S3 says with status 400 that a request came too slowly.
    if passes_with_time(int(status or 0)) or code == "RequestTimeout":
        return StoreUnavailable(
            f"{url}: the store reported an internal failure ({said})", shard=url
        )
    if "UnexpectedRange" in text or status == "416":
        return _short(url, text, span)
    if "NotPartial" in text:
        return StoreError(
            f"{url}: the server ignores Range: asked for {_bytes(span)} it sent the whole object. "
            "Use a server that answers ranged reads with status 206",
            shard=url,
        )
    if status in ("405", "501"):
        return StoreError(
            f"{url}: this server does not support the request ({said}). A plain http server "
            f"cannot list files: name each file; braces such as {{000..127}} need no listing",
            shard=url,
        )
    if "HttpError" in text or "reqwest" in text:
        return _not_connected(url, base, text)
    return StoreError(f"{url}: {_first_line(text)}", shard=url)


def has_no_range(cause: Exception) -> bool:
    """Whether the answer to a ranged read shows that the object is empty."""
    return "NotPartial" in str(cause) or _first(_STATUS, str(cause)) == "416"


def _is_denied(cause: Exception, status: str, text: str) -> bool:
    """Access was refused, or there are no credentials: no key, no metadata service."""
    if isinstance(cause, (PermissionDeniedError, UnauthenticatedError, PermissionError)):
        return True
    asked = _ASKED.search(text)
    is_of_credentials = asked is not None and _GIVES_CREDENTIALS.search(asked[1])
    no_key = "missing credential" in text.lower()
    return status in ("401", "403") or bool(is_of_credentials) or no_key


def _missing(url: str, base: str, code: str) -> ShardNotFound:
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return ShardNotFound(f"there is no bucket {base} (asked for {url})", shard=url)
    if url.startswith(base) and len(url) > len(base) + 1:
        return ShardNotFound(f"there is no object {url}, or no bucket {base}", shard=url)
    return ShardNotFound(f"there is no bucket {base}", shard=url)


def _denied(url: str, text: str, said: str, *, had_credentials: bool) -> StoreError:
    if not said and had_credentials:
        return StoreUnavailable(
            f"{url}: the credentials have expired and cannot be renewed ({_first_line(text)})",
            shard=url,
        )
    if not said:
        return StoreDenied(
            f"{url}: no credentials found ({_first_line(text)}). Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or "
            "AZURE_STORAGE_ACCOUNT_KEY; for a public bucket AWS_SKIP_SIGNATURE=true",
            shard=url,
        )
    if url.startswith(("http://", "https://")) and "?" in url:
        return StoreDenied(
            f"{url}: access refused ({said}): check that the url's signature or token is for GET, "
            "and has not expired. Signed urls must outlive the job",
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
        f"{url}: received fewer bytes than requested, {_bytes(span)} ({_first_line(text)})",
        shard=url,
        offset=offset,
        expected=length,
    )


def _not_connected(url: str, base: str, text: str) -> StoreError:
    found = _ENDPOINT.search(text)
    endpoint = found[1] if found else base
    if _NO_TLS in text:
        return StoreError(
            f"{url}: {endpoint} does not speak TLS: write http:// instead of https://, or check "
            "the port",
            shard=url,
        )
    if "InvalidCertificate" in text:
        reason = " ".join(_first(_NOT_TRUSTED, text).split()) or "it cannot be verified"
        return StoreError(
            f"{url}: the TLS certificate of {endpoint} is not trusted ({reason}): check the host "
            "name, the clock, and the certificate authorities of this machine",
            shard=url,
        )
    why = next((why for words, why in _WHYS if any(word in text for word in words)), Why.BROKEN)
    return unreachable(url, endpoint, why)


def _bytes(span: tuple[int, int] | None) -> str:
    return f"bytes [{span[0]}, {span[0] + span[1]})" if span else "the whole object"


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next((group for group in found.groups() if group), "") if found else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
