from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from manifests import small
from msgspec.structs import replace

from dataplane.model.errors import ConfigError, CorruptShard
from dataplane.model.records import ObjectInfo, Region
from dataplane.plan import columns as column_module
from dataplane.plan.columns import NEVER, UNKNOWN, ColumnPlaces, NullCounts, PlacesPart
from dataplane.plan.manifest import Manifest, sealed, unsealed
from dataplane.plan.shards import IndexedShard
from dataplane.plan.texts import Texts
from dataplane.plan.views import identity_of, relative_names

sizes = st.integers(0, 2**40)
huge = st.integers(0, 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
regions = st.builds(Region, sizes, sizes)


@dataclass(frozen=True)
class Extent:
    rows: int
    place: Region
    decoded_bytes: int
    columns: tuple[int, ...] = ()


extents = st.builds(Extent, st.integers(0, 3), st.builds(Region, huge, huge), huge)
indexed = st.builds(
    IndexedShard,
    st.builds(ObjectInfo, names, sizes, names),
    st.lists(extents, max_size=6),
    regions,
    st.booleans(),
)
filled = st.builds(
    IndexedShard,
    st.builds(ObjectInfo, names, sizes, names),
    st.just([Extent(2, Region(4, 9), 20)]),
    regions,
    st.booleans(),
)
manifests = st.builds(
    lambda urls, name, schema, before, shard, after: Manifest.build(
        urls, name, schema, [*before, shard, *after]
    ),
    st.lists(names, max_size=3),
    names,
    st.binary(max_size=20),
    st.lists(indexed, max_size=4),
    filled,
    st.lists(indexed, max_size=4),
)


@given(manifests)
def test_manifest_survives_its_file(manifest):
    found = Manifest.from_bytes(manifest.to_bytes())
    assert found == manifest
    assert hash(found) == hash(manifest)
    for name in ("urls", "format", "schema", "shards", "sample_count"):
        assert getattr(found, name) == getattr(manifest, name)
    for name in ("shard", "rows", "offset", "length", "decoded"):
        column = getattr(found, f"block_{name}")
        assert column.dtype == (np.int32 if name == "shard" else np.int64)
        assert np.array_equal(column, getattr(manifest, f"block_{name}"))
        assert not column.flags.writeable


@given(st.lists(indexed, max_size=5), filled)
def test_empty_blocks_are_left_out_and_the_others_keep_their_index(shards, last):
    shards = [*shards, last]
    manifest = Manifest.build(["u"], "jsonl", b"", shards)
    expected = [
        (number, index, block)
        for number, shard in enumerate(shards)
        for index, block in enumerate(shard.blocks)
        if block.rows
    ]
    assert manifest.block_count == len(expected)
    assert manifest.sample_count == sum(block.rows for _, _, block in expected)
    for block, (number, index, extent) in enumerate(expected):
        assert manifest.block_shard[block] == number
        assert manifest.block_in_shard(block) == index
        assert manifest.block_offset[block] == extent.place.offset
        assert manifest.block_length[block] == extent.place.length
        assert manifest.block_decoded[block] == extent.decoded_bytes


def test_golden_fingerprint():
    assert small().fingerprint == "85506d8b53162e803af84611cf199e99"


def test_fingerprint_does_not_depend_on_how_the_dataset_is_named():
    assert small(urls=("elsewhere",)) == small()


def test_fingerprint_depends_on_everything_else():
    first, *rest = small().shards
    changes = [
        {"format": "arrow_ipc"},
        {"schema": b"hcs"},
        {"block_rows": np.array([10, 20, 31])},
        {"block_offset": np.array([0, 41, 4])},
        {"block_length": np.array([40, 49, 56])},
        {"block_decoded": np.array([80, 100, 57])},
        {"block_shard": np.array([0, 0, 1]), "shards": (first, *rest[::-1])},
        {"shards": tuple(reversed(small().shards)), "block_shard": np.array([0, 2, 2])},
        *(
            {"shards": (replace(first, **change), *rest)}
            for change in (
                {"url": "s3://b/00"},
                {"size_bytes": 101},
                {"etag": "e00"},
                {"preamble": Region(89, 10)},
                {"preamble": Region(90, 9)},
                {"zero_copy": True},
                {"empty_blocks": ()},
                {"url": "s3://b/0e", "etag": "0"},
            )
        ),
    ]
    made = [small(**change) for change in changes]
    assert len({small(), *made}) == len(changes) + 1


@given(st.data())
def test_a_damaged_file_is_refused(more):
    content = bytearray(small().to_bytes())
    where = more.draw(st.integers(0, len(content) - 1))
    content[where] ^= more.draw(st.integers(1, 255))
    with pytest.raises(CorruptShard) as refused:
        Manifest.from_bytes(bytes(content), "m.manifest")
    assert refused.value.shard == "m.manifest"
    assert "Index the dataset again" in str(refused.value)


def test_a_file_cut_short_is_refused():
    content = small().to_bytes()
    for length in (0, 1, 7, 39, 40, len(content) // 2, len(content) - 1):
        with pytest.raises(CorruptShard, match="truncated"):
            Manifest.from_bytes(content[:length])


def arrow_stream(batch):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def rewritten(change):
    """The small manifest's file with another batch in it, and the right checksum."""
    with pa.ipc.open_stream(unsealed(small().to_bytes(), "m")) as reader:
        batch = reader.read_next_batch()
    return sealed(arrow_stream(change(batch)))


def with_metadata(batch, **change):
    changed = {name.encode(): value for name, value in change.items()}
    return batch.replace_schema_metadata({**batch.schema.metadata, **changed})


def without_fingerprint(batch):
    metadata = dict(batch.schema.metadata)
    del metadata[b"fingerprint"]
    return batch.replace_schema_metadata(metadata)


def with_column(batch, name, values):
    place = batch.schema.get_field_index(name)
    column = pa.array(values, batch.schema.field(name).type)
    return batch.set_column(place, batch.schema.field(name), column)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.replace_schema_metadata(None),
        without_fingerprint,
        lambda batch: with_metadata(batch, fingerprint=b"\xff"),
        lambda batch: batch.drop_columns(["etag"]),
        lambda batch: batch.slice(0, 2),
        lambda batch: with_metadata(batch, format=b"arrow_ipc"),
        lambda batch: with_metadata(batch, format=b"\xff"),
        lambda batch: with_metadata(batch, urls=b"5"),
        lambda batch: with_metadata(batch, urls=b"["),
        lambda batch: with_column(batch, "rows", [[1], [2], [3]]),
        lambda batch: with_column(batch, "size_bytes", [1, None, 3]),
        lambda batch: with_column(batch, "size_bytes", [100, 80, 61]),
    ],
)
def test_a_file_of_another_kind_is_refused(change):
    with pytest.raises(CorruptShard):
        Manifest.from_bytes(rewritten(change))


