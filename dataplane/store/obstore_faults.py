"""Convert obstore's exceptions to ours.

obstore has one exception for nearly everything, with the details in its text: the HTTP status, the
store's own error code, and how a connection failed. Only this module parses that text, in the form
of obstore >= 0.9.4; the conformance suite would notice a change.

Of a store's answer, an error shows only code and message: in the rest, S3 repeats a session token
that it refused.
"""

from __future__ import annotations

import re

from msgspec import Struct
from obstore.exceptions import PermissionDeniedError, PreconditionError, UnauthenticatedError

from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.store.faults import (
    UNREACHABLE,
    kind_of,
    refusal,
    shortened,
    unreachable,
    why_of_text,
)

# The answer ends at "Debug source:", where obstore repeats its message in a form for developers.
_ANSWER = re.compile(
    r"Server returned non-2xx status code: (\d{3})[^\n:]*:?(.*?)(?:\n\nDebug source:|\Z)", re.DOTALL
)
_STATUS = re.compile(r"status: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w{1,64})\s*</Code>|\"code\": ?\"(\w{1,64})\"")
_MESSAGE = re.compile(
    r"<Message>([^<]*)</Message>|\"message\": ?\"([^\"]*)\"|<title>([^<]*)</title>", re.IGNORECASE
)
_REGION = re.compile(r"<Region>([\w\-]{1,64})</Region>|expecting '([\w\-]{1,64})'")
_ENDPOINT = re.compile(r"Error performing \w+ (https?://[^/\s?]+)")
_ASKED = re.compile(r"Error performing (\w+) (\S+)")
_GIVES_CREDENTIALS = re.compile(
    r"/latest/(?:api|meta-data)/|//169\.254\.|metadata\.google|/credentials\b|//sts\.|//oauth2\.|"
    r"/oauth2/"
)
_NOT_TRUSTED = re.compile(r"InvalidCertificate\(([^;]*?)\),?\n", re.DOTALL)

# obstore's message about a key that it refuses. The list ends at this key: obstore cannot skip it.
_NOT_LISTED = re.compile(
    r"Encountered object with invalid path: (?:Error parsing )?Path \"(.*)\""
    r"(?: contained empty path segment|: Encountered illegal character sequence)",
    re.DOTALL,
)
_BARE_REDIRECT = "redirect without LOCATION"
# obstore's words for status 200 as the answer to a ranged read, from a store or an http server.
_WHOLE = ("NotPartial", "RangeNotSupported")
_EXPIRED = frozenset({"ExpiredToken", "TokenRefreshRequired"})
# Codes that say that credentials are no longer valid; there may be new ones by now.
_OUTDATED = _EXPIRED | {"InvalidToken", "InvalidAccessKeyId"}

ODD = "an empty, '.' or '..' part, or with a control character"
"""Keys with one of these are refused by obstore."""
Fault = StoreError | DatasetChangedError


class _Said(Struct, frozen=True):
    """The reason that a store gives for refusing a request. All fields are empty if it did not
    answer.
    """

    status: int = 0
    code: str = ""
    message: str = ""
    region: str = ""

    @property
    def short(self) -> str:
        return f"HTTP {self.status} {self.code}".strip() if self.status else ""

    @property
    def whole(self) -> str:
        return f"{self.short}: {self.message}" if self.message else self.short


