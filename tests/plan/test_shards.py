"""A manifest's columns hold the values of its shards."""

from __future__ import annotations

import base64
import hashlib
import lzma
import os
import struct
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from msgspec.structs import replace

from dataplane.index.journal import IndexJournal
from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import Region
from dataplane.model.redact import unsigned
from dataplane.plan.loops import lay_records
from dataplane.plan.manifest import Manifest
from dataplane.plan.shards import Shard, ShardTable
from dataplane.plan.texts import Texts
from dataplane.plan.views import identity_of, relative_names

modest = settings(max_examples=60)
numbers = st.integers(0, 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
urls = st.one_of(
    names,
    names.map(lambda name: f"s3://bucket/folder/{name}"),
    st.builds("https://me:pass@host/{}?{}=1&sig={}".format, names, names, names),
)
shards = st.builds(
    Shard,
    urls,
    numbers,
    names,
    st.integers(0, 3),
    st.builds(Region, numbers, numbers),
    st.booleans(),
    st.lists(numbers, max_size=3, unique=True).map(lambda found: tuple(sorted(found))),
)
many = st.lists(shards, min_size=1, max_size=8)


def manifest_of(listed):
    """A manifest with the shards' number of blocks, and at least one."""
    listed = [replace(listed[0], block_count=listed[0].block_count + 1), *listed[1:]]
    counts = [shard.block_count for shard in listed]
    block = np.arange(sum(counts))
    return listed, Manifest(
        ("all",), "jsonl", b"schema", listed, np.repeat(np.arange(len(listed)), counts),
        block + 1, block * 7, block + 3, block * 2,
    )  # fmt: skip


@modest
@given(many)
def test_columns_give_every_shard_as_it_was(listed):
    listed, manifest = manifest_of(listed)
    for found in (manifest, Manifest.from_bytes(manifest.to_bytes())):
        assert [*found.shards] == listed
        assert [found.shards[at] for at in range(-len(listed), 0)] == listed
        assert found.shards == manifest.shards
        assert [*found.shards.urls] == [shard.url for shard in listed]
        with pytest.raises(IndexError):
            found.shards[len(listed)]
        with pytest.raises(IndexError):
            found.shards[-len(listed) - 1]


@modest
@given(many)
def test_fingerprint_and_identity_are_those_of_the_shards_one_by_one(listed):
    listed, manifest = manifest_of(listed)
    assert manifest.fingerprint == plain_fingerprint(manifest, listed)
    found = identity_of(manifest)
    assert (found.content, found.layout) == plain_identity(manifest, listed)


@modest
@given(many)
def test_a_block_has_the_index_that_its_shard_gives_it(listed):
    few = [replace(each, empty_blocks=tuple({at % 7 for at in each.empty_blocks}))
           for each in listed]  # fmt: skip
    few = [replace(each, empty_blocks=tuple(sorted(each.empty_blocks))) for each in few]
    few, manifest = manifest_of(few)
    block = 0
    for shard in few:
        filled = (at for at in range(99) if at not in shard.empty_blocks)
        for _ in range(shard.block_count):
            assert manifest.block_in_shard(block) == next(filled)
            block += 1


def hashed(person, parts):
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=person).hexdigest()


def plain_fingerprint(manifest, listed):
    """As docs and releases have it, one shard after the other."""
    texts = (manifest.format.encode(), manifest.schema)
    parts = [struct.pack("<Q", len(text)) + text for text in texts]
    parts.append(struct.pack("<QQ", len(listed), manifest.block_count))
    for shard in listed:
        url, etag, empty = unsigned(shard.url).encode(), shard.etag.encode(), shard.empty_blocks
        place = shard.preamble.offset, shard.preamble.length
        own = (len(url), len(etag), shard.size_bytes, shard.block_count, *place,
               int(shard.zero_copy), len(empty), *empty)  # fmt: skip
        parts += [struct.pack(f"<{len(own)}q", *own), url, etag]
    for name in ("shard", "rows", "offset", "length", "decoded"):
        parts.append(getattr(manifest, f"block_{name}").tobytes())
    return hashed(b"dp-manifest-1", parts)


