"""Jobs of one sharing group in separate processes: one node, the same bytes, whichever job dies."""

from __future__ import annotations

import hashlib
import io
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader, RandomResizedCrop, ShardedIterableDataset
from PIL import Image
from warm import WarmProcess, WarmPython

from dataplane.model.errors import ConfigError

COUNT = 48
# Says a hash of each batch, and waits for a word after the first five.
JOB = """
import hashlib, sys
from dataplane_torch import DataLoader, RandomResizedCrop
crop = {"jpg": [RandomResizedCrop(16)]}
loader = DataLoader(sys.argv[1], 4, shuffle=True, transforms=crop, sharing="a group")
for number, batch in enumerate(loader):
    print(hashlib.blake2b(batch["jpg"].numpy().tobytes()).hexdigest(), flush=True)
    batch["jpg"].zero_()
    if number == 4:
        sys.stdin.readline()
"""

pytestmark = pytest.mark.usefixtures("small_node")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    chance, jpegs = np.random.default_rng(1), []
    for _ in range(COUNT):
        sink = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (24, 32, 3), np.uint8)).save(sink, "JPEG")
        jpegs.append(sink.getvalue())
    folder = tmp_path / "shards"
    folder.mkdir()
    pq.write_table(pa.table({"jpg": jpegs}), folder / "0.parquet", row_group_size=8)
    return str(folder)


def job(python: WarmPython, script: Path, shards: str) -> WarmProcess:
    script.write_text(JOB)
    return python.run([str(script), shards], os.environ, sys.stderr.fileno())


def said(process: WarmProcess, count: int) -> list[str]:
    return [process.stdout.readline().strip() for _ in range(count)]


def test_if_the_leader_is_killed_the_other_jobs_still_get_correct_slabs(
    shards: str, tmp_path: Path, warm_torch: WarmPython
) -> None:
    leader, other = (job(warm_torch, tmp_path / f"{name}.py", shards) for name in "ab")
    try:
        first = said(leader, 5)
        assert said(other, 5) == first
        leader.kill()
        leader.wait()
        other.stdin.write("go\n")
        other.stdin.flush()
        rest = other.stdout.read().split()
    finally:
        for each in (leader, other):
            each.kill()
            each.wait()
            each.stdin.close()
            each.stdout.close()
    crop = {"jpg": [RandomResizedCrop(16)]}
    with DataLoader(shards, 4, shuffle=True, transforms=crop) as alone:
        expected = [hashlib.blake2b(batch["jpg"].numpy().tobytes()).hexdigest() for batch in alone]
    assert first + rest == expected
    assert len(first) == 5


@pytest.mark.parametrize("kind", [DataLoader, ShardedIterableDataset])
def test_a_group_has_a_name(shards: str, kind: type) -> None:
    for sharing in ("", "x" * 201, 7):
        with pytest.raises(ConfigError, match="sharing="):
            kind(shards, 4, sharing=sharing)
    with DataLoader(shards, 4, sharing="g") as one, DataLoader(shards, 4) as other:
        assert one.state_dict() == other.state_dict()
