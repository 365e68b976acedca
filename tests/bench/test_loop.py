"""The trainer's loop: its report of a window matches what happened in it."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from array import array

import numpy as np
import pytest
from dataplane_bench import processes
from dataplane_bench.model import BenchCase, Mode, StorageKind
from dataplane_bench.s3 import s3_storage
from dataplane_bench.trial.launch import environment, together
from dataplane_bench.trial.process import BIN_S, Loop, NoBatch
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from dataplane.model.errors import ConfigError

# Binary fractions: sums of them are exact.
moments = st.integers(0, 4096).map(lambda ticks: ticks / 256)
batches = st.lists(
    st.tuples(
        st.integers(0, 64).map(lambda ticks: ticks / 256),  # the trainer computes
        st.integers(1, 512).map(lambda ticks: ticks / 256),  # it waits
        st.integers(0, 100),  # samples
    ),
    max_size=60,
)


def seen(told, began):
    """A loop that has seen these batches."""
    loop = Loop(iter(()))
    ends, waits, counts = array("d"), array("d"), array("q")
    now = began
    for computed, waited, count in told:
        now += computed + waited
        ends.append(now)
        waits.append(waited)
        counts.append(count)
    loop._ends, loop._waits, loop._counts = ends, waits, counts
    return loop


def arrived(at, told, began):
    """Samples taken by a moment. A batch is on its way since the one before it; the first one
    since the trainer began to wait for it.
    """
    total, now = 0.0, began
    for index, (computed, waited, count) in enumerate(told):
        start = now if index else now + computed
        now += computed + waited
        if at >= now:
            total += count
        elif at > start:
            return total + count * (at - start) / (now - start)
    return total


def waited_within(start, end, told, began):
    now, total = began, 0.0
    for computed, waited, _ in told:
        total += max(min(now + computed + waited, end) - max(now + computed, start), 0.0)
        now += computed + waited
    return total


@given(told=batches, began=moments, start=moments, length=st.integers(1, 2048))
def test_a_window_is_what_a_slow_plain_model_says(told, began, start, length):
    end = start + length / 256
    found = seen(told, began).window(start, end)
    expected = arrived(end, told, began) - arrived(start, told, began)
    assert found["sample_count"] == pytest.approx(expected, abs=1e-6)
    assert found["seconds"] == end - start
    share = waited_within(start, end, told, began) / (end - start)
    assert found["wait_share"] == pytest.approx(share)
    ends = list(itertools.accumulate((c + w for c, w, _ in told), initial=began))[1:]
    inside = bisect.bisect_right(ends, end) - bisect.bisect_right(ends, start)
    assert found["batch_count"] == inside
    waits = [w for (_, w, _), at in zip(told, ends, strict=True) if start < at <= end]
    if waits:
        assert found["wait_p50_ms"] == pytest.approx(float(np.median(waits)) * 1000)
        assert min(waits) * 1000 <= found["wait_p99_ms"] <= max(waits) * 1000


@given(told=batches, began=moments, start=moments, length=st.integers(1, 2048))
def test_the_timeline_adds_up_to_the_window(told, began, start, length):
    found = seen(told, began).window(start, start + length / 256)
    ends = [0.0, *(at for at, _ in found["timeline"])]
    widths = np.diff(ends)
    assert ends[-1] == pytest.approx(length / 256, abs=1e-3)
    assert np.allclose(widths[:-1], BIN_S, atol=2e-3)
    assert widths[-1] >= 0.5 * BIN_S - 2e-3 or len(widths) == 1
    assert widths[-1] <= 1.5 * BIN_S + 2e-3
    total = sum(rate * width for (_, rate), width in zip(found["timeline"], widths, strict=True))
    # Rates and moments are rounded.
    assert total == pytest.approx(found["sample_count"], rel=0.05, abs=5)


def test_the_window_of_a_computing_trainer_ends_within_what_was_seen():
    stop = threading.Event()

    def endless():
        for index in itertools.count():
            if index == 4:
                stop.set()  # as the trainer has computed, at the latest
            yield {"x": [0] * 8}

    loop = Loop(endless())
    loop.run(stop, 0.1)
    assert len(loop._ends) == 5, "one more is taken after the stop"
    computed = loop._ends[4] - loop._ends[3]
    assert computed >= 0.1
    found = loop.window(loop._ends[0], loop._ends[3] + 0.2 * computed)
    assert found["sample_count"] == pytest.approx(8 * 3 + 8 * 0.2)


def test_a_whole_epoch_counts_from_when_the_loader_was_opened():
    began = time.monotonic() - 1.0
    found = Loop(iter([{"x": [0] * 3}, {"x": [0] * 2}])).whole(began, threading.Event())
    assert found["sample_count"] == 5
    assert found["batch_count"] == 2
    assert found["seconds"] >= found["first_batch_s"] >= 1.0
    assert found["start"] == began


def test_an_epoch_that_is_stopped_ends_with_the_batch_under_way():
    stop = threading.Event()

    def endless():
        for index in itertools.count():
            if index == 3:
                stop.set()
            yield {"x": [0]}

    assert Loop(endless()).whole(time.monotonic(), stop)["sample_count"] == 4


def test_an_epoch_without_a_batch_is_refused():
    with pytest.raises(NoBatch):
        Loop(iter(())).whole(time.monotonic(), threading.Event())


def test_ranks_that_begin_and_end_at_different_times_are_added_up():
    first = {
        "sample_count": 100.0,
        "batch_count": 10,
        "seconds": 2.0,
        "start": 5.0,
        "wait_share": 0.5,
        "wait_p50_ms": 1.0,
        "wait_p99_ms": 9.0,
        "first_batch_s": 0.5,
        "trainer_cpu_share": 0.2,
        "timeline": [[1.0, 60.0], [2.0, 40.0]],
    }
    second = {
        "sample_count": 50.0,
        "batch_count": 5,
        "seconds": 4.0,
        "start": 5.5,
        "wait_share": 1.0,
        "wait_p50_ms": 2.0,
        "wait_p99_ms": 3.0,
        "first_batch_s": 0.7,
        "trainer_cpu_share": 0.4,
        "timeline": [[1.0, 20.0], [2.0, 10.0], [4.0, 10.0]],
    }
    found = together([first, second])
    assert found["sample_count"] == 150
    assert found["seconds"] == 4.5
    assert found["samples_per_s"] == pytest.approx(150 / 4.5)
    assert found["wait_share"] == 0.75
    assert found["trainer_cpu_share"] == pytest.approx(0.3)
    assert (found["wait_p50_ms"], found["wait_p99_ms"]) == (2.0, 9.0)
    assert found["first_batch_s"] == 0.7
    assert found["timeline"] == [[1.0, 80.0], [2.0, 50.0], [4.0, 10.0]]
    assert together([first]) == {**first, "samples_per_s": 50.0}


DELAY_MS = 150.0
LARGE = 32 << 20


class Server:
    """Answers each connection in a thread with `answer`, until it is closed."""

    def __init__(self, answer):
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.port = self._listening.getsockname()[1]

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError):
            self._answer(connection)

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(10)


@contextlib.contextmanager
def far(answer, tmp_path, delay_ms=DELAY_MS):
    """The port of the proxy, and that of the server behind it."""
    with contextlib.closing(Server(answer)) as server:
        log = tmp_path / "latency.log"
        command = [
            sys.executable,
            "-m",
            "dataplane_bench.workloads.latency",
            str(server.port),
            str(delay_ms),
        ]
        with processes.running(command, os.environ, log) as process:
            processes.wait_until(lambda: log.read_text().endswith("\n"), process, log, 20)
            yield int(log.read_text()), server.port


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def received(connection, count):
    body = bytearray()
    while len(body) < count and (piece := connection.recv(1 << 20)):
        body += piece
    return bytes(body)


def echo(connection):
    while piece := connection.recv(1 << 16):
        connection.sendall(piece)


def large(connection):
    """Answers every received byte with LARGE bytes."""
    block = bytes(range(256)) * (LARGE // 256)
    while asked := connection.recv(64):
        for _ in asked:
            connection.sendall(block)


def test_a_request_waits_once_and_its_answer_does_not(tmp_path):
    with far(echo, tmp_path) as (port, _), connect(port) as connection:
        took = []
        for _ in range(4):
            began = time.monotonic()
            connection.sendall(b"x" * 100_000)
            assert received(connection, 100_000) == b"x" * 100_000
            took.append(time.monotonic() - began)
        # A busy machine delays some requests, but not every one.
        assert DELAY_MS / 1000 <= min(took) < 10 * DELAY_MS / 1000


def test_every_byte_of_a_large_answer_arrives_and_of_a_large_request(tmp_path):
    with far(large, tmp_path, 1) as (port, _), connect(port) as connection:
        connection.sendall(b"?")
        assert received(connection, LARGE) == bytes(range(256)) * (LARGE // 256)
    sent = os.urandom(1 << 20) * 20  # more than the proxy holds at once
    with far(echo, tmp_path, 1) as (port, _), connect(port) as connection:
        sender = threading.Thread(target=connection.sendall, args=(sent,))
        sender.start()
        assert received(connection, len(sent)) == sent
        sender.join()


def test_a_close_is_passed_on_both_ways(tmp_path):
    def last_word(connection):
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"you said all")

    with far(last_word, tmp_path, 1) as (port, _), connect(port) as connection:
        connection.sendall(b"that is all")
        connection.shutdown(socket.SHUT_WR)
        assert received(connection, 100) == b"you said all"


def test_a_server_that_is_gone_closes_its_clients(tmp_path, port_of_nobody):
    log = tmp_path / "latency.log"
    command = [sys.executable, "-m", "dataplane_bench.workloads.latency", str(port_of_nobody), "1"]
    with processes.running(command, os.environ, log) as process:
        processes.wait_until(lambda: log.read_text().endswith("\n"), process, log, 20)
        for _ in range(2):
            with connect(int(log.read_text())) as connection, contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""


FAR = BenchCase("cold", "shards", Mode.EPOCH, StorageKind.S3, delay_ms=DELAY_MS)
NEAR = dataclasses.replace(FAR, delay_ms=0.0)
FAR_OVER_TLS = dataclasses.replace(FAR, over_tls=True)

READ = """
import sys
import obstore, s3fs
from obstore.store import S3Store
bucket, key, endpoint = sys.argv[1:]
store = S3Store(bucket, endpoint=endpoint, virtual_hosted_style_request=False)
body = bytes(obstore.get_range(store, key, start=0, length=100))
fs = s3fs.S3FileSystem(endpoint_url=endpoint)
assert fs.cat_ranges([f"{bucket}/{key}"], [0], [100], on_error="raise") == [body]
print(body.hex())
"""


def store_of(place):
    """A client of a plain endpoint, and the prefix of what lies there."""
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    store = S3Store(
        bucket,
        endpoint=place.endpoint,
        access_key_id=place.access_key,
        secret_access_key=place.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    return store, prefix


def read_as_a_trial(place, name, tmp_path):
    """The first bytes, as two clients read them in the environment of a trial."""
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    done = subprocess.run(
        [sys.executable, "-c", READ, bucket, f"{prefix}/{name}", place.endpoint],
        env=environment(place, tmp_path, tmp_path, None),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return bytes.fromhex(done.stdout)


def test_one_server_is_near_and_far_plain_and_over_tls(tmp_path):
    folder = tmp_path / "shards"
    (folder / "below").mkdir(parents=True)
    (folder / "a.bin").write_bytes(os.urandom(3 << 20))
    (folder / "below" / "b.bin").write_bytes(b"b" * 100)
    (tmp_path / "scratch").mkdir()
    with s3_storage(tmp_path / "scratch", has_tls=True) as storage:
        places = [storage.place(folder, case) for case in (NEAR, FAR, FAR_OVER_TLS)]
        assert storage.place(folder, FAR) == places[1], "it is uploaded once, with one delay"
        assert len({place.url for place in places}) == 1
        assert [place.endpoint.partition(":")[0] for place in places] == ["http", "http", "https"]
        assert places[0].stored_bytes == (3 << 20) + 100
        before, content = storage.cpu_s(), (folder / "a.bin").read_bytes()
        for place in places[:2]:
            store, prefix = store_of(place)
            listed = [meta["path"] for page in store.list(prefix) for meta in page]
            assert sorted(listed) == [f"{prefix}/a.bin", f"{prefix}/below/b.bin"]
            began = time.monotonic()
            assert store.get(f"{prefix}/a.bin").bytes() == content
            assert time.monotonic() - began >= (DELAY_MS / 1000 if place is places[1] else 0)
        assert read_as_a_trial(places[2], "a.bin", tmp_path) == content[:100]
        assert storage.cpu_s() > before
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_missing_server_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="weed"), s3_storage(tmp_path):
        pass