def test_bytes_that_are_no_arrow_stream_are_refused():
    for body in (b"", b"PAR1", bytes(1000)):
        with pytest.raises(CorruptShard):
            Manifest.from_bytes(sealed(body))


def test_missing_numbers_are_refused():
    def with_holes(batch, name):
        field = batch.schema.field(name)
        column = pa.array([[None, 1], [], [2]], field.type)
        table = batch.set_column(batch.schema.get_field_index(name), field, column)
        return pa.record_batch(table.columns, schema=batch.schema)

    for name in ("rows", "gap", "length", "decoded"):
        with pytest.raises(CorruptShard):
            Manifest.from_bytes(rewritten(lambda batch, name=name: with_holes(batch, name)))


def test_a_file_of_another_version_names_both():
    content = rewritten(lambda batch: with_metadata(batch, **{"dataplane.manifest": b"1"}))
    with pytest.raises(ConfigError, match="version 1") as refused:
        Manifest.from_bytes(content, "m.manifest")
    assert (refused.value.expected, refused.value.found) == (2, "1")


def test_arrow_reads_the_file_as_a_stream():
    with pa.ipc.open_stream(small().to_bytes()) as reader:
        assert reader.read_next_batch().column("url").to_pylist() == [
            shard.url for shard in small().shards
        ]