def mapped(
    cause: Exception, url: str, base: str, span: tuple[int, int] | None, *, may_renew: bool
) -> Fault:
    """Convert an error of obstore. `span` is (offset, length) of a read. `may_renew` means that the
    store accepted our credentials before, and new ones may become available: missing credentials
    are an outage then, not a denial.
    """
    text = str(cause)
    said = _said(text)
    # Only a read, which has a span, is conditional on the etag.
    if span is not None and (isinstance(cause, PreconditionError) or said.status == 412):
        return DatasetChangedError(f"{url} changed since it was indexed", shard=url)
    if _is_of_credentials(cause, text, base, said.status):
        return _no_credentials(url, text, said, may_renew=may_renew)
    if said.status:
        return _refused(url, base, said, span, may_renew=may_renew)
    if isinstance(cause, FileNotFoundError):
        return _missing(url, base, "")
    if "UnexpectedRange" in text:
        return _short(url, shortened(text), span)
    if has_no_range(cause):
        return StoreError(
            f"{url}: the server ignores Range: it sends the whole object instead of a part. Use a "
            "server that answers ranged reads with status 206",
            shard=url,
        )
    if _BARE_REDIRECT in text:
        return _elsewhere(url, "the server redirects without saying where", "")
    odd = _NOT_LISTED.search(text)
    if odd is not None:
        return _not_listed(url, odd[1])
    if "HttpError" in text or "reqwest" in text:
        return _not_connected(url, base, text)
    return StoreError(f"{url}: {shortened(text)}", shard=url)


def has_no_range(cause: Exception) -> bool:
    """Return whether an answer to a ranged read shows that the object is empty or has no ranges."""
    text = str(cause)
    return any(word in text for word in _WHOLE) or _said(text).status == 416


def has_answer(cause: Exception) -> bool:
    """Return whether the text of this error repeats a whole answer of the store."""
    return _ANSWER.search(str(cause)) is not None


def is_mute(cause: Exception) -> bool:
    """Return whether this is a refusal of a HEAD request, whose answer has no body that says
    why.
    """
    status = _said(str(cause)).status
    return bool(status) and kind_of(status) in (StoreError, StoreDenied)


def _said(text: str) -> _Said:
    answer = _ANSWER.search(text)
    if answer is None:
        return _Said(int(_first(_STATUS, text) or 0))
    body = answer[2].strip()
    import html  # here, since a node imports this module while a trainer waits

    message = html.unescape(_first(_MESSAGE, body)) or ("" if body.startswith(("<", "{")) else body)
    return _Said(int(answer[1]), _first(_CODE, body), shortened(message), _first(_REGION, body))


def _is_of_credentials(cause: Exception, text: str, base: str, status: int) -> bool:
    """Return whether credentials could not be fetched or found: no key, no metadata service."""
    request = _ASKED.search(text)
    if request is not None:
        name = base.partition("://")[2]
        is_of_store = any(part in request[2] for part in (base, f"/{name}/", f"//{name}."))
        # The store itself gets only GET and HEAD requests, so POST and PUT are for credentials.
        if request[1] in ("POST", "PUT") or (
            not is_of_store and _GIVES_CREDENTIALS.search(request[2]) is not None
        ):
            return True
    is_refusal = isinstance(cause, (PermissionDeniedError, UnauthenticatedError, PermissionError))
    return not status and (is_refusal or "missing credential" in text.lower())


def _no_credentials(url: str, text: str, said: _Said, *, may_renew: bool) -> StoreError:
    why = said.whole or shortened(text)
    if may_renew:
        return StoreUnavailable(
            f"{url}: the credentials have expired and cannot be renewed ({why})", shard=url
        )
    if issubclass(kind_of(said.status, said.code), UNREACHABLE):
        return StoreUnavailable(
            f"{url}: the service that gives credentials failed ({why})", shard=url
        )
    return StoreDenied(
        f"{url}: no credentials found ({why}). Set AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS or "
        "AZURE_STORAGE_ACCOUNT_KEY; for a public bucket AWS_SKIP_SIGNATURE=true",
        shard=url,
    )


