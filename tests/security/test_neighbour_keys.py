"""The keys of neighbours: who gets one, and where they are not."""

from __future__ import annotations

import asyncio
import base64
import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import membership
import msgspec
import pytest
from membership import VERSION, progress
from trusted import OWN, TRUSTED, beat, identity, join, leave, node

from dataplane.coordinator.front import Coordinator, CoordinatorConfig
from dataplane.coordinator.server import CoordinatorServer
from dataplane.model.errors import ConfigError
from dataplane.rpc.calls import CoordinatorClient
from dataplane.rpc.codec import encode
from dataplane.rpc.membership import JobNodes, StatusRequest
from dataplane.security.neighbour_keys import NeighbourKeys, keys_in, own_keys

ADDRESS = "10.0.0.1:7078"
MAKER = identity("maker")


def test_a_key_is_of_one_secret_one_job_and_one_generation():
    one, other = own_keys(), own_keys()
    made = [
        keys.key(job, generation)
        for keys in (one, other)
        for job in ("j", "k", "j\0")
        for generation in (1, 2, 256)
    ]
    assert len({*made, one.salt, other.salt}) == len(made) + 2
    assert all(len(key) == 32 for key in made)
    assert NeighbourKeys(one._secret).key("j", 1) == one.key("j", 1)


def test_the_secret_is_private_and_made_once(tmp_path):
    path = tmp_path / "state" / "neighbours.key"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: keys_in(path).key("j", 1), range(8)))
    assert len(set(found)) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert keys_in(path).key("j", 1) == found[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.chmod(0o640), r"mode 0640: only its owner.*chmod 600"),
        (lambda path: path.write_text("abc\n"), "is not a secret of 64 hex digits: remove it"),
        (lambda path: path.write_text("x" * 65), "is not a secret of 64 hex digits: remove it"),
        (lambda path: path.write_bytes(b"\xff" * 65), "is not a secret of 64 hex digits"),
        (lambda path: path.write_text(path.read_text() * 2), "more than 65 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "only its owner|cannot be read"),
    ],
    ids=["readable", "short", "no digits", "no text", "long", "a folder"],
)
def test_a_secret_that_cannot_be_used_is_fatal_and_not_shown(tmp_path, spoil, words):
    path = tmp_path / "neighbours.key"
    keys_in(path)
    secret = path.read_text().strip()
    spoil(path)

    async def start():
        config = CoordinatorConfig(VERSION, str(tmp_path / "c.sqlite"), key_file=str(path))
        await Coordinator(config).start()

    with pytest.raises(ConfigError, match=words) as caught:
        asyncio.run(start())
    assert secret not in str(caught.value)


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match=r"secret .* cannot be created.*--state-dir$"):
        keys_in(tmp_path / "state" / "neighbours.key")


def shapes(secret: bytes) -> list[bytes]:
    """How these bytes would look in a text or a file."""
    texts = [secret.hex(), secret.hex().upper(), base64.b64encode(secret).decode(), repr(secret)]
    return [secret, *(text.strip("='b").encode() for text in texts)]


async def as_maker(client, coordinator):
    """What a maker is told of a job that is short of workers."""
    await client.register_node(node(node_id=MAKER.node_id, data_address=ADDRESS))
    await coordinator.register_node(membership.node("n1", worker_count=0))
    await coordinator.join(membership.join(0, job="short", node_id="n1"))
    told = await client.heartbeat(beat(node_id=MAKER.node_id, data_address=ADDRESS))
    assert [one.job_id for one in told.jobs] == ["short"]
    await coordinator.leave(membership.leave(job="short", node_id="n1"))
    return told


def test_no_secret_or_key_is_in_a_log_a_repr_the_ledger_a_status_or_an_error(
    tmp_path, caplog, capfd
):
    files = Path(tmp_path, "state")
    told: list[object] = []

    async def main():
        config = CoordinatorConfig(
            VERSION, str(files / "c.sqlite"), key_file=str(files / "neighbours.key")
        )
        for _ in range(2):  # also after a restart
            server = CoordinatorServer(config, "127.0.0.1:0", TRUSTED)
            address = await server.start()
            client = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=OWN)
            await client.register_node(node(data_address=ADDRESS))
            joined = await client.join(join(0))
            beaten = await client.heartbeat(beat(progress(), data_address=ADDRESS))
            assert joined.nodes == beaten.jobs[0]
            told.extend((joined, beaten, server.coordinator, TRUSTED))
            maker = CoordinatorClient(address, TRUSTED, patience_s=0.0, identity=MAKER)
            told.append(await as_maker(maker, server.coordinator))
            await maker.close()
            found = await client.status(StatusRequest())
            assert found.jobs[0].nodes_version == joined.nodes.version
            assert [one.is_short for one in found.nodes] == [False, False, True]
            told.append(msgspec.json.encode(found))
            with pytest.raises(ConfigError) as caught:
                await client.join(join(1, member="m0-i1"))
            told.append(caught.value)
            await client.leave(leave("m1-i1"))
            await client.close()
            await server.stop(0.0)

    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "dataplane"):
        asyncio.run(main())
    keys = keys_in(files / "neighbours.key")
    key = keys.key("j", 1)
    assert isinstance(told[0].nodes, JobNodes)
    assert key == told[0].nodes.key
    assert key == told[7].nodes.key
    assert key in encode(told[0]), "this test would find it"
    makers_key = keys.key("short", 1)
    assert makers_key == told[4].jobs[0].key
    told += [keys, repr(keys), OWN, MAKER, caplog.text, *capfd.readouterr()]
    texts = [one if isinstance(one, bytes) else f"{one!r} {one}".encode() for one in told]
    others = [path for path in files.iterdir() if path.name != "neighbours.key"]
    assert "c.sqlite" in {path.name for path in others}
    texts += [path.read_bytes() for path in others]
    secrets = (key, makers_key, keys._secret, OWN.secret, MAKER.secret)
    for one in (shape for secret in secrets for shape in shapes(secret)):
        assert not any(one in text for text in texts)
    caplog.clear()