@pytest.mark.parametrize(
    "change",
    [
        {"block_rows": np.array([10, 0, 30])},
        {"block_rows": np.array([10, -1, 30])},
        {"block_rows": np.array([10, 20])},
        {"block_rows": np.array([10.0, 20.0, 30.0])},
        {"block_rows": np.array([2**62, 2**62, 2**62])},
        {"block_offset": np.array([0, -40, 4])},
        {"block_length": np.array([0, 2**63, 4], np.uint64)},
        {"block_decoded": np.array([[1, 2, 3]])},
        {"block_shard": np.array([0, 2, 0])},
        {"block_shard": np.array([0, 0, 3])},
        {"block_shard": np.array([0, 0, 2**32])},
        {"block_shard": np.array([0, 2, 2])},
        {"shards": ()},
        {"column_places": ColumnPlaces.of([(0, 1, 1)])},
        {"shards": (replace(small().shards[0], size_bytes=-1), *[*small().shards][1:])},
        {"shards": (replace(small().shards[0], size_bytes=2**63), *[*small().shards][1:])},
        {"shards": (replace(small().shards[0], empty_blocks=(2, 1)), *[*small().shards][1:])},
        {"shards": (replace(small().shards[0], url="s3://b/\udcff"), *[*small().shards][1:])},
    ],
)
def test_columns_of_incompatible_types_are_refused(change):
    with pytest.raises(ConfigError):
        small(**change)


@pytest.mark.parametrize(
    "shards",
    [
        [],
        [IndexedShard(ObjectInfo("u", 1, "e"), [], Region(0, 0), False)],
        [IndexedShard(ObjectInfo("u", 1, "e"), [Extent(0, Region(0, 1), 1)], Region(0, 0), True)],
        [IndexedShard(ObjectInfo("u", 1, "e"), [Extent(-3, Region(0, 1), 1)], Region(0, 0), True)],
        [
            IndexedShard(
                ObjectInfo("u", 1, "e"), [Extent(2**70, Region(0, 1), 1)], Region(0, 0), True
            )
        ],
    ],
)
def test_a_dataset_without_samples_is_refused(shards):
    with pytest.raises(ConfigError):
        Manifest.build(["u"], "parquet", b"", shards)


@pytest.mark.parametrize("block", [-1, 3, 2**63])
def test_a_block_that_is_not_there_has_no_index(block):
    with pytest.raises(ConfigError):
        small().block_in_shard(block)


def test_manifest_is_shown_in_one_line():
    assert repr(small()).endswith(": 3 parquet shards, 3 blocks, 60 samples>")


def renamed(manifest, name, **change):
    """The same shards elsewhere; `name` gives the new url of each, by its number."""
    shards = (replace(shard, url=name(i), **change) for i, shard in enumerate(manifest.shards))
    return replace_shards(manifest, tuple(shards))


def replace_shards(manifest, shards):
    columns = ("block_shard", "block_rows", "block_offset", "block_length", "block_decoded")
    return small(shards=shards, **{column: getattr(manifest, column) for column in columns})


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["s3://b/train/0.parquet", "s3://b/train/1.parquet"], ["0.parquet", "1.parquet"]),
        (["file:///data/a/0.tar", "file:///data/b/0.tar"], ["a/0.tar", "b/0.tar"]),
        (["s3://b/train/only.parquet"], ["only.parquet"]),
        (["s3://b/x/part-2", "s3://b/x/part-1", "s3://b/x/y/1"], ["part-2", "part-1", "y/1"]),
        (["s3://one/x/0", "s3://two/x/0"], ["one/x/0", "two/x/0"]),
        (["s3://b/0", "gs://b/0"], ["s3://b/0", "gs://b/0"]),
        (["https://h/a/0?sig=1", "https://h/a/1?sig=/2/"], ["0", "1"]),
        (["s3://b/a?b/0", "s3://b/a?b/1"], ["0", "1"]),
    ],
)
def test_names_begin_below_the_longest_folder_that_all_share(urls, names):
    found = relative_names(Texts.of(urls))
    assert [
        found.content[start:stop].tobytes().decode()
        for start, stop in zip(found.starts, found.stops, strict=True)
    ] == names