def _refused(
    url: str, base: str, said: _Said, span: tuple[int, int] | None, *, may_renew: bool
) -> StoreError:
    """Return the error for an answer of the store."""
    kind = kind_of(said.status, said.code)
    if issubclass(kind, UNREACHABLE):
        return refusal(url, said.status, said.code)
    if said.region or said.code == "PermanentRedirect":
        return _elsewhere(url, f"the bucket is in another region ({said.whole})", said.region)
    if kind is StoreDenied:
        return _denied(url, said, may_renew=may_renew)
    if kind is ShardNotFound:
        return _missing(url, base, said.code)
    if said.status == 416:
        return _short(url, said.whole, span)
    if said.status in (405, 501):
        advice = (
            ". A plain http server cannot list files: name each file; braces such as {000..127} "
            "need no listing"
        )
        return StoreError(
            f"{url}: this server does not support the request ({said.short})"
            f"{'' if span else advice}",
            shard=url,
        )
    if 300 <= said.status < 400:
        return StoreError(
            f"{url}: the server redirects to what is not a url ({said.short})", shard=url
        )
    return StoreError(f"{url}: the store refused the request ({said.whole})", shard=url)


def _elsewhere(url: str, what: str, region: str) -> StoreError:
    """Return the error for a bucket of S3 in another region than the one for which requests are
    signed.
    """
    if url.startswith(("http://", "https://")):
        return StoreError(f"{url}: {what}", shard=url)
    advice = f"set AWS_REGION to {region}" if region else "set AWS_REGION to the bucket's region"
    return StoreError(
        f"{url}: {what}: {advice}, and check AWS_ENDPOINT_URL if it is set", shard=url
    )


def _missing(url: str, base: str, code: str) -> ShardNotFound:
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return ShardNotFound(f"there is no bucket {base} (asked for {url})", shard=url)
    if url.startswith(("http://", "https://")):
        return ShardNotFound(f"there is no object {url}", shard=url)
    if url.startswith(base) and len(url) > len(base) + 1:
        return ShardNotFound(f"there is no object {url}, or no bucket {base}", shard=url)
    return ShardNotFound(f"there is no bucket {base}", shard=url)


def _denied(url: str, said: _Said, *, may_renew: bool) -> StoreError:
    if said.code in _OUTDATED and may_renew:
        return StoreUnavailable(
            f"{url}: the credentials are no longer valid ({said.whole}), and there are no others "
            "yet",
            shard=url,
        )
    if url.startswith(("http://", "https://")) and "?" in url:
        return StoreDenied(
            f"{url}: access refused ({said.whole}): check that the url's signature or token is for "
            "GET, and has not expired. Signed urls must outlive the job",
            shard=url,
        )
    advice = "check the credentials, their right to read and list this bucket, and the region"
    if said.code in _EXPIRED:
        advice = (
            "renew the credentials. Keys in the environment of a process stay as they are: for "
            "long jobs, use a profile (AWS_PROFILE) or the role of the machine"
        )
    if said.code == "RequestTimeTooSkewed":
        advice = "set the clock of this machine"
    return StoreDenied(f"{url}: access refused ({said.whole}): {advice}", shard=url)


def _short(url: str, why: str, span: tuple[int, int] | None) -> TruncatedRead:
    offset, length = span or (0, 0)
    return TruncatedRead(
        f"{url}: received fewer bytes than requested, [{offset}, {offset + length}) ({why})",
        shard=url,
        offset=offset,
        expected=length,
    )


def _not_connected(url: str, base: str, text: str) -> StoreError:
    match = _ENDPOINT.search(text)
    endpoint = match[1] if match else base
    if "kind: Redirect" in text:
        return StoreError(f"{url}: {endpoint} redirects too often, or in a circle", shard=url)
    if "kind: Builder" in text:
        return StoreError(f"{url}: {endpoint} redirects to what is not an http url", shard=url)
    reason = " ".join(_first(_NOT_TRUSTED, text).split())
    return unreachable(url, endpoint, why_of_text(text), reason)


def _not_listed(url: str, key: str) -> StoreError:
    return StoreError(
        f"{url}: cannot be listed, since the object with the key {key!r} is in the way: keys with "
        f"{ODD}, cannot be listed. Move that object out of this folder, or name each shard by its "
        "url: these, and braces such as {000..127}, need no list",
        shard=url,
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""
