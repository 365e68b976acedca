"""Files of other loaders, read by DataLoader as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dataplane_torch import DataLoader, Pack
from sample_files import litdata_bytes, litdata_index


def test_rows_of_an_array_come_in_its_order(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32).reshape(50, 3, 4)
    np.save(tmp_path / "a.npy", array)
    with DataLoader(tmp_path / "a.npy", 20) as loader:
        assert (
            np.concatenate([batch["array"].numpy() for batch in loader]).tolist() == array.tolist()
        )


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


def test_a_folder_of_mosaicml_comes_in_its_order(data_dir: Path) -> None:
    with DataLoader(data_dir / "mds", 100) as loader:
        ids = np.concatenate([batch["id"].numpy() for batch in loader])
    assert ids.tolist() == list(range(len(ids)))


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
