"""A job that reads small blocks in order takes few requests, and gets the same."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from awry import Awry, awry_server
from raw_trainer import Node, Trainer
from shards import arrow_bytes

ROWS, BLOCK_ROWS, SHARDS = 800, 10, 2
ROW_BYTES = 1000


def shard(number: int, form: str) -> bytes:
    chance = np.random.default_rng(number)
    ids = pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())
    table = pa.table({"id": ids, "x": [chance.bytes(ROW_BYTES) for _ in range(ROWS)]})
    if form == "arrow":
        return arrow_bytes(table, rows=BLOCK_ROWS, file=True)
    out = io.BytesIO()
    pq.write_table(
        table, out, row_group_size=BLOCK_ROWS, compression="none", use_dictionary=False,
        write_statistics=False,
    )  # fmt: skip
    return out.getvalue()


def ranges(server: Awry, block_bytes: int) -> list[tuple[int, int]]:
    """What was read of blocks: the first byte, and the one behind the last."""
    found = [re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "") for _, asked in server.seen]
    spans = [(int(each[1]), int(each[2]) + 1) for each in found if each is not None]
    return sorted(span for span in spans if span[0] < block_bytes)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_small_blocks_in_order_are_read_once_in_few_requests(tmp_path: Path, form: str) -> None:
    bodies = {f"bucket/d/{number}.{form}": shard(number, form) for number in range(SHARDS)}
    with (
        awry_server(bodies) as server,
        Node(tmp_path, **server.environment()) as node,
        Trainer(node) as trainer,
    ):
        trainer.open("s3://bucket/d/", global_batch=BLOCK_ROWS, shuffle=False)
        server.be()
        batches = trainer.batches()
    assert [i for ids, _ in batches for i in ids] == [*range(SHARDS * ROWS)]
    for number in range(SHARDS):
        chance = np.random.default_rng(number)
        of_shard = batches[number * ROWS // BLOCK_ROWS :][: ROWS // BLOCK_ROWS]
        for value in (value for _, values in of_shard for value in values):
            assert bytes(value) == chance.bytes(ROW_BYTES)
    spans = ranges(server, ROWS * ROW_BYTES)
    assert len(spans) <= SHARDS * ROWS // BLOCK_ROWS // 4
    assert sum(stop - start for start, stop in spans) < SHARDS * ROWS * (ROW_BYTES + 200)
