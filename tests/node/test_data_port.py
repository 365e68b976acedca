"""Where a node listens for other nodes, and what it tells them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dataplane.model.errors import ConfigError
from dataplane.node.neighbours import data_address, open_data_port
from dataplane.rpc.bounds import check_data_address
from dataplane.settings import BY_NAME, parse


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
