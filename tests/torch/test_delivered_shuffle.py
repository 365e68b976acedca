"""How well the default order mixes what a loader delivers: not the plan, but batches of real shards."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from small_nodes import alone

LABELS, BATCH, BATCHES = 100, 256, 40


def entropy(labels: np.ndarray) -> float:
    """In bits."""
    share = np.bincount(labels) / len(labels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


@pytest.fixture
def sorted_by_label(tmp_path: Path) -> str:
    """Two million rows of 4,000 bytes, in blocks of 500, sorted by label. The files have the bytes of a
    block's rows once, so they are small; what a block decodes to is what counts for the order.
    """
    rows, files = 2_000_000, 10
    each = rows // files
    for number in range(files):
        labels = (np.arange(each) + number * each) // (rows // LABELS)
        same = pa.DictionaryArray.from_arrays(np.zeros(each, np.int32), [b"x" * 4000])
        table = pa.table({"label": labels.astype(np.int8), "bytes": same})
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table, path, row_group_size=500, store_schema=False)
    return str(tmp_path)


def test_batches_of_the_default_order_are_mixed_like_those_of_a_permutation(
    sorted_by_label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch)
    perfect = np.random.default_rng(0).integers(0, LABELS, (1000, BATCH))
    best = np.mean([entropy(one) for one in perfect])
    assert delivered(sorted_by_label) >= 0.95 * best
    with pytest.warns(UserWarning, match="of a batch come from about 2 of 4,000 blocks"):
        assert delivered(sorted_by_label, lanes=1, window=1000) < 0.5 * best


def delivered(url: str, **order: int) -> float:
    """The mean entropy of the labels of some batches."""
    with DataLoader(url, BATCH, shuffle=True, columns=["label"], **order) as loader:
        loader.set_epoch(1)  # the first one begins with shorter windows
        found = [batch["label"].numpy() for batch in itertools.islice(loader, BATCHES)]
    assert [len(one) for one in found] == [BATCH] * BATCHES
    return float(np.mean([entropy(one) for one in found]))
