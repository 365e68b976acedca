"""S3, Google Cloud Storage, Azure and plain http, through obstore (Rust, one connection pool).

A url with a query (a presigned url) gets a client of its own, since obstore can send a query only
as part of a client's base url. Such a url is never requested with HEAD, since it is signed for GET.

obstore's own retries are disabled in favour of our retry table. Its clients use a runtime of
threads that a fork does not copy, so in a forked child they raise an error instead of hanging.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import obstore.exceptions
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store
from typing_extensions import Buffer

from dataplane.model.errors import ConfigError, DatasetChangedError, StoreError
from dataplane.model.records import ObjectInfo
from dataplane.store.base import LAST, NotInOrderError, Page
from dataplane.store.faults import CONNECT_TIMEOUT_S, Refused, shortened
from dataplane.store.obstore_faults import ODD, has_answer, has_no_range, is_mute, mapped
from dataplane.store.reads import (
    NO_ETAG,
    check_etag,
    copy_into,
    in_pieces,
    is_strong,
    no_version,
    short_read,
    unmet,
)
from dataplane.store.urls import folder_of, key_of, scheme_of

# Clients of obstore, made from the environment.
#
# obstore itself reads AWS_*, GOOGLE_* and AZURE_*. The functions below add the profiles of ~/.aws
# (SSO included), and permission to use an http endpoint without TLS.

if TYPE_CHECKING:
    # These exist for type checkers only: obstore's module does not have them at run time.
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

    from dataplane.store import connections

Client = S3Store | GCSStore | AzureStore | HTTPStore

CREDENTIAL_LIFE = dt.timedelta(minutes=5)
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_HOST = re.compile(r"[\w.\-]+|[0-9a-f:.]*:[0-9a-f:.]*", re.IGNORECASE)
# Refuse other characters in a bucket's name. In requests whose host name contains the bucket's
# name, they might end the host name early, and send the credentials to another host.
_BUCKET = re.compile(r"[\w.\-]+(@[\w.\-]+)?", re.ASCII)
_NO_RETRIES: RetryConfig = {"max_retries": 0}


def client(base: str, environment: Mapping[str, str], request_timeout_s: float) -> Client:
    """Make a client of one bucket, container or http server.

    Raises:  ConfigError: no bucket can have this name, the profile does not exist, or the endpoint
    is not a url.  ValueError and obstore's own errors, for other mistakes.
    """
    scheme, _, authority = base.partition("://")
    if scheme not in ("http", "https") and not _BUCKET.fullmatch(authority):
        raise ConfigError(
            f"{base}: {authority!r} cannot be the name of a bucket or container, which has letters,"
            " digits, dots, hyphens and underscores",
            found=authority,
        )
    options: ClientConfig = {
        "connect_timeout": dt.timedelta(seconds=min(CONNECT_TIMEOUT_S, request_timeout_s)),
        "timeout": dt.timedelta(seconds=request_timeout_s),
    }
    if scheme == "s3":
        return _s3(authority, environment, options)
    if scheme == "gs":
        return GCSStore(authority, client_options=options, retry_config=_NO_RETRIES)
    if scheme in ("http", "https"):
        options["allow_http"] = scheme == "http"
        _check_endpoint(base, "the url")
        return HTTPStore(base, client_options=options, retry_config=_NO_RETRIES)
    return AzureStore.from_url(base, client_options=options, retry_config=_NO_RETRIES)


def may_renew(base: str, environment: Mapping[str, str]) -> bool:
    """Return whether a new client may get other credentials. Credentials in the environment of a
    process never change.
    """
    is_fixed = environment.get("AWS_ACCESS_KEY_ID") and not _needs_profile(environment)
    return not (base.startswith("s3://") and is_fixed)


def _s3(bucket: str, environment: Mapping[str, str], options: ClientConfig) -> S3Store:
    config: S3Config = {}
    endpoint = next((environment[name] for name in _S3_ENDPOINTS if environment.get(name)), "")
    provider = None
    if _needs_profile(environment):
        session = _profile(environment)
        endpoint = endpoint or session.get_scoped_config().get("endpoint_url", "")
        region = session.get_config_variable("region")
        if region:
            config["region"] = region
        credentials = session.get_credentials()
        provider = _provider(credentials) if credentials is not None else None
    if endpoint:
        _check_endpoint(endpoint, "AWS_ENDPOINT_URL")
        config["endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = True
    return S3Store(
        bucket,
        config=config,
        client_options=options,
        retry_config=_NO_RETRIES,
        credential_provider=provider,
    )


def _check_endpoint(endpoint: str, origin: str) -> None:
    """Refuse an endpoint that is not a url, since obstore panics at the first request to it."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        port = parts.port
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or port == 0:
        raise ConfigError(
            f"{origin} is {endpoint!r}, which is not an endpoint: write http://host:port or "
            "https://host"
        )


