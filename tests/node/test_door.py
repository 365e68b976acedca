"""Which connections a node accepts, and what happens when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError
from dataplane.node import door as doors
from dataplane.node.door import Door
from dataplane.node.neighbours import data_address, open_data_port
from dataplane.node.stored import FolderTakenError, folder_of, open_cache_folder
from dataplane.rpc import local
from dataplane.rpc.bounds import check_data_address
from dataplane.settings import BY_NAME, default_node_config, parse


class Visitor:
    def __init__(self, party: Party, sock: socket.socket) -> None:
        self.party, self.sock = party, sock

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.party.inside.remove(self)
        self.party.door.left(self)
        self.sock.close()

    def hung_up(self) -> None:
        self.party.gone.append(self)
        self.close()


class Party:
    """A door over a real listener, and the admitted connections in order of arrival."""

    def __init__(self, count_max: int) -> None:
        self.name = f"dp-door-{os.getpid()}-{time.monotonic_ns()}"
        self.inside: list[Visitor] = []
        self.gone: list[Visitor] = []
        self.door = Door(local.listen(self.name), self._admit, Trace("test"), count_max)
        self.door.open()

    def _admit(self, sock: socket.socket) -> Visitor:
        self.inside.append(Visitor(self, sock))
        return self.inside[-1]

    async def comes(self, stack: contextlib.ExitStack) -> socket.socket:
        """Open another connection, and wait until the door has seen it."""
        sock = stack.enter_context(local.connect(self.name, 10.0))
        await turns()
        return sock


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def party(count_max: int) -> AsyncIterator[tuple[Party, contextlib.ExitStack]]:
    with contextlib.ExitStack() as stack:
        made = Party(count_max)
        try:
            yield made, stack
        finally:
            made.door.close()
            for visitor in list(made.inside):
                visitor.close()


async def test_silent_connections_are_closed_and_greeted_ones_stay() -> None:
    async with party(8) as (made, stack):
        for _ in range(2):
            await made.comes(stack)
        silent, polite = made.inside
        made.door.greeted(polite)
        made.door.tick()
        assert made.inside == [silent, polite]
        made.door.tick(time.monotonic() + 1000)
        assert made.inside == [polite]


async def test_a_connection_that_ends_is_reported_at_once_though_nothing_of_it_is_read() -> None:
    async with party(8) as (made, stack):
        socks = [await made.comes(stack) for _ in range(4)]
        first, second, third, fourth = made.inside
        socks[1].send(b"unread")
        await turns()
        assert not made.gone
        socks[1].close()
        await turns()
        assert made.gone == [second]
        third.close()  # by the node itself
        socks[2].close()
        await made.comes(stack)  # takes the descriptor of one that has gone
        assert made.gone == [second]
        socks[0].close()
        await turns()
        assert made.gone == [second, first]
        assert made.inside[0] is fourth
        assert len(made.inside) == 2


async def test_in_a_full_node_only_the_longest_silent_connection_is_closed() -> None:
    async with party(4) as (made, stack):
        for _ in range(4):
            await made.comes(stack)
        first, _, third, fourth = made.inside
        made.door.greeted(first)
        await made.comes(stack)
        assert made.inside[:3] == [first, third, fourth]
        made.door.greeted(third)
        with pytest.raises(ConfigError, match=r"process \d+ has 2 connections .* close\(\)"):
            made.door.greeted(fourth)
        third.close()
        made.door.greeted(fourth)


async def test_a_process_may_have_only_a_few_silent_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with party(1000) as (made, stack):
        for _ in range(100):
            await made.comes(stack)
        assert len(made.inside) == doors._SILENT_MAX
    assert 0 < len(caplog.records) <= 30, "its rate is limited"


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filler: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
        with contextlib.suppress(OSError):
            while True:
                filler.append(os.dup(0))
        yield
    finally:
        for fd in filler:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_nothing_spins_and_later_connections_are_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(doors, "_PAUSE_S", 0.01)

    async with party(8) as (made, stack):
        await made.comes(stack)
        made.door.greeted(made.inside[0])
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        with no_descriptor_left():
            waiting.connect("\0" + made.name)
            for _ in range(1000):
                await asyncio.sleep(0)
            assert len(made.inside) == 1
            assert "nobody is let in" in caplog.text
            assert len(caplog.records) <= 30
        async with asyncio.timeout(60):
            while len(made.inside) < 2:  # noqa: ASYNC110 - the door has no event for it
                await asyncio.sleep(0)


# -- Where a node listens for other nodes, and what it tells them


def opened(wanted: str, coordinator: str = "127.0.0.1:7077", **more: bool) -> str:
    """The address that others are told."""
    listener = open_data_port(wanted, coordinator, **more)
    if listener is None:
        return ""
    with listener:
        told = data_address(listener)
        check_data_address(told)
        with socket.create_connection(listener.getsockname()[:2], timeout=5):
            return told


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_by_default_it_is_the_address_by_which_the_coordinator_is_reached():
    assert opened("").startswith("127.0.0.1:")
    assert opened("", "127.0.0.5:1").startswith("127.0.0.1:")
    assert opened("", "[::1]:7077").startswith("[::1]:")
    assert opened("", "localhost:0").startswith("127.0.0.1:")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    assert opened(f":{free}") == f"127.0.0.1:{free}"


def test_an_address_that_is_given_is_taken_whatever_the_coordinator_is():
    for coordinator in ("unix:/run/x.sock", "10.255.255.1:1", "head-of-nobody.invalid:1"):
        told = opened("127.0.0.3:0", coordinator, is_own=True, is_safe=False)
        assert told.startswith("127.0.0.3:")
    assert opened("localhost:0").startswith("127.0.0.1:")


def test_there_is_none_where_nobody_could_come_from():
    assert opened("none") == ""
    assert opened("", "unix:/run/x.sock") == ""
    assert opened(":0", "unix:/run/x.sock") == ""
    assert opened("", is_own=True) == ""
    assert opened(":0", is_own=True).startswith("127.0.0.1:")


def test_blocks_cross_the_network_in_plain_text_only_where_that_was_allowed(caplog):
    coordinator = "198.51.100.7:7077"  # beyond this host, if there is a network at all
    beyond = opened("", coordinator)
    caplog.clear()
    assert opened("", coordinator, is_safe=False) == ""
    assert bool(beyond) == ("plain text" in caplog.text)
    for line in caplog.records:
        assert line.levelname == "WARNING"
        assert "lends no blocks to other nodes and makes no slabs" in line.getMessage()
        assert "--peer-tls, on all nodes" in line.getMessage()
    assert opened(":0", coordinator, is_safe=False).partition(":")[0] == beyond.partition(":")[0]
    # Loopback is no network.
    assert opened("", is_safe=False).startswith("127.0.0.1:")


def test_a_coordinator_whose_name_is_not_known_yet_is_no_reason_to_have_none():
    unknown, beyond = (opened("", f"{host}:1") for host in ("nobody.invalid", "198.51.100.7"))
    assert unknown.partition(":")[0] == beyond.partition(":")[0]


@pytest.mark.parametrize("wanted", ["127.0.0.1:{taken}", ":{taken}", "198.51.100.1:0"])
def test_an_address_that_cannot_be_taken_is_an_error_that_names_the_setting(wanted, taken):
    with pytest.raises(
        ConfigError, match=r"cannot listen for neighbours at .*--data-listen"
    ) as caught:
        open_data_port(wanted.format(taken=taken), "127.0.0.1:7077")
    assert caught.value.key == "data_listen"


@pytest.mark.parametrize(
    "given", ["0.0.0.0:70", "[::]:70", "unix:/run/x", "7078", ":x", ":70000", "http://x:1", "None"]
)
def test_what_neighbours_could_not_be_told_is_refused(given):
    with pytest.raises(ConfigError, match="data_listen cannot be"):
        parse(BY_NAME["data_listen"], given, "--data-listen")


# -- The folder of a node's blocks on disk: who may have it, and what is refused when a node st


MIB = 1 << 20


def test_one_node_has_the_folder_at_a_time(tmp_path: Path) -> None:
    first = open_cache_folder(str(tmp_path / "cache"), MIB)
    with pytest.raises(FolderTakenError, match=f"process {os.getpid()}.*cache_dir of its own"):
        open_cache_folder(str(tmp_path / "cache"), MIB, patience_s=0.0)
    first.close()
    first.close()
    open_cache_folder(str(tmp_path / "cache"), MIB).close()
    assert (tmp_path / "cache" / "blocks").stat().st_mode & 0o777 == 0o700


def test_the_folder_is_free_when_the_last_process_that_has_the_lock_is_gone(tmp_path: Path) -> None:
    folder = open_cache_folder(str(tmp_path), MIB)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder.lock]
    )
    os.close(folder.lock)  # as if this process had been killed
    with pytest.raises(FolderTakenError):
        open_cache_folder(str(tmp_path), MIB, patience_s=0.0)
    child.kill()
    child.wait(60)
    assert child.stdin is not None
    child.stdin.close()
    open_cache_folder(str(tmp_path), MIB).close()


def test_an_embedded_node_does_without_a_folder_that_another_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = structs.replace(
        default_node_config(), cache_dir=str(tmp_path), cache_bytes=MIB, embedded=True
    )
    trace = Trace("node")
    first = folder_of(config, trace)
    assert first is not None
    assert folder_of(config, trace, 0.0) is None
    assert "another node" in caplog.text
    with pytest.raises(FolderTakenError):
        folder_of(structs.replace(config, embedded=False), trace, 0.0)
    first.close()
    assert folder_of(structs.replace(config, cache_bytes=0), trace) is None


def test_a_folder_that_is_no_safe_place_is_refused_with_why(tmp_path: Path) -> None:
    link, shared, file = (tmp_path / name for name in ("link", "shared", "file"))
    for folder in (link, shared):
        folder.mkdir()
    (link / "blocks").symlink_to(shared)
    (shared / "blocks").mkdir(mode=0o755)
    file.write_text("")
    for folder, size, why in (
        (link, MIB, "symbolic link"),
        (shared, MIB, r"open to other users \(mode 755\)"),
        (file, MIB, "choose another one"),
        (tmp_path / "new", 1 << 60, "lower cache_bytes"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_cache_folder(str(folder), size)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir(mode=0o700)
    os.chown(tmp_path / "blocks", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        open_cache_folder(str(tmp_path), MIB)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    open_cache_folder(str(tmp_path / "link"), MIB).close()  # a link of one's own is followed
    os.lchown(tmp_path / "link", 12345, 12345)
    with pytest.raises(ConfigError, match="symbolic link of another user"):
        open_cache_folder(str(tmp_path / "link"), MIB)


def test_a_full_disk_does_not_keep_a_node_from_its_folder(tmp_path: Path) -> None:
    first = open_cache_folder(str(tmp_path), MIB)
    first.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow
    try:
        again = open_cache_folder(str(tmp_path), MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again.close()
    assert again.disk_id == first.disk_id


def test_a_folder_has_the_same_id_as_long_as_it_is_there(tmp_path: Path) -> None:
    ids = []
    for folder in ("one", "one", "other"):
        opened = open_cache_folder(str(tmp_path / folder), MIB)
        ids.append(opened.disk_id)
        opened.close()
    assert ids[0] == ids[1] != ids[2]
    (tmp_path / "one" / "blocks" / "id").write_text("nonsense")
    opened = open_cache_folder(str(tmp_path / "one"), MIB)
    opened.close()
    assert opened.disk_id not in ids
