"""The behaviour of every store, tested with each of them: disk, memory, S3 in two ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsspec
import pytest
from servers import S3Server, only

from dataplane.arena.memfd import Arena
from dataplane.model.errors import (
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
    StoreError,
    TruncatedRead,
)
from dataplane.store.base import Store
from dataplane.store.connect import open_store
from dataplane.store.fsspec_store import FsspecStore
from dataplane.store.reads import PIECE_BYTES, Race, fill, raced
from dataplane.store.retry import Retrying
from dataplane.store.url_policy import UrlPolicy
from dataplane.store.urls import base_of

ODD_NAMES = (
    "with space.bin",
    "plus+and&.bin",
    "percent%20.bin",
    "hash#tag.bin",
    "question?.bin",
    "star*[x].bin",
    "brace{0}.bin",
    "eq=a,b;c.bin",
    "ünïcode-日本.bin",
    "quote'\".bin",
)
THREADS = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A store under test, an empty folder in it, and the way to put objects there."""

    store: Store
    folder: str
    put: Callable[[Mapping[str, bytes]], None]
    missing_bucket: str | None

    def url(self, name: str) -> str:
        return f"{self.folder}{name}"


@pytest.fixture(params=["local", "policed", "memory", "s3", "s3fs", "retrying"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    kind: str = request.param
    if kind in ("local", "policed", "retrying"):
        yield _on_disk(request.getfixturevalue("tmp_path"), kind)
    elif kind == "memory":
        files = fsspec.filesystem("memory")
        yield _in_memory()
        files.rm("/place", recursive=True) if files.exists("/place") else None
    else:
        server = request.getfixturevalue("s3_server")
        only(monkeypatch, server.environment())
        yield _on_s3(server, through_fsspec=kind == "s3fs")


def _on_disk(root: Path, kind: str) -> Place:
    def put(objects: Mapping[str, bytes]) -> None:
        for name, body in objects.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.stat().st_mtime_ns if path.exists() else 0
            path.write_bytes(body)
            # The file system's clock ticks every 4 ms; a test overwrites sooner.
            os.utime(path, ns=(before + 10_000_000, max(path.stat().st_mtime_ns, before + 1)))

    policy = UrlPolicy((f"file://{root}",)) if kind == "policed" else None
    store = open_store("file://", policy=policy)
    return Place(Retrying(store) if kind == "retrying" else store, f"file://{root}/", put, None)


def _in_memory() -> Place:
    def put(objects: Mapping[str, bytes]) -> None:
        for name, body in objects.items():
            fsspec.filesystem("memory").pipe_file(f"/place/{name}", body)

    return Place(open_store("memory://"), "memory://place/", put, None)


def _on_s3(server: S3Server, *, through_fsspec: bool) -> Place:
    bucket = server.bucket()

    def put(objects: Mapping[str, bytes]) -> None:
        server.put(bucket, {f"place/{name}": body for name, body in objects.items()})

    base = f"s3://{bucket}"
    store = FsspecStore(base) if through_fsspec else open_store(base)
    return Place(store, f"{base}/place/", put, "s3://no-such-bucket-here")


def test_list_is_in_url_order_and_leaves_folders_out(place: Place) -> None:
    names = ["b", "a/z", "a/b/c", "a-b", "a0", "empty", "a/b-c"]
    place.put({name: b"" if name == "empty" else name.encode() for name in names})

    infos = list(place.store.list(place.folder))

    assert [info.url for info in infos] == sorted(place.url(name) for name in names)
    sizes = {info.url: info.size_bytes for info in infos}
    assert sizes[place.url("empty")] == 0
    assert sizes[place.url("a/b/c")] == len("a/b/c")


def test_list_takes_any_start_of_a_url_as_prefix(place: Place) -> None:
    place.put(dict.fromkeys(("train-0", "train-1", "train/2", "tram", "valid-0"), b"x"))

    def listed(prefix: str) -> list[str]:
        infos = place.store.list(place.url(prefix))
        return [info.url.removeprefix(place.folder) for info in infos]

    assert listed("train-") == ["train-0", "train-1"]
    assert listed("train") == ["train-0", "train-1", "train/2"]
    assert listed("train/") == ["train/2"]
    assert listed("tra") == ["train-0", "train-1", "train/2", "tram"]
    assert listed("train-1") == ["train-1"]
    assert listed("nothing") == []
    assert listed("no/such/folder/") == []


def test_list_and_head_agree(place: Place) -> None:
    place.put({"one": b"1" * 1000, "two": b"", "deep/er/three": b"3"})

    for info in place.store.list(place.folder):
        assert place.store.head(info.url) == info
        assert info.etag


def test_what_is_no_object_is_not_found(place: Place) -> None:
    place.put({"one": b"1", "folder/two": b"2"})
    for name in ("nothing", "folder", "one/below", "no/folder/either"):
        url = place.url(name)
        with pytest.raises(ShardNotFound) as head:
            place.store.head(url)
        with pytest.raises(ShardNotFound):
            place.store.read(url, 0, 1, '"etag"')
        with pytest.raises(ShardNotFound):
            list(place.store.stream(url, '"etag"'))
        assert url in str(head.value)
        assert head.value.shard == url


def test_a_missing_bucket_is_not_found(place: Place) -> None:
    if place.missing_bucket is None:
        assert list(place.store.list(place.url("missing/"))) == []
        return
    base = place.missing_bucket
    store = FsspecStore(base) if isinstance(place.store, FsspecStore) else open_store(base)
    for ask in (store.list, store.head):
        with pytest.raises(ShardNotFound, match="no-such-bucket-here"):
            ask(f"{base}/key")


def test_a_read_gives_exactly_its_range(place: Place) -> None:
    body = bytes(i % 251 for i in range(1000))
    place.put({"one": body})
    info = place.store.head(place.url("one"))

    for offset, length in ((0, 1), (0, 1000), (999, 1), (1, 998), (500, 0), (1000, 0), (0, 0)):
        got = place.store.read(info.url, offset, length, info.etag)
        assert bytes(got) == body[offset : offset + length]
        assert memoryview(got).nbytes == length


def test_a_read_into_memory_fills_exactly_that_memory(place: Place) -> None:
    body = os.urandom(700_000)
    place.put({"object": body})
    etag = place.store.head(place.url("object")).etag
    for offset, length in ((0, len(body)), (0, 1), (3, 300_000), (500_001, 199_999), (9, 70_000)):
        memory = bytearray(b"x" * (length + 2))
        fill(place.store, place.url("object"), offset, etag, memoryview(memory)[1:-1])
        assert memory == b"x" + body[offset : offset + length] + b"x"

    parts = [memoryview(bytearray(length)) for length in (300_000, 0, 1, 99_999)]
    fill(place.store, place.url("object"), 3, etag, *parts)
    assert b"".join(parts) == body[3:400_003]

    place.put({"object": body[::-1]})
    with pytest.raises(DatasetChangedError):
        fill(place.store, place.url("object"), 0, etag, memoryview(bytearray(300_000)))
    new = place.store.head(place.url("object")).etag
    with pytest.raises(TruncatedRead):
        fill(place.store, place.url("object"), 500_000, new, memoryview(bytearray(200_001)))
    with pytest.raises(ShardNotFound):
        fill(place.store, place.url("nothing"), 0, new, memoryview(bytearray(200_000)))


def test_memory_is_made_ready_once_before_anything_is_written_into_it(place: Place) -> None:
    body = os.urandom(700_000)
    place.put({"object": body})
    etag = place.store.head(place.url("object")).etag
    for length in (1, 300_000, len(body)):
        memory, ready = bytearray(length), list[int]()

        def make_ready(memory: bytearray = memory, ready: list[int] = ready) -> None:
            ready.append(1)
            memory[:] = bytes(len(memory))  # what was written before is lost

        with raced(Race(make_ready)):
            fill(place.store, place.url("object"), 0, etag, memoryview(memory))
        assert (ready, memory) == ([1], body[:length])


def test_new_memory_of_an_arena_is_filled_like_any_other(place: Place) -> None:
    body = os.urandom(700_000)
    place.put({"object": body})
    etag = place.store.head(place.url("object")).etag
    arena = Arena.create("test", 1 << 20)
    make_ready = partial(arena.prepare, 0, arena.size_bytes)
    for parts in ((70_000,), (500_000,), (300_000, 1, 100_000, 299_999)):
        views, at = [], 4096
        for length in parts:
            views.append(arena.view(at, length))
            at += length + 4096
        with raced(Race(make_ready, arena.new_memory)):
            fill(place.store, place.url("object"), 0, etag, *views)
        assert b"".join(views) == body[: sum(parts)]
        for view in views:
            view.release()
    arena.close()


def test_a_read_past_the_end_is_truncated(place: Place) -> None:
    store = place.store._inner if isinstance(place.store, Retrying) else place.store
    place.put({"one": b"0123456789"})
    info = store.head(place.url("one"))

    for offset, length in ((0, 11), (10, 1), (9, 2), (1 << 40, 5)):
        with pytest.raises(TruncatedRead) as refusal:
            store.read(info.url, offset, length, info.etag)
        assert refusal.value.shard == info.url
        assert refusal.value.offset == offset
        assert refusal.value.expected == length


def test_an_overwritten_object_is_refused(place: Place) -> None:
    place.put({"one": b"0123456789"})
    old = place.store.head(place.url("one"))
    for body in (b"9876543210", b"longer than before", b"short", b""):
        place.put({"one": body})
        new = place.store.head(place.url("one"))
        for offset, length in ((0, 5), (5, 5), (0, 0)):
            with pytest.raises(DatasetChangedError) as refusal:
                place.store.read(old.url, offset, length, old.etag)
            assert (refusal.value.expected, refusal.value.found) == (old.etag, new.etag)
            assert old.url in str(refusal.value)
        with pytest.raises(DatasetChangedError):
            list(place.store.stream(old.url, old.etag))
        assert bytes(place.store.read(new.url, 0, len(body), new.etag)) == body


def test_a_stream_is_the_whole_object(place: Place) -> None:
    for size in (0, 1, PIECE_BYTES, PIECE_BYTES + 1):
        body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
        place.put({"one": body})
        info = place.store.head(place.url("one"))
        pieces = [bytes(piece) for piece in place.store.stream(info.url, info.etag)]
        assert b"".join(pieces) == body
        assert all(pieces)


def test_odd_names_round_trip(place: Place) -> None:
    place.put({name: name.encode() for name in ODD_NAMES})

    infos = list(place.store.list(place.folder))

    assert [info.url for info in infos] == sorted(place.url(name) for name in ODD_NAMES)
    for info in infos:
        body = place.store.read(info.url, 0, info.size_bytes, info.etag)
        assert bytes(body).decode() == info.url.removeprefix(place.folder)
        assert place.store.head(info.url) == info
        assert [listed.url for listed in place.store.list(info.url)] == [info.url]


def test_threads_read_side_by_side(place: Place) -> None:
    bodies = {f"shard-{i}": bytes([i]) * 70_000 for i in range(4)}
    place.put(bodies)
    infos = list(place.store.list(place.folder))

    def read(index: int) -> bool:
        info = infos[index % len(infos)]
        offset = (index * 997) % 60_000
        return (
            bytes(place.store.read(info.url, offset, 9000, info.etag))
            == (bodies[info.url.removeprefix(place.folder)][offset : offset + 9000])
        )

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(read, range(THREADS * 8)))


@pytest.mark.parametrize("through_fsspec", [False, True])
def test_wrong_credentials_are_denied(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, through_fsspec: bool
) -> None:
    bucket = s3_server.bucket()
    s3_server.put(bucket, {"one": b"1"})
    only(monkeypatch, s3_server.environment() | {"AWS_SECRET_ACCESS_KEY": "guessed"})
    base = f"s3://{bucket}"
    store = FsspecStore(base) if through_fsspec else open_store(base)

    for ask in (
        lambda: list(store.list(base_of(base))),
        lambda: store.head(f"{base}/one"),
        lambda: store.read(f"{base}/one", 0, 1, '"etag"'),
    ):
        with pytest.raises(StoreDenied) as refusal:
            ask()
        assert isinstance(refusal.value, StoreError)
        assert bucket in str(refusal.value)
