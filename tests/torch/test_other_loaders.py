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