def _needs_profile(environment: Mapping[str, str]) -> bool:
    """Return whether credentials come from ~/.aws: a profile is named, or a file of profiles exists
    and no other credentials are set.
    """
    if environment.get("AWS_PROFILE"):
        return True
    given = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(environment.get(name) for name in given):
        return False
    home = Path(environment.get("HOME", "/")) / ".aws"
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials",
        environment.get("AWS_CONFIG_FILE") or home / "config",
    )
    return any(Path(file).is_file() for file in files)


def _profile(environment: Mapping[str, str]) -> Any:
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session(profile=environment.get("AWS_PROFILE"))
    try:
        session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as cause:
        raise ConfigError(f"AWS_PROFILE or ~/.aws cannot be used: {cause}") from cause
    return session


def _provider(credentials: Any) -> Callable[[], S3Credential]:
    """Return a function that gets botocore's credentials, which stay valid for CREDENTIAL_LIFE."""

    def provide() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + CREDENTIAL_LIFE,
        }

    return provide


T = TypeVar("T")
LIST_PAGE = 1000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SIGNED_FOR = dt.timedelta(minutes=15)
# Smaller reads go through obstore: copying their bytes costs less than a direct request.
_DIRECT_BYTES_MIN = 128 << 10
# Keep this many clients of urls with a query. A client takes 0.1 MB, and 5 to 15 ms of CPU time to
# make. Direct requests need no client.
_QUERY_CLIENTS_MAX = 256


