"""The user's own samples: copied as they are, and as source shards of what every loader can take."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_bench.model import CROP, ColumnType, Workload, WorkloadColumn, leaves
from dataplane_bench.trial.checksum import BatchRefused, Sum, check
from dataplane_bench.workloads import images
from dataplane_bench.workloads.own import own, shared_names
from hypothesis import assume, given
from hypothesis import strategies as st
from servers import reach
from shards import parquet_bytes

from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, CorruptShard, SchemaMismatch, ShardNotFound

ROWS = 1000


def source(workload):
    return pa.concat_tables(
        pq.read_table(path) for path in sorted(workload.source.glob("*.parquet"))
    )


def kinds(workload):
    return {one.name: (str(one.kind), one.dtype, one.shape) for one in workload.columns}


def write(folder, shard_count=4, rows=ROWS, **columns):
    """Shards of a table; every column is a function of the row."""
    folder.mkdir(exist_ok=True)
    for shard in range(shard_count):
        numbers = range(shard * rows, (shard + 1) * rows)
        table = pa.table(
            {"id": pa.array(numbers), **{name: pa.array([of(i) for i in numbers], kind) for name, (kind, of) in columns.items()}}
        )  # fmt: skip
        pq.write_table(table, folder / f"train-{shard}.parquet", row_group_size=300)
    return str(folder)


# --- what becomes of columns ------------------------------------------------------------------


def test_every_value_is_as_dataplane_gives_it(tmp_path):
    day = dt.date(2024, 1, 1)
    folder = write(
        tmp_path / "shards",
        flag=(pa.bool_(), lambda i: i % 3 == 0),
        small=(pa.uint16(), lambda i: i * 7 % 65536),
        half=(pa.float16(), lambda i: np.float16(i % 100)),
        gap=(pa.float32(), lambda i: None if i % 5 == 0 else i / 2),
        day=(pa.date32(), lambda i: day + dt.timedelta(days=i)),
        pair=(pa.list_(pa.int16(), 2), lambda i: [i, -i]),
        grid=(pa.list_(pa.list_(pa.float64(), 2), 3), lambda i: [[i, 0], [0, i], [1, 1]]),
        flags=(pa.list_(pa.bool_()), lambda i: [True] * (i % 4)),
        tokens=(pa.list_(pa.int64()), lambda i: None if i % 11 == 0 else list(range(i % 7))),
        text=(pa.large_string(), lambda i: f"no. {i} é"),
        choice=(pa.dictionary(pa.int8(), pa.string()), lambda i: "ab"[i % 2]),
        meta=(pa.struct([("Wide", pa.int32())]), lambda i: {"Wide": i}),
    )
    workload, notes = own([folder], tmp_path / "own")
    assert notes == ()
    assert kinds(workload) == {
        "id": ("fixed", "int64", ()),
        "flag": ("fixed", "bool", ()),
        "small": ("fixed", "uint16", ()),
        "half": ("fixed", "float16", ()),
        "gap": ("fixed", "float32", ()),
        "day": ("fixed", "int32", ()),
        "pair": ("fixed", "int16", (2,)),
        "grid": ("fixed", "float64", (3, 2)),
        "flags": ("ragged", "bool", ()),
        "tokens": ("ragged", "int64", ()),
        "text": ("string", "", ()),
        "choice": ("string", "", ()),
        "meta_wide": ("fixed", "int32", ()),
    }
    rows = source(workload)
    assert rows.num_rows == workload.sample_count == 4 * ROWS
    assert all(column.null_count == 0 for column in rows.columns)
    row = rows.slice(3005, 1).to_pylist()[0]
    assert np.isnan(row.pop("gap"))
    assert row == {
        "id": 3005, "flag": False, "small": 21035, "half": 5.0, "day": (day - dt.date(1970, 1, 1)).days + 3005,
        "pair": [3005, -3005], "grid": [3005, 0, 0, 3005, 1, 1], "flags": [True], "tokens": [0, 1],
        "text": "no. 3005 é", "choice": "b", "meta_wide": 3005,
    }  # fmt: skip
    assert rows["tokens"][11].as_py() == []
    assert leaves(workload)["meta_wide"] == "meta.Wide"


def test_what_no_loader_can_take_is_left_out_and_named(tmp_path):
    folder = write(
        tmp_path / "shards",
        late=(pa.int32(), lambda i: None if i == 3999 else i),
        text=(pa.string(), lambda i: None if i == 2000 else "x"),
        blob=(pa.binary(), lambda i: b"\x89PNG"),
        words=(pa.list_(pa.string()), lambda i: ["a"]),
        price=(pa.decimal128(9, 2), lambda i: i),
    )
    workload, notes = own([folder], tmp_path / "own")
    assert kinds(workload) == {"id": ("fixed", "int64", ())}
    assert source(workload)["id"].to_pylist() == list(range(4 * ROWS))
    assert {note.split()[1] for note in notes} == {"late", "text", "blob", "words", "price"}
    told = {note.split()[1]: note.partition(": ")[2] for note in notes}
    assert "nulls" in told["late"]
    assert "nulls" in told["text"]
    assert "JPEG" in told["blob"]
    assert "decimal" in told["price"]


def test_every_column_has_a_name_that_files_keys_and_code_can_have():
    names = ["__key__", "image/class/label", "image.bytes", "Image.Bytes", "2d", "größe", "..."]
    assert shared_names(names) == [
        *(
            "key",
            "image_class_label",
            "image_bytes",
            "image_bytes_2",
            "column_2d",
            "gr_e",
            "column",
        ),
    ]


def test_nothing_usable_is_an_error_that_says_why(tmp_path):
    pq.write_table(pa.table({"words": [["a"]], "blob": [b"\x00"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"words.*blob"):
        own([str(tmp_path / "a.parquet")], tmp_path / "own")
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.parametrize("name", ["jpeg-truncated.jpg", "not-an-image.jpg"])
def test_invalid_images_are_left_out(data_dir, tmp_path, name):
    good = next((data_dir / "images").iterdir()).read_bytes()
    bad = (data_dir / "bad" / name).read_bytes()[:3]
    content = parquet_bytes(pa.table({"image": [good, bad], "label": [1, 2]}))
    (tmp_path / "a.parquet").write_bytes(content)
    workload, notes = own([str(tmp_path / "a.parquet")], tmp_path / "own")
    assert [one.name for one in workload.columns] == ["label"]
    assert notes[0].startswith("column image is left out: ")


# --- which shards -----------------------------------------------------------------------------


def test_whole_shards_are_taken_up_to_the_limit_and_one_at_least(tmp_path):
    folder = write(tmp_path / "shards")
    size = sum(path.stat().st_size for path in (tmp_path / "shards").iterdir()) // 4
    half, notes = own([folder], tmp_path / "own", byte_limit=int(2.5 * size))
    assert len(half.urls) == 2
    assert half.sample_count == 2 * ROWS
    assert "of 4 shards" in notes[0]
    one, _ = own([folder], tmp_path / "own", byte_limit=1)
    assert len(one.urls) == 1
    assert one.fingerprint != half.fingerprint


def test_unchanged_shards_are_copied_once_and_changed_ones_again(tmp_path):
    folder = write(tmp_path / "shards", rows=20)
    first, _ = own([folder], tmp_path / "own")
    before = first.source.stat().st_mtime_ns
    again, _ = own([folder], tmp_path / "own")
    assert again == first
    assert again.source.stat().st_mtime_ns == before
    write(tmp_path / "shards", rows=21)
    changed, _ = own([folder], tmp_path / "own")
    assert changed.fingerprint != first.fingerprint
    assert changed.sample_count == 84


def test_a_saved_manifest_stands_for_its_shards(tmp_path):
    folder = write(tmp_path / "shards")
    manifest = index_dataset([folder])
    (tmp_path / "train.manifest").write_bytes(manifest.to_bytes())
    by_name, _ = own([folder], tmp_path / "own")
    saved, _ = own([str(tmp_path / "train.manifest")], tmp_path / "own")
    assert saved == by_name


def test_shards_of_an_object_store_are_copied(s3_server, tmp_path, monkeypatch):
    reach(s3_server, monkeypatch)
    bucket = s3_server.bucket()
    write(tmp_path / "shards", rows=50)
    s3_server.put(
        bucket,
        {f"train/{path.name}": path.read_bytes() for path in (tmp_path / "shards").iterdir()},
    )
    workload, _ = own([f"s3://{bucket}/train/"], tmp_path / "own")
    assert workload.sample_count == 200
    assert source(workload)["id"].to_pylist() == list(range(200))


# --- how they are loaded ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "name", "batch_size"),
    [
        ((pa.list_(pa.int32(), 128), lambda i: [i] * 128), "tokens", 32),
        ((pa.float32(), float), "tabular", 1000),  # a quarter of the samples, instead of 8,192
        ((pa.string(), str), "text", 64),
    ],
)
def test_the_batch_is_as_the_shape_of_samples_asks(tmp_path, column, name, batch_size):
    workload, _ = own([write(tmp_path / "shards", value=column)], tmp_path / "own")
    assert (workload.name, workload.shape, workload.batch_size) == (name, name, batch_size)
    assert workload.step_ms > 0
    chosen, _ = own([str(tmp_path / "shards")], tmp_path / "own", batch_size=7)
    assert chosen == dataclasses.replace(workload, batch_size=7)


def test_a_batch_larger_than_all_samples_is_refused(tmp_path):
    folder = write(tmp_path / "shards", rows=2)
    with pytest.raises(ConfigError, match="--batch-size"):
        own([folder], tmp_path / "own", batch_size=9)


# --- errors -----------------------------------------------------------------------------------


def test_errors_name_the_users_shards(tmp_path):
    with pytest.raises(ShardNotFound, match="nowhere"):
        own([str(tmp_path / "nowhere")], tmp_path / "own")
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    with pytest.raises(ConfigError, match="sample"):
        own([str(tmp_path / "empty.parquet")], tmp_path / "own")
    (tmp_path / "half.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorruptShard) as caught:
        own([str(tmp_path / "half.parquet")], tmp_path / "own")
    assert caught.value.shard == f"file://{tmp_path}/half.parquet"
    assert str(caught.value).startswith(f"file://{tmp_path}/half.parquet")
    folder = write(tmp_path / "shards", rows=5)
    pq.write_table(pa.table({"other": [1]}), tmp_path / "shards" / "train-9.parquet")
    with pytest.raises(SchemaMismatch, match=r"shards/train-9\.parquet"):
        own([folder], tmp_path / "own")
    assert list((tmp_path / "own").iterdir()) == []


def test_an_unwritable_folder_is_reported(tmp_path):
    folder = write(tmp_path / "shards", rows=5)
    (tmp_path / "own").write_text("a file")
    with pytest.raises(ConfigError, match="cannot copy"):
        own([folder], tmp_path / "own")


# --- files of other people's tools ------------------------------------------------------------

ID, TEXT, LABEL = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("text", ColumnType.STRING),
    WorkloadColumn("label", ColumnType.FIXED, "int64"),
)


def test_real_samples_are_those_of_the_file(data_dir, tmp_path):
    lines = (data_dir / "jsonl" / "shakespeare.jsonl").read_text().splitlines()
    workload, _ = own([str(data_dir / "jsonl" / "shakespeare.jsonl")], tmp_path / "own")
    assert source(workload).select(["id", "text"]).to_pylist() == [
        {name: json.loads(line)[name] for name in ("id", "text")} for line in lines
    ]
    images = pq.read_table(data_dir / "parquet" / "images-huggingface.parquet")["image"].to_pylist()
    workload, _ = own([str(data_dir / "parquet" / "images-huggingface.parquet")], tmp_path / "own")
    assert source(workload)["image_bytes"].to_pylist() == [one["bytes"] for one in images]
    with pyarrow.ipc.open_file(data_dir / "arrow" / "tokens-plain.arrow") as file:
        tokens = file.read_all()["input_ids"].to_pylist()
    workload, _ = own([str(data_dir / "arrow" / "tokens-plain.arrow")], tmp_path / "own")
    assert source(workload)["input_ids"].to_pylist() == tokens


COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("weight", ColumnType.FIXED, "float32"),
    WorkloadColumn("pair", ColumnType.FIXED, "int16", (3,)),
    WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    WorkloadColumn("text", ColumnType.STRING),
)

samples = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(1 << 63), (1 << 63) - 1),
            "weight": st.floats(width=32),
            "pair": st.tuples(*[st.integers(-(1 << 15), (1 << 15) - 1)] * 3),
            "tokens": st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5).map(tuple),
            "text": st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
        }
    ),
    min_size=1,
    max_size=12,
)


def workload(columns=COLUMNS, batch_size=64):
    return Workload("mine", columns, batch_size, 100, Path("/nowhere"), "print", 1.0, ("mine",))


def batch_of(rows, width=0):
    """Collate rows as a loader would, padded to `width` at least."""
    lengths = [len(row["tokens"]) for row in rows]
    tokens = np.zeros((len(rows), max([width, *lengths])), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row["tokens"])] = row["tokens"]
    return {
        "id": torch.tensor([row["id"] for row in rows], dtype=torch.int64),
        "weight": torch.tensor([row["weight"] for row in rows], dtype=torch.float32),
        "pair": torch.tensor([row["pair"] for row in rows], dtype=torch.int16).reshape(-1, 3),
        "tokens": torch.from_numpy(tokens),
        "tokens.length": torch.tensor(lengths, dtype=torch.int64),
        "text": [row["text"] for row in rows],
    }


def summed(*batches, of=None):
    total = Sum(of or workload())
    for batch in batches:
        total.add(batch)
    return total


def digest(*batches, of=None):
    return summed(*batches, of=of).digest


def exact(row):
    """Compared by bits, as in the checksum."""
    return (row["id"], np.float32(row["weight"]).tobytes(), row["pair"], row["tokens"], row["text"])


@given(rows=samples, draw=st.data())
def test_batching_does_not_matter_and_order_only_where_it_is_compared(rows, draw):
    shuffled = draw.draw(st.permutations(rows))
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    edges = [0, *cuts, len(rows)]
    parts = [shuffled[a:b] for a, b in itertools.pairwise(edges)]
    width = draw.draw(st.integers(0, 9))
    batched = summed(*(batch_of(part, width) for part in parts))
    assert batched.digest == digest(batch_of(rows))
    assert batched.facts() == summed(batch_of(shuffled)).facts()
    is_moved = [*map(exact, shuffled)] != [*map(exact, rows)]
    assert (batched.facts() != summed(batch_of(rows)).facts()) == is_moved


@given(rows=samples, draw=st.data())
def test_a_changed_missing_or_repeated_sample_is_seen(rows, draw):
    at = draw.draw(st.integers(0, len(rows) - 1))
    other = draw.draw(samples)[0]
    before = digest(batch_of(rows))
    assert digest(batch_of([*rows, rows[at]])) != before
    assert digest(batch_of([*rows[:at], *rows[at + 1 :]])) != before
    assume(exact(other) != exact(rows[at]))
    assert digest(batch_of([*rows[:at], other, *rows[at + 1 :]])) != before


@given(rows=samples, draw=st.data())
def test_a_column_from_another_sample_is_detected(rows, draw):
    name = draw.draw(st.sampled_from(["id", "weight", "pair", "tokens", "text"]))
    moved = [{**row, name: other[name]} for row, other in zip(rows, rows[::-1], strict=True)]
    assume(sorted(map(repr, map(exact, moved))) != sorted(map(repr, map(exact, rows))))
    assert digest(batch_of(moved)) != digest(batch_of(rows))


def changed(**columns):
    rows = [
        {"id": 1, "weight": 0.5, "pair": (1, 2, 3), "tokens": (1, 2), "text": "a"},
        {"id": 2, "weight": 1.5, "pair": (4, 5, 6), "tokens": (3,), "text": "b"},
    ]
    return {**batch_of(rows), **columns}


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (changed(tokens=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)), "pads a list is not 0"),
        (changed(id=torch.tensor([1, 2], dtype=torch.int32)), "id: int32, not int64"),
        (changed(id=torch.tensor([1, 2, 3])), "columns differ in length"),
        (changed(id=np.array([1, 2])), "id: ndarray, not a torch tensor"),
        (changed(pair=torch.zeros((2, 4), dtype=torch.int16)), r"pair: shape \(2, 4\), not"),
        (changed(pair=torch.zeros((2, 1, 3), dtype=torch.int16)), "pair: shape"),
        (changed(weight=torch.zeros(2, dtype=torch.float64)), "weight: float64, not float32"),
        (changed(text=["a", b"b"]), "text: not a list of str"),
        (changed(text=("a", "b")), "text: not a list of str"),
        (changed(**{"tokens.length": torch.tensor([2, 3])}), "lengths of up to 3 in 2 places"),
        (changed(**{"tokens.length": torch.tensor([2])}), "and 1 lengths"),
        (changed(**{"tokens.length": None}), "tokens.length is missing"),
        ({"id": torch.tensor([1])}, "column weight is missing"),
    ],
)
def test_what_the_contract_does_not_say_is_refused(batch, says):
    with pytest.raises(BatchRefused, match=says):
        digest(batch)
    with pytest.raises(BatchRefused, match=says):
        check(batch, workload())


def test_a_batch_has_at_most_as_many_samples_as_requested():
    check(changed(), workload(batch_size=2))
    with pytest.raises(BatchRefused, match="2 samples, not 1"):
        check(changed(), workload(batch_size=1))
    with pytest.raises(BatchRefused, match="0 samples"):
        check(batch_of([]), workload())


def crops(labels, dtype=np.uint8, side=CROP):
    colours = images.colour_of_label(np.array(labels))
    pixels = np.broadcast_to(colours[:, None, None, :], (len(labels), side, side, 3))
    return {
        "id": torch.arange(len(labels)),
        "label": torch.tensor(labels, dtype=torch.int32),
        "image": torch.from_numpy(pixels.astype(dtype)),
    }


def test_generated_images_must_come_with_their_labels():
    made = dataclasses.replace(workload(images.COLUMNS), urls=())
    batch = crops([3, 77, 124])
    turned = crops([124, 77, 3]) | {"id": torch.tensor([2, 1, 0])}
    assert digest(batch, of=made) == digest(turned, of=made)
    for of in (made, workload(images.COLUMNS)):
        digest(batch, of=of)
    mixed = batch | {"image": batch["image"].flip(0)}
    with pytest.raises(BatchRefused, match="colour of label 124, and comes with label 3; so do 2"):
        digest(mixed, of=made)
    # A user's own images may have any colour.
    digest(mixed, of=workload(images.COLUMNS))


@pytest.mark.parametrize("batch", [crops([1], np.float32), crops([1], side=CROP - 1)])
def test_images_have_the_shape_and_type_of_the_contract(batch):
    with pytest.raises(BatchRefused, match="image: "):
        digest(batch, of=workload(images.COLUMNS))
