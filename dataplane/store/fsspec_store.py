"""A store for every other url that fsspec supports, and memory:// for tests and demonstrations.

fsspec has no conditional read, so a read is checked afterwards by requesting the object's info
again. That costs one more request per read, which is why S3, Google and Azure have another store.
If a file system caches pieces of an older object, this is not detected. Repositories of the Hub
are read at a commit (see `pinned`), which never changes.

File systems written with asyncio (s3fs, gcsfs, adlfs, http) get the deadline of a request; others
(sftp, hdfs, smb) have only their own timeouts.
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
from typing_extensions import Buffer

from dataplane.model.errors import (
    ConfigError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    TruncatedRead,
)
from dataplane.model.records import ObjectInfo
from dataplane.model.redact import hub_parts, is_commit
from dataplane.store.faults import is_throttle, kind_of, passes, shortened
from dataplane.store.reads import check_etag, etag_of_size, in_pieces, short_read
from dataplane.store.urls import SCHEMES, base_of, folder_of, scheme_of

T = TypeVar("T")

# Refuse file systems on top of another file system, or of this machine's files: their options name
# the underlying file, so a url could read files that no setting allows.
_INDIRECT = frozenset(
    {
        *("async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "dask", "data"),
        *("dir", "dvc", "filecache", "generic", "git", "libarchive", "pyscript", "reference"),
        *("simplecache", "tar", "zip"),
    }
)
# Suggest a known scheme if its similarity is at least this: "s4" and "s3" have a similarity of 0.5.
_NEAR_MIN = 0.5

_ETAG_KEYS = (
    *("ETag", "etag", "md5", "md5Hash", "content_md5", "checksum", "uid", "version"),
    *("blob_id", "xet_hash", "lfs"),
)
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
# Keys that identify a version in file systems that have none of the keys above.
_OTHER_KEYS = (
    *("content_hash", "sha256", "sha1", "hash", "crc32c", "generation", "revision"),
    *("modificationTime", "modifiedTime", "modified_at", "time_modified", "uploaded_at"),
)


class FsspecStore:
    """One file system of fsspec. `base` is its url: "memory://", "hf://datasets"."""

    def __init__(self, base: str, request_timeout_s: float = 30.0) -> None:
        self._base = base
        self._request_timeout_s = request_timeout_s
        scheme = scheme_of(base)
        if scheme in _INDIRECT or "::" in base:
            why = '"::" chains urls' if "::" in base else f"{scheme}:// is no store of its own"
            raise ConfigError(
                f"{base}: {why}, and what stands on another file system cannot be read by range: "
                "pass the url of the store or the path of the file itself",
                found=scheme,
            )
        try:
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files, _ = fsspec.url_to_fs(f"{base}/", **options)
        except (ImportError, ValueError, OSError) as cause:
            rest = base.partition("://")[2]
            near = difflib.get_close_matches(scheme, SCHEMES, 1, _NEAR_MIN)
            meant = f"; did you mean {near[0]}://{rest}?" if near and scheme not in SCHEMES else ""
            why = str(cause).partition("\n")[0]
            raise ConfigError(
                f"{scheme}:// urls cannot be read here: {why}{meant}", found=scheme
            ) from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = folder_of(prefix)
        root = self._path(folder)

        def find() -> Mapping[str, Any]:
            if not _is_fixed(prefix):
                self._files.invalidate_cache()
            try:
                files: Mapping[str, Any] = self._files.find(root, detail=True)
            except FileNotFoundError:
                # A missing folder is an empty prefix; a missing bucket is an error.
                if not self._request("exists", self._path(f"{self._base}/")):
                    raise
                return {}
            return files

        infos = (
            _described(f"{folder}{name[len(root) :].lstrip('/')}", info)
            for name, info in self._call(prefix, find).items()
            if info.get("type", "file") == "file"
        )
        wanted = (info for info in infos if info.url.startswith(prefix))
        return iter(sorted(wanted, key=lambda info: info.url))

    def head(self, url: str) -> ObjectInfo:
        # Folders that change (buckets and branches) must be refreshed: the Hub's file system
        # caches them.
        fresh = {"refresh": True} if url.startswith("hf://") and not _is_fixed(url) else {}
        info = self._call(url, lambda: self._request("info", self._path(url), **fresh))
        if info.get("type", "file") != "file":
            raise ShardNotFound(f"{url} is a folder, not an object", shard=url)
        return _described(url, info)

    def pinned(self, url: str) -> str:
        """Implement `base.Pinning.pinned`: a repository of the Hub at the commit of its branch."""
        hub = hub_parts(url)
        if hub is None or is_commit(hub[1]):
            return url
        repository, revision, rest = hub

        def find_commit() -> str | None:
            from huggingface_hub import HfApi  # installed, since hf:// urls are read with it

            api = HfApi(endpoint=self._files.endpoint, token=self._files.token)
            *kind, owner, name = repository.removeprefix("hf://").split("/")
            commit: str | None = api.repo_info(
                f"{owner}/{name}",
                revision=urllib.parse.unquote(revision) or None,
                repo_type=kind[0].removesuffix("s") if kind else None,
                timeout=self._request_timeout_s,
            ).sha
            return commit

        commit = self._call(url, find_commit)
        if commit is None or not is_commit(commit):
            raise StoreError(f"{url}: the Hub names no commit of {repository}", shard=url)
        return f"{repository}@{commit}{rest}"

    def read(self, url: str, offset: int, length: int, etag: str) -> Buffer:
        path = self._path(url)
        body, fault = b"", None
        try:
            if length:
                body = self._call(
                    url,
                    lambda: self._request("cat_file", path, start=offset, end=offset + length),
                )
        except StoreError as cause:
            fault = cause
        now = self.head(url)
        check_etag(now, etag)
        if len(body) == length:
            return body
        if fault is not None and offset + length <= now.size_bytes:
            raise fault
        raise short_read(url, offset, length, len(body)) from fault

    def stream(self, url: str, etag: str) -> Iterator[Buffer]:
        return in_pieces(self, url, etag)

    def _path(self, url: str) -> str:
        path: str = self._files._strip_protocol(url)  # noqa: SLF001 - fsspec's own extension point
        return path

    def _request(self, name: str, path: str, **options: Any) -> Any:
        """Make one request, with a deadline if the file system supports one."""
        files = self._files
        if not files.async_impl:
            return getattr(files, name)(path, **options)
        method, limit_s = getattr(files, f"_{name}"), self._request_timeout_s
        return fsspec.asyn.sync(files.loop, method, path, timeout=limit_s, **options)

    def _call(self, url: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except FileNotFoundError as cause:
            where = base_of(url)
            raise ShardNotFound(f"there is no object {url}, or no {where}", shard=url) from cause
        except PermissionError as cause:
            raise StoreDenied(f"{url}: access refused: {cause}", shard=url) from cause
        except Exception as cause:
            # Each file system has its own exceptions; all of them are converted here.
            raise _mapped(url, cause) from cause


def _mapped(url: str, cause: Exception) -> StoreError:
    name, text = type(cause).__name__, f"{type(cause).__name__}: {shortened(str(cause))}"
    status = _http_status(cause)
    kind = kind_of(status) if status else None
    if kind is StoreDenied or "Credential" in name:
        of_hub = "; a private or gated repository needs a token, in HF_TOKEN"
        hint = of_hub if url.startswith("hf://") else ""
        return StoreDenied(f"{url}: access refused: {text}{hint}", shard=url)
    if kind is ShardNotFound:
        return ShardNotFound(f"there is no object {url}: {text}", shard=url)
    if kind is StoreThrottled or is_throttle(str(cause)):
        return StoreThrottled(f"{url}: the store asks to slow down: {text}", shard=url)
    if kind is StoreError:
        return StoreError(f"{url}: {text}", shard=url)
    if "Range" in str(cause) and not isinstance(cause, OSError):
        return TruncatedRead(f"{url}: {text}", shard=url)
    is_of_network = any(word in name for word in ("Connect", "Timeout", "Client", "HTTP"))
    if status or (passes(cause) if isinstance(cause, OSError) else is_of_network):
        return StoreUnavailable(f"{url} cannot be reached: {text}", shard=url)
    return StoreError(f"{url}: {text}", shard=url)


def _http_status(cause: Exception) -> int:
    """Return the HTTP status of an exception of aiohttp, requests, httpx, gcsfs and similar
    libraries; 0 if it has none.
    """
    for holder in (cause, getattr(cause, "response", None)):
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return 0


def _described(url: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = info.get("size")
    if size is None:
        raise StoreError(f"{url} has no known size, so it cannot be read by range", shard=url)
    return ObjectInfo(url, int(size), _etag(info, int(size)))


def _etag(info: Mapping[str, Any], size: int) -> str:
    """Return the store's own etag or checksum, otherwise one made from the first known time and the
    size, otherwise one made from the size.
    """
    for key in _ETAG_KEYS:
        if value := info.get(key):
            return str(value.get("sha256") or value) if isinstance(value, Mapping) else str(value)
    keys = (*_TIME_KEYS, *_OTHER_KEYS)
    when = next((info[key] for key in keys if info.get(key) is not None), None)
    if when is None:
        return etag_of_size(size)
    if isinstance(when, dt.datetime):
        when = when.timestamp()  # memory:// gives a number in lists, but a datetime for one object
    return f"{hashlib.blake2b(str(when).encode(), digest_size=8).hexdigest()}-{size:x}"


def _is_fixed(url: str) -> bool:
    """Return whether a url names a commit, in which nothing changes."""
    hub = hub_parts(url)
    return hub is not None and is_commit(hub[1])