def test_golden_identity():
    found = identity_of(small())
    assert found.content == "a9ff96e5404ae3a844561a6b89b6c92f"
    assert found.layout == "dfe7ef56c8798893c9f42bea4d22d2e2"


@pytest.mark.parametrize(
    "name",
    [
        lambda i: f"s3://another-bucket/deeper/{i}",
        lambda i: f"file:///mnt/b/{i}",
        lambda i: f"https://host/b/{i}?X-Amz-Signature={i}",
    ],
)
def test_a_move_changes_no_identity(name):
    moved = renamed(small(), name)
    assert moved.fingerprint != small().fingerprint
    assert identity_of(moved) == identity_of(small())


def test_what_our_code_estimates_is_no_part_of_the_identity():
    guessed = small(block_decoded=np.array([1, 2, 3]))
    shards = tuple(replace(shard, zero_copy=not shard.zero_copy) for shard in small().shards)
    assert identity_of(guessed) == identity_of(small()) == identity_of(small(shards=shards))


def test_a_copy_with_other_etags_keeps_the_layout_alone():
    copied = renamed(small(), lambda i: f"gs://b/{i}", etag="new")
    was, now = identity_of(small()), identity_of(copied)
    assert (was.content != now.content, was.layout) == (True, now.layout)


def test_any_other_difference_is_another_layout():
    first, second, third = small().shards
    changes = [
        {"format": "arrow_ipc"},
        {"schema": b"hcs"},
        {"block_rows": np.array([20, 10, 30])},
        {"block_offset": np.array([0, 41, 4])},
        {"block_length": np.array([40, 49, 56])},
        {"shards": (replace(first, size_bytes=101), second, third)},
        {"shards": (replace(first, url="s3://b/00"), second, third)},
        {"shards": (replace(first, url=second.url), replace(second, url=first.url), third)},
    ]
    made = [identity_of(small(**change)).layout for change in changes]
    assert len({identity_of(small()).layout, *made}) == len(changes) + 1


TWO = [(3, 10, 20, 13, 7, 8), (), (0, 5, 6, 9, 1, 2)]


def places() -> ColumnPlaces:
    found = ColumnPlaces.of(TWO)
    assert found is not None
    return found


def tables(found: ColumnPlaces) -> list[list[list[int]]]:
    """Offset, length and decoded size of each column of all blocks."""
    parts = list(found.parts())
    assert [part.first for part in parts] == np.cumsum([0, *map(part_rows, parts)])[:-1].tolist()
    names = ("offset", "length", "decoded")
    return [np.concatenate([getattr(part, name) for part in parts]).tolist() for name in names]


def part_rows(part: PlacesPart) -> int:
    return len(part.offset)


def test_each_column_has_a_place_a_length_and_what_it_takes_once_decoded() -> None:
    found = places()
    assert (found.block_count, found.column_count) == (3, 2)
    offset, length, decoded = tables(found)
    assert offset == [[3, 13], [0, 0], [0, 9]]
    assert length == [[10, 7], [0, 0], [5, 1]]
    assert decoded == [[20, 8], [0, 0], [6, 2]]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12), st.data())