def plain_names(listed):
    paths = [
        url.partition("?")[0] if url.startswith(("http://", "https://")) else url for url in listed
    ]
    root = os.path.commonprefix(paths).rfind("/") + 1  # noqa: RUF071 - cut at a slash
    return [path[root:] for path in paths]


def plain_identity(manifest, listed):
    texts = (manifest.format.encode(), manifest.schema)
    parts = [struct.pack("<q", len(text)) + text for text in texts]
    parts.append(struct.pack("<qq", len(listed), manifest.block_count))
    tags = []
    for name, shard in zip(plain_names([each.url for each in listed]), listed, strict=True):
        text, etag = name.encode(), shard.etag.encode()
        parts += [struct.pack("<qqq", len(text), shard.size_bytes, shard.block_count), text]
        tags += [struct.pack("<q", len(etag)), etag]
    for column in ("rows", "offset", "length"):
        parts.append(getattr(manifest, f"block_{column}").tobytes())
    layout = hashed(b"dp-identity-1", parts)
    return hashed(b"dp-identity-1", [*tags, bytes.fromhex(layout)]), layout


@modest
@given(st.lists(urls, max_size=8), st.binary(min_size=1, max_size=3))
@example(["https://h/a?b=1", "s3://b/a?b"], b"?")
@example(["same/1", "same/1"], b"/")
@example(["", ""], b"x")
def test_texts_in_one_buffer_equal_separate_texts(listed, marks):
    texts = Texts.of(listed)
    assert [*texts] == listed
    marked = [any(mark in text.encode() for mark in marks) for text in listed]
    expected = [text[::-1] + "é" if m else text for text, m in zip(listed, marked, strict=True)]
    assert [*texts.changed(lambda text: text[::-1] + "é", marks)] == expected
    for prefix in (b"", b"s3://", b"https://me", *(text.encode()[:3] for text in listed)):
        found = texts.starting_with(prefix).tolist()
        assert found == [text.encode().startswith(prefix) for text in listed]
    if listed:
        shared = os.path.commonprefix([text.encode() for text in listed])  # noqa: RUF071
        assert texts.shared_prefix_bytes() == len(shared)
        found = relative_names(texts)
        places = zip(found.starts, found.stops, strict=True)
        assert [found.content[a:b].tobytes().decode() for a, b in places] == plain_names(listed)


@modest
@given(st.lists(st.lists(st.binary(max_size=9), min_size=3, max_size=3), max_size=9))
def test_records_are_their_pieces_one_after_the_other(rows):
    columns = [*zip(*rows, strict=True)] or [(), (), ()]
    contents = [np.frombuffer(b"".join(each), np.uint8) for each in columns]
    ends = [np.cumsum([0, *map(len, each)]) for each in columns]
    starts, lengths = [each[:-1] for each in ends], [np.diff(each) for each in ends]
    found = lay_records(contents, starts, lengths)
    assert found.tobytes() == b"".join(part for row in rows for part in row)


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": np.array([1, -1])},
        {"preamble_offset": np.array([0, -(2**63)])},
        {"preamble_length": np.array([5, -5])},
        {"block_starts": np.array([0, 3, 2])},
        {"empty": np.array([3, 3, 0])},
        {"empty": np.array([3, 4, -1])},
    ],
)
def test_columns_that_no_shard_can_have_are_refused_by_its_name(change):
    two = ShardTable.of(
        [
            Shard("s3://b/0", 1, "e", 1, Region(0, 0), False, (1, 2)),
            Shard("s3://b/1", 1, "e", 1, Region(0, 0), False, (0,)),
        ]
    )
    columns = {
        name: getattr(two, name) for name in ShardTable.__dataclass_fields__ if name[0] != "_"
    }
    where = "s3://b/0" if change.get("empty", [0, 1])[0] == change.get("empty", [0, 1])[1] else ""
    with pytest.raises(ConfigError) as refused:
        ShardTable(**{**columns, **change})
    assert refused.value.shard == (where or "s3://b/1")


def alike(count):
    listed = [
        Shard(f"s3://b/{at:07d}", 9, f"e{at}", 1, Region(at, 3), True, (1,)) for at in range(count)
    ]
    return manifest_of(listed)[1]


