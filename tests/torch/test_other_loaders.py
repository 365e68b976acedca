"""Files of other loaders, read by DataLoader as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dataplane_torch import DataLoader, Pack


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
