"""Many shards are indexed in batches, by fetchers and indexing processes, with the same result as one
by one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from away import Away, Proxy, proxy_before
from batched_index import indexing
from servers import S3Server
from shards import arrow_bytes, parquet_bytes

from dataplane.formats import registry
from dataplane.index import batches, processes
from dataplane.index.indexing import index_dataset
from dataplane.index.run import IndexProgress
from dataplane.model.errors import CorruptShard, DataplaneError, SchemaMismatch
from dataplane.model.records import Region
from dataplane.worker import forking

pytestmark = pytest.mark.usefixtures("odd")

COUNT = 23
TABLE = pa.table({"id": range(60), "text": ["x" * 20] * 60, "v": [[1, 2], None, []] * 20})
WIDE = pa.table({f"column {n:05}": [n] for n in range(1500)})
VERY_WIDE = pa.table({f"column {n:05}": [n] for n in range(15_000)})
LARGE = pa.table({"x": range(300_000)})


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BATCHED_MIN", 2)
    monkeypatch.setattr(batches, "_SHARDS_MAX", 4)


def alike(suffix: str, content: bytes, count: int = COUNT) -> dict[str, bytes]:
    return {f"{number:03}.{suffix}": content for number in range(count)}


SHARDS = {
    "parquet": alike("parquet", parquet_bytes(TABLE, row_group_size=20)),
    "a large footer": alike("parquet", parquet_bytes(WIDE, row_group_size=1)),
    "arrow": alike("arrow", arrow_bytes(TABLE, rows=20)),
    "arrow file": alike("arrow", arrow_bytes(TABLE, rows=20, file=True)),
    "arrow in large batches": alike("arrow", arrow_bytes(LARGE, rows=140_000, file=True), 5),
    "another order of columns": {
        "0.parquet": parquet_bytes(TABLE),
        **alike("parquet", parquet_bytes(TABLE.select(["v", "id", "text"]))),
    },
}


@pytest.mark.parametrize("kind", SHARDS)
def test_the_manifest_is_the_one_that_indexing_here_gives_and_preambles_are_handed_on(
    kind: str, put: Callable[[dict[str, bytes]], str]
) -> None:
    kept: dict[tuple[str, str], tuple[Region, bytes]] = {}

    def keep(url: str, etag: str, place: Region, content: bytes) -> None:
        kept[url, etag] = place, content

    url = put(SHARDS[kind])
    with indexing(keep=keep) as indexed:
        manifest = indexed.of(url)
    assert manifest.to_bytes() == index_dataset(url).to_bytes()
    assert indexed.together == sorted(SHARDS[kind])
    assert indexed.alone == set()
    expected = {}
    for shard in manifest.shards:
        place, content = shard.preamble, SHARDS[kind][shard.url.rpartition("/")[2]]
        expected[shard.url, shard.etag] = (place, content[place.offset :][: place.length])
    assert kept == expected


def test_what_needs_many_more_bytes_is_indexed_alone(
    put: Callable[[dict[str, bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = alike("parquet", parquet_bytes(VERY_WIDE), 4)
    shards |= alike("pqt", parquet_bytes(VERY_WIDE.slice(0, 0), store_schema=False), 3)
    url = put(shards)
    expected = index_dataset(url).to_bytes()
    with indexing() as found:
        assert found.of(url).to_bytes() == expected
    assert found.alone >= {f"{number:03}.parquet" for number in range(4)}
    monkeypatch.setattr(batches, "_USELESS_MAX", 3)
    with indexing() as found:
        assert found.of(url).to_bytes() == expected
    assert found.alone == set(shards), "the rest is not tried"


def test_a_damaged_shard_is_the_same_error_and_the_rest_is_kept(
    put: Callable[[dict[str, bytes]], str], tmp_path: Path
) -> None:
    shards = SHARDS["parquet"]
    url = put({**shards, "022.parquet": b"PAR1" + bytes(100)})
    with pytest.raises(CorruptShard) as here:
        index_dataset(url)
    with indexing() as found, pytest.raises(CorruptShard) as there:
        found.of(url, tmp_path / "cache")
    assert (str(there.value), there.value.nouns) == (str(here.value), here.value.nouns)
    with indexing() as again, pytest.raises(CorruptShard):
        again.of(url, tmp_path / "cache")
    assert set(again.together) < set(shards)


def test_a_shard_of_another_schema_is_named(put: Callable[[dict[str, bytes]], str]) -> None:
    other = parquet_bytes(pa.table({"id": ["1"]}))
    url = put({**SHARDS["parquet"], "017.parquet": other})
    with indexing() as found, pytest.raises(SchemaMismatch, match=r"017\.parquet"):
        found.of(url)


def test_an_interrupted_run_goes_on_where_it_was(
    put: Callable[[dict[str, bytes]], str], tmp_path: Path
) -> None:
    url = put(SHARDS["parquet"])

    def interrupt(progress: IndexProgress) -> None:
        if progress.shards_done == 9:
            raise KeyboardInterrupt

    with indexing() as found, pytest.raises(KeyboardInterrupt):
        found.of(url, tmp_path / "cache", progress=interrupt)
    with indexing() as again:
        assert again.of(url, tmp_path / "cache").to_bytes() == index_dataset(url).to_bytes()
    assert len(again.together) <= COUNT - 9


def named(name: str) -> list[psutil.Process]:
    """The processes of this name below this one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == name:
                found.append(child)
    return found


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    """A proxy before the store, through which readers reach it."""
    with proxy_before(s3_server.server.port) as found:
        yield found


