"""Raw files of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shards import MemoryShard, read_rows

from dataplane.formats import registry
from dataplane.index.indexing import index_dataset
from dataplane.model.errors import ConfigError, CorruptShard

ENDED = registry.by_name("tokens:uint16,end=9")


def written(*ids: int) -> bytes:
    return np.array(ids, "<u2").tobytes()


def documents(*ids: int) -> list[list[int]]:
    return [row["tokens"] for row in read_rows(ENDED, written(*ids))]


def test_each_document_ends_with_its_end_token() -> None:
    assert documents(1, 2, 9, 9, 3, 9) == [[1, 2, 9], [9], [3, 9]]


def test_ids_after_the_last_end_token_are_a_document() -> None:
    assert documents(1, 9, 2, 3) == [[1, 9], [2, 3]]


def test_documents_longer_than_a_block_are_whole() -> None:
    ids = np.ones(7_000_000, "<u2")
    ids[[2_500_000, 6_000_000]] = 9
    index = ENDED.index(MemoryShard(ids.tobytes()))
    assert [(b.rows, b.place.length) for b in index.blocks] == [
        (1, 5_000_002),
        (1, 7_000_000),
        (1, 1_999_998),
    ]


def test_rows_of_equal_length_leave_out_the_rest() -> None:
    format_ = registry.by_name("tokens:uint16,length=2")
    assert read_rows(format_, written(1, 2, 3, 4, 5)) == [{"tokens": [1, 2]}, {"tokens": [3, 4]}]


def test_a_row_may_have_more_ids_than_there_are_tokens() -> None:
    assert (
        registry.by_name("tokens:uint8,length=1000").index(MemoryShard(bytes(2500))).blocks[0].rows
        == 2
    )


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        "uint16",
        "float32,end=1",
        "uint16,end=70000",
        "uint16,length=0",
        "uint16,end",
        "uint16,x=1",
    ],
)
def test_an_incomplete_name_is_refused(parameters: str) -> None:
    with pytest.raises(ConfigError, match=r"does not say how to read tokens.*uint16,end=50256"):
        registry.by_name(f"tokens:{parameters}")


def test_a_file_of_an_odd_size_is_refused() -> None:
    with pytest.raises(CorruptShard, match="a multiple of 2 bytes, found 7 bytes"):
        ENDED.index(MemoryShard(bytes(7)))


def test_in_a_folder_only_token_files_are_shards(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(written(1, 9))
    (tmp_path / "meta.pkl").write_bytes(b"x")
    (tmp_path / "README").write_bytes(b"x")
    manifest = index_dataset(tmp_path, format_name=ENDED.name)
    assert [url.rpartition("/")[2] for url in manifest.shards.urls] == ["train.bin"]
    (tmp_path / "meta.pkl").unlink()
    with pytest.raises(ConfigError, match='pass format="tokens:uint16,end=50256"'):
        index_dataset(tmp_path)