class ObstoreStore:
    """One bucket or container, or one http server. `base` is its url: "s3://bucket"."""

    def __init__(self, base: str, request_timeout_s: float = 30.0) -> None:
        self._base = base
        self._pid = os.getpid()
        self._is_http = scheme_of(base) in ("http", "https")
        self._request_timeout_s = request_timeout_s
        self._was_served = False
        self._making = threading.Lock()
        self._direct: connections.DirectReads | None = None
        self._is_direct_made = False
        self.reconnect()

    def reconnect(self) -> None:
        """Implement `base.Reconnecting.reconnect`: make a new client, since each client of obstore
        has its own pool of connections.
        """
        try:
            made = client(self._base, os.environ, self._request_timeout_s)
        except (ValueError, obstore.exceptions.BaseError) as cause:
            raise ConfigError(
                f"the environment does not configure access to {self._base}: "
                f"{shortened(str(cause))}"
            ) from cause
        with self._making:
            before, self._client, self._direct = self._direct, made, None
            self._is_direct_made = False
        if before is not None:
            before.close()
        # Use functions, not bound methods: an object that holds connections must not be part of a
        # reference cycle.
        make = functools.partial(_client_of_query, self._request_timeout_s)
        self._client_of_query = functools.lru_cache(_QUERY_CLIENTS_MAX)(make)

    def _direct_reads(self) -> connections.DirectReads | None:
        """Return what reads large ranges; None if obstore must. It is made when it is first needed:
        a node that lists and indexes before its first batch does not import http.client.
        """
        with self._making:
            if not self._is_direct_made:
                from dataplane.store import connections

                if not connections.is_possible(os.environ):
                    pass
                elif isinstance(self._client, S3Store):
                    sign = functools.partial(_signed, self._client)
                    self._direct = connections.DirectReads(sign, self._request_timeout_s)
                elif self._is_http and "@" not in self._base:
                    self._direct = connections.DirectReads(str, self._request_timeout_s)
                self._is_direct_made = True
            return self._direct

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        # obstore lists whole folders: names that do not match the prefix are dropped here.
        folder = folder_of(prefix)[len(self._base) + 1 :].rstrip("/")
        listed = self._call(prefix, lambda: self._listed(folder or None))
        metas = {f"{self._base}/{path}": meta for path, meta in listed.items()}
        infos = [self._info(url, meta) for url, meta in metas.items() if url.startswith(prefix)]
        return iter(sorted(infos, key=lambda info: info.url))

    def has_pages(self) -> bool:
        """Implement `base.Paged.has_pages`. obstore requests the whole list from Azure, whatever
        the offset, and S3's directory buckets support no offset.
        """
        is_able = isinstance(self._client, S3Store | GCSStore)
        return is_able and not self._base.endswith("--x-s3")

    def page(self, prefix: str, after: str | None) -> Page:
        """Implement `base.Paged.page`."""
        folder = folder_of(prefix)[len(self._base) + 1 :].rstrip("/") or None
        start = self._before(prefix) if after is None else after[len(self._base) + 1 :]
        while True:
            listed = self._call(prefix, lambda: self._next(folder, start))  # noqa: B023 - called now
            infos = [self._info(f"{self._base}/{meta['path']}", meta) for meta in listed]
            urls = [f"{self._base}/{start or ''}", *(info.url for info in infos if info.size_bytes)]
            if not all(map(lt, urls, urls[1:])):
                raise NotInOrderError(f"{urls[0]}: what follows is not in url order")
            shown = [info for info in infos if info.url.startswith(prefix)]
            end = max((info.url for info in infos), default="")
            is_last = len(listed) < LIST_PAGE or end > f"{prefix}{LAST}"
            if shown or is_last:
                objects = [info for info in shown if info.size_bytes]
                return Page(objects, is_last, [info for info in shown if not info.size_bytes])
            if end <= urls[0]:
                raise NotInOrderError(f"{urls[0]}: what follows ends before it")
            start = end[len(self._base) + 1 :]

    def head(self, url: str) -> ObjectInfo:
        if self._has_query(url):
            return self._info(url, self._call(url, lambda: _by_get(self._client_of_query(url), "")))
        key = self._key(url)
        return self._info(url, self._call(url, lambda: _by_head(self._client, key)))

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        if length == 0:
            check_etag(self.head(url), etag)
            return b""
        options: dict[str, Any] = {"range": (offset, offset + length)}
        if is_strong(etag):
            options["if_match"] = etag
        result, body = self._call(url, lambda: self._get(url, options), etag, (offset, length))
        # A server that ignores If-Match still reports the ETag of the bytes that it sent.
        check_etag(self._info(url, result.meta), etag)
        if len(body) != length:
            raise short_read(url, offset, length, len(body))
        return body

    def read_into(self, url: str, offset: int, etag: str, *into: memoryview) -> None:
        """Implement `base.Filling.read_into`."""
        has_query, length = self._has_query(url), sum(map(len, into))
        is_worth_it = has_query if self._is_http else length >= _DIRECT_BYTES_MIN
        is_worth_it = is_worth_it and length > 0 and not etag.startswith(NO_ETAG)
        ways = self._direct_reads() if is_worth_it else None
        if ways is not None and ways.is_of_use:
            key = url if has_query else self._key(url)
            try:
                self._call(url, lambda: ways.read_into(url, key, offset, etag, *into))
            except Refused:
                pass  # obstore repeats the request below
            else:
                return
        copy_into(self.read(url, offset, length, etag), *into)

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)

    def put(self, url: str, content: Buffer) -> None:
        """Implement `base.Writable.put`; large objects are sent in parts."""
        self._call(url, lambda: obstore.put(self._client, self._key(url), bytes(content)))

    def _listed(self, folder: str | None) -> dict[str, obstore.ObjectMeta]:
        """List the objects below a folder, by path.

        obstore takes a page without a continuation token for the last page, even if the page says
        that more follows. Any full page may be such a page, so the keys after its last key are
        requested as well.
        """
        metas: dict[str, obstore.ObjectMeta] = {}
        while True:
            before, last = len(metas), max(metas, default=None)
            for page in obstore.list(self._client, folder, offset=last, chunk_size=LIST_PAGE):
                count = len(metas)
                for meta in page:
                    known = metas.get(meta["path"])
                    # An empty "folder/" does not replace the object with the same path.
                    if known is None or not known["size"]:
                        metas[meta["path"]] = meta
                if len(metas) == count and len(page) == LIST_PAGE:
                    raise StoreError(
                        f"{self._base}: the store lists {page[0]['path']} and what follows it "
                        "again and again, so that its lists never end: this server cannot be "
                        "asked for more than one page. Name each file instead; braces such as "
                        "{000..127} need no list",
                    )
            if len(metas) == before or len(metas) % LIST_PAGE:
                return metas

    def _next(self, folder: str | None, start: str | None) -> Sequence[obstore.ObjectMeta]:
        pages = obstore.list(self._client, folder, offset=start, chunk_size=LIST_PAGE)
        return next(iter(pages), ())

    def _before(self, prefix: str) -> str | None:
        """Return a key that sorts shortly before all keys with this prefix; None if the prefix is a
        whole folder, or if no such key can be made.
        """
        key = prefix[len(self._base) + 1 :]
        is_plain = key.isascii() and key.isprintable() and not key.endswith(" ")
        if not is_plain or _is_odd(key):
            return None
        before = "." if key[-1] == "0" else chr(ord(key[-1]) - 1)  # skip "/"
        return f"{key[:-1]}{before}~"

    def _get(self, url: str, options: Any) -> tuple[obstore.GetResult, obstore.Bytes]:
        if self._has_query(url):
            result = obstore.get(self._client_of_query(url), "", options=options)
        else:
            result = obstore.get(self._client, self._key(url), options=options)
        return result, result.bytes()

    def _call(
        self,
        url: str,
        request: Callable[[], T],
        etag: str = "",
        span: tuple[int, int] | None = None,
    ) -> T:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{url}: this process was forked from one that reads object stores, and their "
                "connections do not survive a fork. Start it with spawn or exec",
                shard=url,
            )
        try:
            answer = request()
        except (obstore.exceptions.BaseError, OSError, ValueError) as cause:
            renews = self._was_served and may_renew(self._base, os.environ)
            fault = mapped(cause, url, self._base, span, may_renew=renews)
            if isinstance(fault, DatasetChangedError):
                fault = unmet(self, url, etag)
            # Drop the cause if obstore's message contains the url's query or the server's whole
            # answer, since a traceback would show the message.
            raise fault from None if self._has_query(url) or has_answer(cause) else cause
        except BaseException as cause:
            # Convert panics of Rust: they are not Exceptions, and would bypass every handler of a
            # node.
            if type(cause).__module__ != "pyo3_runtime":
                raise
            raise StoreError(f"{url}: the client failed internally: {cause}", shard=url) from cause
        self._was_served = True
        return answer

    def _has_query(self, url: str) -> bool:
        return self._is_http and "?" in url

    def _key(self, url: str) -> str:
        key = key_of(url)
        if self._is_http:
            return urllib.parse.unquote(key)
        if _is_odd(key):
            raise StoreError(
                f"{url!r}: a key with {ODD}, cannot be read; copy the object to another name",
                shard=url,
            )
        return key

    def _info(self, url: str, meta: obstore.ObjectMeta) -> ObjectInfo:
        etag, modified = meta["e_tag"], meta["last_modified"].timestamp()
        if not etag and not modified:
            raise no_version(url)
        # Lists have times in milliseconds, answers about one object in seconds: use seconds.
        return ObjectInfo(url, meta["size"], etag or f"{NO_ETAG}{int(modified)}-{meta['size']}")


