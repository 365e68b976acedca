"""The size of slots: exact for images, an estimate for the other columns."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataplane.index.indexing import index_dataset
from dataplane.model.config import JobSpec
from dataplane.model.records import ColumnOptions
from dataplane.node.dataset import dataset_of
from dataplane.node.delivery import slab_sizes
from dataplane.transforms.images import image_specs
from dataplane.transforms.steps.registry import CenterCrop, ToDtype

STORED = 6000
SIDE = 64
ROWS = 32


@pytest.fixture
def url(tmp_path: Path) -> str:
    table = pa.table(
        {
            "jpg": [bytes(STORED)] * 100,
            "label": list(range(100)),
            "name": ["some name"] * 100,
            "mask": [bytes(STORED)] * 100,
        }
    )
    pq.write_table(table, tmp_path / "0.parquet", compression="none", use_dictionary=False)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("columns", "beside", "most"),
    [
        (("jpg", "label"), 8, 1.01),
        (("jpg", "label", "name"), 8 + 12, 1.2),
        (("jpg", "label", "name", "mask"), 8 + 12 + STORED, 1.35),
    ],
)
def test_a_slot_has_room_for_images_and_all_other_columns(url, columns, beside, most) -> None:
    manifest = index_dataset(url)
    for dtype, size in (("uint8", 1), ("bfloat16", 2), ("float32", 4)):
        images = image_specs({"jpg": [CenterCrop(SIDE), ToDtype(dtype)]})
        spec = JobSpec(
            manifest.fingerprint,
            global_batch=2 * ROWS,
            column_options=ColumnOptions(columns),
            transforms=images,
        )
        sizes = slab_sizes(dataset_of(1, manifest, spec), spec, dp_size=2, slab_bytes=1 << 10)
        assert sizes.batches == 1
        needed = ROWS * (SIDE * SIDE * 3 * size + beside)
        assert needed <= sizes.slot_bytes <= needed * most
        large = slab_sizes(dataset_of(1, manifest, spec), spec, dp_size=2, slab_bytes=needed * 10)
        assert 6 <= large.batches <= 10