def test_column_places_survive_encoding(
    blocks: int, columns: int, part_columns: int, data: st.DataObject
) -> None:
    number = st.integers(0, 2**62) | st.integers(0, 9) | st.integers(2**32 - 2, 2**32 + 1)
    numbers = st.lists(number, min_size=3 * columns, max_size=3 * columns)
    drawn = [data.draw(numbers) for _ in range(blocks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_module, "PART_COLUMNS", part_columns)
        first = ColumnPlaces.of(drawn)
        assert first is not None
        again = ColumnPlaces.from_bytes(first.to_bytes())
        assert tables(again) == tables(first) == [[row[at::3] for row in drawn] for at in range(3)]


def test_places_of_equal_blocks_take_no_memory() -> None:
    blocks = [(0, 400_000, 400_000, 400_064, 7_000, 7_000)] * 40_000
    found = ColumnPlaces.of(blocks)
    assert found is not None
    assert len(found.to_bytes()) < 10_000


@pytest.mark.parametrize("cut", [0, 8, 15, 16, 18, 20, 30, -1])
def test_places_that_are_cut_off_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="cut off"):
        ColumnPlaces.from_bytes(places().to_bytes()[:cut])


def test_damaged_places_are_refused() -> None:
    whole = bytearray(places().to_bytes())
    for huge in (0, 1 << 40):
        with pytest.raises(ValueError, match="columns in"):
            ColumnPlaces.from_bytes(huge.to_bytes(8, "little") + whole[8:])
    whole[21:25] = b"\0\0\0\0"
    with pytest.raises(ConfigError, match="damaged"):
        list(ColumnPlaces.from_bytes(whole).parts())


def test_what_is_not_known_or_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ColumnPlaces.of([]) is None
    assert ColumnPlaces.of([(), ()]) is None
    for most, is_kept in ((6, True), (5, False)):
        monkeypatch.setattr(column_module, "PLACES_MAX", most)
        assert (ColumnPlaces.of(TWO) is not None) == is_kept


def check(found: ColumnPlaces | None, lengths: list[int]) -> None:
    assert found is not None
    (part,) = found.parts()
    part.check(np.array(lengths))


def test_columns_lie_within_their_blocks_and_to_their_very_end() -> None:
    check(places(), [20, 0, 10])
    for lengths in ([19, 0, 10], [20, 0, 9]):
        with pytest.raises(ConfigError, match="outside of its block"):
            check(places(), lengths)
    for places_given in ((-1, 5, 0), (0, -1, 0), (0, 5, -1)):
        with pytest.raises(ConfigError, match="outside of its block"):
            check(ColumnPlaces.of([places_given]), [10])
    with pytest.raises(ConfigError, match="different numbers of columns"):
        ColumnPlaces.of([(0, 1, 1), (0, 1, 1, 1, 1, 1)])


@given(st.lists(st.integers(-2, 2**60), min_size=1))
def test_null_counts_come_back_from_their_bytes(told: list[int]) -> None:
    first = NullCounts.of([told, told])
    assert first is not None
    again = NullCounts.from_bytes(first.to_bytes())
    assert again is not None
    assert again.counts.tolist() == first.counts.tolist()
    assert again.shards.tolist() == first.shards.tolist()
    for each in (first.counts, first.shards, again.counts, again.shards):
        assert not each.flags.writeable
    assert NullCounts.from_bytes(b"") is None
    with pytest.raises(ValueError, match="3 numbers"):
        NullCounts.from_bytes(bytes(24))


def test_the_first_shard_with_a_null_is_named_however_few_it_has() -> None:
    found = NullCounts.of([[0, 1, 0, NEVER], [2, 3, 0, NEVER], [1, 0, 0, NEVER]])
    assert found is not None
    assert found.shards.tolist() == [1, 0, -1, -1]
    assert found.counts.tolist() == [3, 4, 0, NEVER]


def test_a_shard_without_statistics_may_have_nulls_anywhere() -> None:
    found = NullCounts.of([[0, 1, NEVER], []])
    assert found is not None
    assert found.shards.tolist() == [-1, 0, -1]
    assert found.counts.tolist() == [UNKNOWN, 1, UNKNOWN]
    assert NullCounts.of([[], []]) is None