def _is_odd(key: str) -> bool:
    has_odd_part = any(part in ("", ".", "..") for part in key.split("/"))
    return has_odd_part or _CONTROL.search(key) is not None


def _client_of_query(request_timeout_s: float, url: str) -> Client:
    return client(url, os.environ, request_timeout_s)


def _by_head(client: Client, key: str) -> obstore.ObjectMeta:
    try:
        return obstore.head(client, key)
    except (obstore.exceptions.BaseError, OSError) as cause:
        if not is_mute(cause):
            raise
    return _by_get(client, key)  # some servers lack HEAD; others explain refusals only after a GET


def _by_get(client: Client, key: str) -> obstore.ObjectMeta:
    """Derive the result of a HEAD request from a GET of the first byte."""
    try:
        result = obstore.get(client, key, options={"range": (0, 1)})
        result.bytes()  # read it, so that the connection can be reused
    except obstore.exceptions.BaseError as cause:
        # An empty object has no first byte.
        if has_no_range(cause) and (whole := obstore.get(client, key).meta)["size"] == 0:
            return whole
        raise
    return result.meta


def _signed(client: S3Store, key: str) -> str:
    """Sign a request, and return its url.

    Raises:  Refused: obstore cannot sign it, for example without credentials.
    """
    try:
        return obstore.sign(client, "GET", key, SIGNED_FOR)
    except obstore.exceptions.BaseError as cause:
        raise Refused from cause
