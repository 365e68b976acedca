"""Files of other loaders, read by DataLoader as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dataplane_torch import DataLoader, Pack
from sample_files import litdata_bytes, litdata_index, mds_bytes, megatron_bytes
from servers import S3Server, reach
from shards import npy_bytes


@pytest.mark.usefixtures("shared_node")
def test_rows_of_an_array_come_in_its_order(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32).reshape(50, 3, 4)
    np.save(tmp_path / "a.npy", array)
    with DataLoader(tmp_path / "a.npy", 20) as loader:
        assert (
            np.concatenate([batch["array"].numpy() for batch in loader]).tolist() == array.tolist()
        )


@pytest.mark.usefixtures("shared_node")
def test_documents_of_a_token_file_are_packed(tmp_path: Path) -> None:
    ids = np.concatenate([[*range(1, 2 + n % 6), 0] for n in range(200)]).astype("<u2")
    ids.tofile(tmp_path / "train.bin")
    pack = Pack("tokens", length=16, dtype="int64")
    with DataLoader(
        tmp_path / "train.bin", 4, shuffle=True, format="tokens:uint16,end=0", pack=pack
    ) as loader:
        batches = list(loader)
    assert all(batch["tokens"].shape == (4, 16) for batch in batches[:-1])
    assert sum(int((batch["tokens"] == 1).sum()) for batch in batches) == 200


@pytest.mark.usefixtures("shared_node")
def test_a_folder_of_mosaicml_comes_in_its_order(data_dir: Path) -> None:
    with DataLoader(data_dir / "mds", 100, columns=["id"]) as loader:
        ids = np.concatenate([batch["id"].numpy() for batch in loader])
    assert ids.tolist() == list(range(len(ids)))


@pytest.mark.usefixtures("shared_node")
def test_columns_of_a_text_table_are_read_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,price,text\n" + "".join(f"{n},{n / 4},x\n" for n in range(50))
    )
    columns = {"id": "int64", "price": "float32", "text": None}
    with DataLoader(tmp_path / "a.csv", 50, columns=columns) as loader:
        batch = next(iter(loader))
    assert batch["price"].tolist() == [n / 4 for n in range(50)]
    assert batch["id"].tolist() == [*range(50)]
    assert batch["text"] == ["x"] * 50


@pytest.mark.usefixtures("shared_node")
def test_shards_of_litdata_come_in_the_order_of_their_index(tmp_path: Path) -> None:
    kinds, files = {"id": "int", "tokens": "no_header_tensor:18"}, [f"{n}.bin" for n in range(11)]
    for n, file in enumerate(files):
        rows = [{"id": 5 * n + m, "tokens": np.arange(m)} for m in range(5)]
        (tmp_path / file).write_bytes(litdata_bytes(kinds, rows))
    (tmp_path / "index.json").write_bytes(litdata_index(kinds, files))
    with DataLoader(tmp_path, 5) as loader:
        batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == [
        [*range(n, n + 5)] for n in range(0, 55, 5)
    ]
    assert batches[0]["tokens.length"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("shared_node")
def test_documents_of_megatron_come_in_their_order_and_are_packed(tmp_path: Path) -> None:
    given = [np.arange(1 + n % 7, dtype="<u2") + n % 50 for n in range(300)]
    tokens, table = megatron_bytes(given)
    (tmp_path / "text_document.bin").write_bytes(tokens)
    (tmp_path / "text_document.idx").write_bytes(table)
    rows = []
    with DataLoader(tmp_path / "text_document.bin", 100) as loader:
        for batch in loader:
            pairs = zip(batch["tokens"].tolist(), batch["tokens.length"].tolist(), strict=True)
            rows += [tokens[:length] for tokens, length in pairs]
    assert rows == [document.tolist() for document in given]
    with DataLoader(tmp_path, 4, pack=Pack("tokens", length=16, dtype="int64")) as loader:
        packed = sum(int(batch["tokens"].sum()) for batch in loader)
    assert packed == sum(int(document.sum()) for document in given)


@pytest.mark.usefixtures("own_node")
def test_a_bucket_is_read_as_a_folder_is(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(s3_server, monkeypatch)
    rows = [{"id": n} for n in range(40)]
    tokens, table = megatron_bytes([np.array([row["id"]], "<i8") for row in rows])
    bucket = s3_server.bucket()
    objects = {
        "npy/a.npy": npy_bytes(np.arange(40)),
        "csv/a.csv": b"id\n" + b"".join(b"%d\n" % n for n in range(40)),
        "mds/a.mds": mds_bytes({"id": "int"}, rows),
        "litdata/a.bin": litdata_bytes({"id": "int"}, rows),
        "litdata/index.json": litdata_index({"id": "int"}, ["a.bin"]),
        "megatron/a.bin": tokens,
        "megatron/a.idx": table,
    }
    s3_server.put(bucket, objects)
    for name, column in {
        **dict.fromkeys(("csv", "mds", "litdata"), "id"), "npy": "array", "megatron": "tokens"
    }.items():  # fmt: skip
        with DataLoader(f"s3://{bucket}/{name}/", 40, columns={column: "int64"}) as loader:
            [batch] = loader
        assert batch[column].flatten().tolist() == [*range(40)], name