def test_a_fetcher_that_is_killed_costs_time_and_nothing_else(
    put: Callable[[dict[str, bytes]], str],
    proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, environment = put(SHARDS["parquet"]), {"AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.be(Away.HANG, after_requests=6)
    with indexing(environment=environment) as found, ThreadPoolExecutor(1) as pool:
        run = pool.submit(found.of, url)
        proxy.wait_until(Away.HANG)
        deadline = time.monotonic() + 60
        while not wait([run], timeout=0.1).done and time.monotonic() < deadline:
            for process in named("dp-fetcher"):  # one that has just been started, too
                process.kill()
        assert run.result(0).to_bytes() == index_dataset(url).to_bytes()
    assert found.alone
    assert "a fetcher that reads for indexing ended" in caplog.text


@pytest.mark.parametrize("way", [Away.HANG, Away.REFUSED, Away.UNAVAILABLE, Away.RESET])
def test_what_readers_cannot_read_soon_is_read_by_the_node(
    way: Away, put: Callable[[dict[str, bytes]], str], proxy: Proxy
) -> None:
    url, environment = put(SHARDS["arrow"]), {"AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.be(way, after_requests=6)
    with indexing(environment=environment, budget_s=0.2, request_timeout_s=1.0) as found:
        assert found.of(url).to_bytes() == index_dataset(url).to_bytes()
    assert found.alone


def test_readers_try_again_what_fails_for_a_moment(
    put: Callable[[dict[str, bytes]], str], proxy: Proxy
) -> None:
    url, environment = put(SHARDS["parquet"]), {"AWS_ENDPOINT_URL": proxy.endpoint}
    proxy.be(Away.RESET, after_requests=6)
    with indexing(environment=environment) as found, ThreadPoolExecutor(1) as pool:
        run = pool.submit(found.of, url)
        proxy.wait_until(Away.RESET)
        proxy.be(Away.WELL)
        assert run.result(60).to_bytes() == index_dataset(url).to_bytes()
    assert found.alone == set()


def test_readers_open_what_the_node_may_open(put: Callable[[dict[str, bytes]], str]) -> None:
    url = put(SHARDS["parquet"])
    for allowed, alone in ((url, set()), ("s3://other/", set(SHARDS["parquet"]))):
        with indexing(is_policed=True, allowed_urls=(allowed,)) as found:
            assert found.of(url).to_bytes() == index_dataset(url).to_bytes()
        assert found.alone == alone


# A format of another package. What it does to a process is said by the name of the shard.
_ODD = """
import os, signal, threading
from dataplane.formats.parquet import Parquet

class Odd(Parquet):
    name = "odd"
    suffixes = (".odd",)

    def index(self, shard):
        reader = type(shard).__name__
        _, way, where = shard.url.rpartition("/")[2].removesuffix(".odd").split("-")
        if reader == "_PartsOfShard" or (where == "everywhere" and reader == "_RequestedShard"):
            if way == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
                threading.Event().wait()  # another thread may get the signal
            elif way == "exit":
                os._exit(0)
            elif way == "hang":
                threading.Event().wait()
            elif way == "bug":
                1 / 0
            elif way == "grow":
                bytearray(1 << 30)
            elif way == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                threading.Event().wait()  # this thread may go on until another one gets it
        return super().index(shard)
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This format is installed, here and in all processes that are started."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "odd-1.dist-info").mkdir(parents=True)
    (folder / "odd-1.dist-info" / "METADATA").write_text("Name: odd\nVersion: 1\n")
    points = "[dataplane.formats]\nodd = odd_format:Odd\n"
    (folder / "odd-1.dist-info" / "entry_points.txt").write_text(points)
    (folder / "odd_format.py").write_text(_ODD)
    known = (registry._others, registry._by_suffix, registry._by_end)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        for cached in known:
            cached.cache_clear()
        with forking.fork_server.held():  # for all tests
            yield
    sys.modules.pop("odd_format", None)
    for cached in known:
        cached.cache_clear()


def odd_shards(way: str, where: str = "here") -> dict[str, bytes]:
    content = parquet_bytes(TABLE, row_group_size=20)
    shards = {f"{number:03}-well-.odd": content for number in range(COUNT)}
    return {**shards, f"010a-{way}-{where}.odd": content}


@pytest.mark.parametrize("way", ["well", "crash", "exit", "hang", "bug", "grow", "stop"])
def test_whatever_becomes_of_a_parser_is_nobodys_error(
    way: str, put: Callable[[dict[str, bytes]], str]
) -> None:
    url = put(odd_shards(way))
    silent_s = 1.0 if way in ("hang", "stop") else 60.0
    with indexing(silent_s) as found:
        manifest = found.of(url)
    assert manifest.to_bytes() == index_dataset(url).to_bytes()
    assert (f"010a-{way}-here.odd" in found.alone) == (way != "well")


@pytest.mark.parametrize("way", ["crash", "grow", "bug"])
def test_who_is_to_blame_is_said_as_if_there_were_no_batches(
    way: str, put: Callable[[dict[str, bytes]], str]
) -> None:
    url = put(odd_shards(way, "everywhere"))
    errors = []
    for least in (2, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "_BATCHED_MIN", least)
            with indexing() as found, pytest.raises(DataplaneError) as caught:
                found.of(url)
            errors.append((type(caught.value), str(caught.value), caught.value.nouns))
    assert errors[0] == errors[1]
    assert f"010a-{way}-everywhere.odd" in errors[0][1]


def test_pairs_that_are_of_no_use_are_not_replaced(put: Callable[[dict[str, bytes]], str]) -> None:
    content = parquet_bytes(TABLE)
    url = put({f"{number:03}-exit-here.odd": content for number in range(COUNT)})
    with indexing() as found:
        assert found.of(url).sample_count == COUNT * TABLE.num_rows
    assert len(found.alone) == COUNT
