"""Remove secrets from urls in texts, and name objects independently of how their url was signed.

A url may contain a password (`https://user:password@host`) or a signature (`?X-Amz-Signature=…`,
`?sig=…`, `?token=…`). Any reader of a log could use such a url, so errors, log lines, statuses and
databases never contain one. Every error passes `redacted` when it is made, every log line when it
is written.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# Parameters of signed urls: AWS, Google, CloudFront, Azure SAS. All of them change when a url is
# signed again, so none of them identifies the object.
_SIGNING = frozenset(
    {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"}
    | {"sv", "ss", "srt", "sp", "se", "st", "spr", "sig", "sr", "sip", "sdd", "ses"}
    | {"skoid", "sktid", "skt", "ske", "sks", "skv", "saoid", "suoid", "scid"}
    | {"token", "access_token", "accesstoken", "auth", "apikey", "api_key", "key", "password"}
)
_SIGNING_PREFIXES = ("x-amz-", "x-goog-")

_HUB = re.compile(
    r"(hf://(?:(?:datasets|spaces|models|kernels)/)?[^/@]+/[^/@]+)"
    r"(?:@(refs/convert/\w+|refs/pr/\d+|[^/]*))?(/.*)?",
    re.DOTALL,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# In these schemes, the part before @ is a container, not a user.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs", "adl")
_USER = re.compile(r"\b([A-Za-z][A-Za-z0-9+.\-]*)://([^\s/@?#'\"<>]*)@")
# In these schemes, a user name without a password may be a token. In others it is not a secret:
# sftp://me@host.
_TOKEN_AS_USER = ("http", "https")

_TELLING_NAME = r"sig|token|key|secret|passw|pwd|auth|cred|polic|session|jwt|hmac|md5|code|cookie"
_PARAMETER = re.compile(
    rf"([?&;#])([\w.\-%]*(?:{_TELLING_NAME})[\w.\-%]*|[\w.\-%]+)=([^\s&;#'\"<>]+)", re.IGNORECASE
)
_IS_SECRET_NAME = re.compile(_TELLING_NAME, re.IGNORECASE)
_LONG = 20
"""A value with this many characters is treated as a secret, whatever its name."""
_CLOSING = ".,:)]}"


def redacted(text: str) -> str:
    """Return the text with the passwords and signatures of its urls replaced by `***`."""
    if "://" not in text and "=" not in text:
        return text
    return _PARAMETER.sub(_hidden_parameter, _USER.sub(_hidden_user, text))


def unsigned(url: str) -> str:
    """Return the url without credentials and signatures, so that all signed urls of an object give
    the same text.

    A url without such parts is returned unchanged.
    """
    if "@" not in url and "?" not in url:
        return url
    scheme = url.partition("://")[0].lower()
    if scheme not in _CONTAINERS:
        url = _USER.sub(lambda found: f"{found[1]}://", url, count=1)
    if scheme not in ("http", "https"):
        return url
    path, mark, query = url.partition("?")
    if not mark:
        return url
    kept = [one for one in query.split("&") if not _is_signing(one.partition("=")[0].lower())]
    return f"{path}?{'&'.join(kept)}" if kept else path


def hub_parts(url: str) -> tuple[str, str, str] | None:
    """Return repository ("hf://datasets/owner/name"), revision, and the rest of a Hub's url; a
    revision of "" is the default branch. Return None for all other urls, and for buckets, which
    have no revisions.
    """
    found = _HUB.fullmatch(url)
    if found is None or found[1].startswith("hf://buckets/"):
        return None
    return found[1], found[2] or "", found[3] or ""


def is_commit(revision: str) -> bool:
    """Return whether a revision is the full hash of a commit, which no push changes."""
    return _COMMIT.fullmatch(revision) is not None


def unpinned(url: str) -> str:
    """Return the url without the revision of a repository; all other urls are unchanged."""
    hub = hub_parts(url)
    return url if hub is None else f"{hub[0]}{hub[2]}"


def _is_signing(name: str) -> bool:
    return name in _SIGNING or name.startswith(_SIGNING_PREFIXES)


def _hidden_user(found: re.Match[str]) -> str:
    scheme, user = found[1].lower(), found[2]
    is_secret = scheme not in _CONTAINERS and (":" in user or scheme in _TOKEN_AS_USER)
    return f"{found[1]}://{HIDDEN}@" if user and is_secret else found[0]


def _hidden_parameter(found: re.Match[str]) -> str:
    name, value = found[2], found[3]
    closing = value[len(value.rstrip(_CLOSING)) :]
    if not _IS_SECRET_NAME.search(name) and len(value) - len(closing) < _LONG:
        return found[0]
    return f"{found[1]}{name}={HIDDEN}{closing}"
