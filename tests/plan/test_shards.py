"""A manifest's columns hold the values of its shards."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from manifests import small
from msgspec.structs import replace

from dataplane.index.journal import IndexJournal
from dataplane.model.changes import EpochSteps
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, Region, View
from dataplane.model.redact import unsigned
from dataplane.plan import texts as text_module
from dataplane.plan.loops import lay_records
from dataplane.plan.manifest import Manifest
from dataplane.plan.order import Order
from dataplane.plan.permute import Domain, key
from dataplane.plan.shards import Shard, ShardTable, starts_of
from dataplane.plan.slices import Slice
from dataplane.plan.texts import Texts
from dataplane.plan.views import (
    check_shares,
    chosen,
    chosen_counts,
    first_rows,
    identity_of,
    limited,
    relative_names,
    shard_words,
    shared_counts,
)
from dataplane.transforms.options import view_of
from plan import golden, plain

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


@given(many)
def test_fingerprint_and_identity_are_those_of_the_shards_one_by_one(listed):
    listed, manifest = manifest_of(listed)
    assert manifest.fingerprint == plain_fingerprint(manifest, listed)
    found = identity_of(manifest)
    assert (found.content, found.layout) == plain_identity(manifest, listed)


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


@given(
    st.lists(st.tuples(st.text(max_size=5), st.booleans(), st.lists(st.integers(0, 9)))), st.data()
)
def test_a_part_of_an_array_has_its_own_values(rows, data):
    begin = data.draw(st.integers(0, len(rows)))
    some = rows[begin : data.draw(st.integers(begin, len(rows)))]
    names, flags, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    texts, bools, lists = (
        pa.array(values, kind)[begin : begin + len(some)]
        for values, kind in (
            (names, pa.string()),
            (flags, pa.bool_()),
            (numbers, pa.list_(pa.int64())),
        )
    )
    found = text_module.texts_of(texts)
    assert [*found] == [name for name, _, _ in some]
    assert found.starts[0] == 0
    assert text_module.flags_of(bools).tolist() == [flag for _, flag, _ in some]
    assert text_module.starts_of_lists(lists)[0] == 0
    assert text_module.values_of_lists(lists).tolist() == [n for _, _, each in some for n in each]
    again = text_module.lists(
        text_module.starts_of_lists(lists), text_module.values_of_lists(lists)
    )
    assert again.to_pylist() == [each for _, _, each in some]


UNIT = 1 << 32
BOUNDS = st.integers(0, UNIT)
VIEWS = st.builds(
    lambda sample, ends: View(sample=sample, split_from=min(ends), split_to=max(ends)),
    BOUNDS,
    st.tuples(BOUNDS, BOUNDS).filter(lambda ends: ends[0] != ends[1]) | st.just((0, 0)),
)


def test_the_keys_of_rows_are_the_golden_ones() -> None:
    for (use, name, row), expected in golden.SHARE_KEYS.items():
        word = shard_words(Texts.of([f"s3://b/{name}", "s3://b/\U0001f600"])).item(0)
        assert key(0, Domain.SHARE, use, word, row) == expected == plain.share_key(use, name, row)


@given(VIEWS, st.integers(0, 1000), st.integers(0, 50))
def test_rows_are_chosen_as_the_page_says(view: View, first: int, count: int) -> None:
    word = shard_words(Texts.of(["/data/en/a", "/data/b"])).item(0)
    expected = [
        plain.is_in_shares("en/a", row, view.sample, view.split_from, view.split_to)
        for row in range(first, first + count)
    ]
    assert chosen(view, word, first, count).tolist() == expected


@given(VIEWS, st.lists(st.integers(1, 40), min_size=1, max_size=8), st.booleans())
def test_counts_are_those_of_the_chosen_rows(view: View, rows: list[int], long: bool) -> None:
    sizes = np.array([*rows, 70_000 if long else 1])
    first, words = starts_of(sizes)[:-1], np.arange(len(sizes), dtype=np.uint64)
    expected = [
        int(chosen(view, word, at, count).sum())
        for word, at, count in zip(words.tolist(), first.tolist(), sizes.tolist(), strict=True)
    ]
    assert chosen_counts(view, words, first, sizes).tolist() == expected


@given(st.floats(1e-6, 1 - 1e-6))
def test_a_share_and_its_complement_have_every_row_once(share: float) -> None:
    from fractions import Fraction

    first = view_of(split=("train", share))
    rest = 1 - Fraction(str(share))
    last = view_of(split=("validation", float(rest)))
    if Fraction(str(float(rest))) == rest:
        assert (first.split_from, first.split_to) == (0, last.split_from)
    assert last.split_to == UNIT


def test_shards_that_are_added_move_no_row() -> None:
    few, more = (Texts.of([f"s3://b/d/{i}.parquet" for i in range(n)]) for n in (3, 30))
    assert shard_words(few).tolist() == shard_words(more).tolist()[:3]
    moved = Texts.of([f"/mnt/copy/{i}.parquet" for i in range(3)])
    assert shard_words(moved).tolist() == shard_words(few).tolist()


def test_a_view_has_the_blocks_with_rows_and_knows_their_places() -> None:
    whole = small()
    view = whole.viewed(np.array([0, 7, 30]))
    assert view.block_rows.tolist() == [7, 30]
    assert view.sample_count == 37
    assert [view.block_in_shard(block) for block in range(2)] == [whole.block_in_shard(1), 1 - 1]
    assert [shard.empty_blocks for shard in view.shards] == [(0, 1), (0,), ()]
    assert view.block_decoded.tolist() == [35, 56]
    assert view.fingerprint == whole.fingerprint
    assert view != whole


def test_all_rows_are_the_whole_dataset() -> None:
    whole = small()
    view = whole.viewed(whole.block_rows)
    assert view.shards == whole.shards
    assert np.array_equal(view.block_rows, whole.block_rows)


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 60))
def test_a_limit_takes_the_first_rows(counts: list[int], limit: int) -> None:
    found = limited(np.array(counts), limit)
    left = limit or sum(counts)
    for mine, all_of in zip(found.tolist(), counts, strict=True):
        assert mine == min(left, all_of)
        left -= mine


def test_shares_of_blocks_count_rows_from_the_start_of_their_shard() -> None:
    whole: Manifest = small()
    view = View(sample=UNIT // 3)
    expected = [
        sum(plain.is_in_shares(name, row, view.sample) for row in rows)
        for name, rows in (("0", range(10)), ("0", range(10, 30)), ("2", range(30)))
    ]
    assert shared_counts(whole, view).tolist() == expected


@pytest.mark.parametrize(
    "view",
    [
        View(sample=UNIT + 1),
        View(split_from=5, split_to=5),
        View(split_to=UNIT + 1),
        View(split_from=1),
        View(limit=-1),
    ],
)
def test_what_is_no_share_is_refused(view: View) -> None:
    with pytest.raises(ConfigError, match="no shares"):
        check_shares(view)


SHARDS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
ORDERED_VIEWS = st.builds(
    lambda sample, split, limit: View(sample=sample, split_to=split, limit=limit),
    st.integers(UNIT // 4, UNIT),
    st.just(0) | st.integers(UNIT // 4, UNIT),
    st.just(0) | st.integers(1, 20),
)


def dataset(shards: list[list[int]]) -> Manifest:
    rows = [count for shard in shards for count in shard]
    made = [
        Shard(f"s3://b/{i}.arrow", 10_000, f"e{i}", len(shard), Region(0, 0), False)
        for i, shard in enumerate(shards)
    ]
    numbers = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    return Manifest(
        ("s3://b/",), "arrow", b"", made, numbers.astype(np.int32), np.array(rows),  # type: ignore[arg-type]
        np.arange(len(rows)) * 100, np.full(len(rows), 100), np.full(len(rows), 100),
    )  # fmt: skip


def stored(whole: Manifest, of_view: Manifest, view: View) -> list[list[tuple[int, int]]]:
    """(shard, row) of each row of each block of the view, as workers find them."""
    words, first = shard_words(whole.shards.urls), first_rows(whole)
    assert of_view.kept is not None
    found = []
    for block, kept in enumerate(of_view.kept.tolist()):
        shard, begin = whole.block_shard.item(kept), first.item(kept)
        mask = chosen(view, words.item(shard), begin, whole.block_rows.item(kept))
        rows = (begin + np.flatnonzero(mask)).tolist()[: of_view.block_rows.item(block)]
        assert len(rows) == of_view.block_rows.item(block)
        found.append([(shard, row) for row in rows])
    return found


@settings(max_examples=80)
@given(SHARDS, ORDERED_VIEWS, st.data())
def test_a_view_is_read_once_and_alike_on_any_number_of_ranks(
    shards: list[list[int]], view: View, data: st.DataObject
) -> None:
    whole = dataset(shards)
    counts = limited(shared_counts(whole, view), view.limit)
    expected = [
        (shard, row)
        for shard, rows in enumerate(shards)
        for row in range(sum(rows))
        if plain.is_in_shares(whole.shards.urls[shard].rpartition("/")[2] if len(shards) > 1
                              else "0.arrow", row, view.sample, 0, view.split_to)
    ][: view.limit or None]  # fmt: skip
    assert int(counts.sum()) == len(expected)
    if not expected:
        return
    of_view = whole.viewed(counts)
    rows = stored(whole, of_view, view)
    assert [row for block in rows for row in block] == expected
    shape = (data.draw(st.integers(0, 9)), True, data.draw(st.integers(1, 3)), 4)
    order = Order(of_view.block_rows, *shape, data.draw(st.integers(0, 2)))
    blocks, places = order.locate(np.arange(order.sample_count))
    epoch = [rows[b][p] for b, p in zip(blocks.tolist(), places.tolist(), strict=True)]
    assert sorted(epoch) == expected
    batch, cursor = data.draw(st.integers(4, 9)), data.draw(st.integers(0, len(expected) - 1))
    for size in (1, 2, 3, 4):
        read: dict[int, tuple[int, int]] = {}
        for rank in range(size):
            own = Slice(EpochSteps(order.sample_count, cursor, batch, End.RAGGED, size), rank)
            for step in range(own.step_count):
                for at in own.positions(step).tolist():
                    read[at] = epoch[at]
        assert [read[at] for at in sorted(read)] == epoch[cursor:]