def test_a_manifest_of_many_shards_is_few_objects():
    content, objects = alike(5000).to_bytes(), []
    for _ in range(2):
        before = sys.getallocatedblocks()
        manifest = Manifest.from_bytes(content)
        identity_of(manifest)
        objects.append(sys.getallocatedblocks() - before)
    assert objects[-1] < 500


def test_a_file_that_is_truncated_while_its_manifest_is_used_harms_no_job(tmp_path: Path) -> None:
    manifest = alike(1000)
    journal = IndexJournal(str(tmp_path), "dataset")
    journal.finish("key", manifest, [])
    found = journal.manifest("key")
    journal.close()
    (path,) = tmp_path.glob("index/dataset/*.manifest")
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    os.truncate(path, 0)
    assert found is not None
    assert [*found.shards] == [*manifest.shards]
    assert Manifest.from_bytes(found.to_bytes()) == manifest


def test_a_manifest_of_a_former_release_is_refused_with_what_to_do():
    content = lzma.decompress(base64.b64decode(FORMER))
    with pytest.raises(CorruptShard, match="Index the dataset again"):
        Manifest.from_bytes(content)


FORMER = (
    "/Td6WFoAAATm1rRGAgAhARwAAAAQz1jM4A3vA3JdAH/ougCgC4k+AyxIZ1ho2F78UPRaXg6LvC9LVbgskhYVAdeAiImFgu"
    "zyHqy8RIgLoZFGXalTiwSmMKtXNO6edwJgAHBqKRM84plcVPU7aKTDZbePMqc6lkXm3R2mMtUaP+dxW7yZG0AOl3VAUfOz"
    "yrdeuHxWhIVy6P3wL7wiYa+MNNYJUrfSiS/kog46OM+nQ3qPuARzwTregzx3vL6v7vdmLOrd2eC76m/O6zXeOrunQyNXKK"
    "0M0213iAROJeiixzo1B92rOkzJl7dBYm2Y1hS2sZ724AasZMnDTCmGFmZeYZ4W8bA+/AHPzM4W+wH+NdVSttFxCWYmR9HF"
    "3sDJ7c32cCEMuFeF6ETjaNh2dUa78iVr6AKBrE3Ad3UNx4bO63bphfLQYpst/skzUaVjN7ksIl/FQR8UvHe8eFIRPotdmx"
    "BZPTySSGkM/KEn91dsLJT2128tYd4HcNY0kf3cSWui3IxkfU2E5G5x8Ph7mnJlBHo4IdrEzlIMWCduCsCTn6S93tzegpqx"
    "yXhnZ2fqo+GuUdmrZDJ5BPgVdFp2sjGBIyuvX/0u3FA+ktu3au/9ON532Rdg2QDkFQxpDWFkaz4qPRd92T7UCPU2m5GN0b"
    "AsdA9F9SSuMn6AOw3XHDcFqVCR90mT+UkHmQPQb7Shumz4j0eIMl2AxTSw6ATETWD6U7UBdspWx46Zd90rjMCCTsd6oYz+"
    "3kc9HhR6ZRE4BvhbcRN+j1pfPYfBfIPLweGymTfvZGeagkDRQuUvMBGjtWkzxFhmjjQZcZyjSwSj9JjVGqm6OkCx3a37Li"
    "OVwxuiaznL3AJEhOc4TVt0xLA42qToOSjk+29xI2QrbvPNpXRUjNxSk42IEGc1p6qql2VlGCBHG03YZG2VQmfqeSEMg4DV"
    "uJjV11KEtGR0EeYTZvjpBGifF1veGAC4yyqK7aIkWZZg1XZbWe5t9mWUesTTzYB8Nx+8Z+5ZgyN+DDTJ3Wh4M3OhJo8URM"
    "sh4Eko+H6xQUNYi9ad/Bif9jpsv3tFv+OhWl9NwGxmlsbSJ4eed2X4RsujRxZdb22qBlXdSl/w8TndhqwyDk0/nZv4YE7U"
    "YQGdMVcz3YA0ipJuPK9aZpSnf7hfSCCYeYSmLv6g3xjpEHnqbtqpE5IGghwpgrFQ2fGVtVnfFyYrcQ+JArhLbm7HAAAAAN"
    "5MaEJ2NiwaAAGOB/AbAABTJ9rDscRn+wIAAAAABFla"
)
