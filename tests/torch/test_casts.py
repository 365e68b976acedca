"""Columns in another type than the stored one, over a node: what an embedding takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, Pack, Ragged, Source
from shards import arrow_bytes, parquet_bytes

from dataplane.model.errors import ConfigError, SpecMismatch

pytestmark = pytest.mark.usefixtures("shared_node")

LISTS = [[], [1], [2, 65_535, 4], [5, 6], None, [10, 11]]
FIXED = [[3 * row, 3 * row + 1, 65_535] for row in range(6)]
ROWS = pa.table(
    {
        "tokens": pa.array(LISTS, pa.list_(pa.uint16())),
        "vector": pa.array(FIXED, pa.list_(pa.uint16(), 3)),
        "id": pa.array(range(6), pa.uint32()),
        "text": [f"text {row}" for row in range(6)],
    }
)
INT64 = {"tokens": torch.int64, "vector": "int64"}


def doubled(columns: dict[str, pa.Array]) -> dict[str, pa.Array]:
    """A map."""
    return {"twice": pc.multiply(columns["id"], 2).cast(pa.uint16())}


@pytest.fixture(params=["parquet", "arrow"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    content = {
        "parquet": lambda: parquet_bytes(ROWS, row_group_size=4),
        "arrow": lambda: arrow_bytes(ROWS, rows=4),  # uncompressed: read in place without a cast
    }[request.param]()
    path = tmp_path / f"rows.{request.param}"
    path.write_bytes(content)
    return str(path)


def test_an_embedding_takes_lists_of_uint16_once_they_are_converted(url: str) -> None:
    embedding = torch.nn.Embedding(1 << 16, 2)
    lists = [row or [] for row in LISTS]
    with DataLoader(url, 3, columns=["tokens", "vector"]) as loader:
        stored = list(loader)
        assert {batch[name].dtype for batch in stored for name in INT64} == {torch.uint16}
        with pytest.raises(RuntimeError, match="UInt16"):
            embedding(stored[0]["vector"])
        state = loader.state_dict()
    # Both jobs at once, so that their blocks are in memory together.
    with (
        DataLoader(url, 3, dtype=INT64, pad_value={"tokens": 65_000}) as loader,
        DataLoader(url, 3, dtype={"tokens": "float32"}, lists="ragged") as others,
    ):
        for at, (batch, other) in enumerate(zip(loader, others, strict=True)):
            rows = slice(3 * at, 3 * at + 3)
            width = max(map(len, lists[rows]))
            padded = [[*row, *[65_000] * (width - len(row))] for row in lists[rows]]
            assert batch["tokens"].dtype == batch["vector"].dtype == torch.int64
            assert batch["tokens"].tolist() == padded
            assert batch["vector"].tolist() == FIXED[rows]
            assert batch["id"].dtype == torch.uint32
            assert embedding(batch["tokens"]).shape == (3, width, 2)
            assert embedding(batch["vector"]).shape == (3, 3, 2)
            assert isinstance(other["tokens"], Ragged)
            assert other["tokens"].values.dtype == torch.float32
            assert other["tokens"].values.tolist() == [float(n) for row in lists[rows] for n in row]
            assert other["vector"].dtype == torch.uint16
        assert loader.schema["tokens"].described == "int64 [B, T]"
        assert loader.schema["tokens"].stored_type.endswith(": uint16>")
        with pytest.raises(SpecMismatch, match="dtype: not given in the state"):
            loader.load_state_dict(state)


def test_rows_that_are_packed_side_by_side_are_converted_too(tmp_path: Path) -> None:
    numbers = {f"c{at}": np.arange(at, 64 + at, dtype=np.uint16) for at in range(6)}
    path = tmp_path / "rows.arrow"
    path.write_bytes(arrow_bytes(pa.table(numbers), rows=16))
    dtypes = {"c1": "int64", "c2": "float32", "c5": "uint8"}
    with DataLoader(str(path), 8, shuffle=True, dtype=dtypes) as loader:
        batches = list(loader)
    rows = torch.cat([torch.stack([b[f"c{at}"].long() for at in range(6)], 1) for b in batches])
    assert sorted(rows.tolist()) == [[first + at for at in range(6)] for first in range(64)]
    assert [batches[0][f"c{at}"].dtype for at in range(6)] == [
        torch.uint16, torch.int64, torch.float32, torch.uint16, torch.uint16, torch.uint8,
    ]  # fmt: skip


def test_columns_of_maps_and_codes_are_converted_and_packs_have_an_option_of_their_own(
    url: str,
) -> None:
    with DataLoader(url, 6, map=doubled, dtype={"twice": "int32"}) as loader:
        (batch,) = loader
    assert batch["twice"].dtype == torch.int32
    assert batch["twice"].tolist() == [0, 2, 4, 6, 8, 10]
    options = {"codes": ["text"], "columns": ["text"], "dtype": {"text": "int16"}}
    with DataLoader(url, 6, **options) as loader:
        (batch,) = loader
    assert batch["text"].dtype == torch.int16
    assert batch["text"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match=r"dtype=.* with pack=.* pass Pack\(…, dtype=…\)"):
        DataLoader(url, 1, pack=Pack("tokens", 8), dtype={"tokens": "int64"})


def test_sources_of_different_types_become_equal(tmp_path: Path) -> None:
    for name, kind in (("a", pa.uint16()), ("b", pa.int64())):
        table = pa.table({"tokens": pa.array([[1, 2], [3]] * 4, pa.list_(kind))})
        (tmp_path / f"{name}.parquet").write_bytes(parquet_bytes(table))
    mixture = Mixture({name: Source(tmp_path / f"{name}.parquet", weight=1) for name in "ab"})
    with DataLoader(mixture, 4) as loader, pytest.raises(ConfigError, match="different columns"):
        len(loader)
    with DataLoader(mixture, 4, dtype={"tokens": "int32"}) as loader:
        assert {batch["tokens"].dtype for batch in loader} == {torch.int32}


def test_a_number_that_does_not_fit_ends_the_run_with_column_number_and_shard(url: str) -> None:
    suffix = Path(url).suffix
    said = rf"rows\{suffix}: a list of its block has 65535 in column 'tokens', which int16 cannot"
    with (
        DataLoader(url, 3, dtype={"tokens": "int16"}) as loader,
        pytest.raises(ConfigError, match=said),
    ):
        list(loader)
    with (
        DataLoader(url, 3, dtype={"token": "int64"}) as loader,
        pytest.raises(ConfigError, match=r"dtype names 'token'.* did you mean 'tokens'"),
    ):
        len(loader)
