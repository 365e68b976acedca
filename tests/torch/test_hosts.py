"""Hosts of one job must make the same pixels, and a run that resumes says if they changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import CenterCrop, DataLoader
from fleet import Service
from kernels import without
from pictures import drawn, encoded

from dataplane.base.build_kernels import PIXELS, compile_library
from dataplane.model.errors import SpecMismatch
from dataplane.transforms.pixels_library import load, maker

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
CROP = {"jpg": [CenterCrop(16)]}


@pytest.fixture
def pictures(tmp_path: Path) -> str:
    table = pa.table({"jpg": pa.array([encoded(drawn(24, 32, seed=i)) for i in range(12)])})
    pq.write_table(table, tmp_path / "pictures.parquet")
    return str(tmp_path / "pictures.parquet")


@pytest.fixture
def without_libjpeg(tmp_path: Path) -> Path:
    """Where Python finds a Dataplane that was installed where libjpeg's headers are missing."""
    if maker().missing or shutil.which("cc") is None:
        without("no C compiler, or no headers of libjpeg-turbo")
    ignored = shutil.ignore_patterns("libpixels.so", "__pycache__")
    shutil.copytree(ROOT / "dataplane", tmp_path / "other" / "dataplane", ignore=ignored)
    compile_library(PIXELS, tmp_path / "other", is_whole=False)
    return tmp_path / "other"


@pytest.mark.usefixtures("small_node")
def test_a_host_without_libjpeg_is_refused_by_a_job_that_began_with_it(
    pictures: str, without_libjpeg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    services = [f"host-{name}-{os.getpid()}:7077" for name in "ab"]
    ranks = [
        {"service": service, "dp_rank": rank, "dp_size": 2, "name": f"job-{os.getpid()}"}
        for rank, service in enumerate(services)
    ]

    def node(service: str, *within: str) -> Service:
        joins = ("--node", "--join", coordinator.address, "--service", service)
        return Service(*joins, *SMALL, within=within)

    with (
        Service("--coordinator", "--listen", "127.0.0.1:0") as coordinator,
        node(services[0]),
        # Python looks first where it is started.
        node(services[1], "env", "-C", str(without_libjpeg)),
    ):
        with DataLoader(pictures, 2, transforms=CROP, **ranks[0]) as first:
            assert len(first) == 3
            with (
                DataLoader(pictures, 2, transforms=CROP, **ranks[1]) as second,
                pytest.raises(SpecMismatch, match="libjpeg-dev") as caught,
            ):
                len(second)
            assert caught.value.field == "pixels"
            assert caught.value.expected == maker().name
            sources = without_libjpeg / PIXELS.sources
            assert caught.value.found == load(without_libjpeg / PIXELS.path, sources).name
        # It may run jobs without images, and other jobs.
        with (
            DataLoader(pictures, 2, columns=["jpg"], **ranks[0]) as first,
            DataLoader(pictures, 2, columns=["jpg"], **ranks[1]) as second,
        ):
            assert len(first) == len(second) == 3
        # Another name: the leave of rank 0 may still be on its way from the other host.
        other = ranks[1] | {"name": f"other-{os.getpid()}"}
        with DataLoader(pictures, 2, transforms=CROP, **other) as second:
            assert len(list(second)) == 3


def test_a_resumed_run_is_warned_if_other_software_makes_its_pixels(fake) -> None:
    fake(pixels="Pillow 12.2.0 ()")
    with DataLoader("/data", 10) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader("/data", 10) as loader:
        loader.load_state_dict(state)
    fake(pixels="Pillow 13.0.0 ()")
    with DataLoader("/data", 10) as loader:
        with pytest.warns(UserWarning, match=r"12\.2\.0.*13\.0\.0"):
            loader.load_state_dict(state)
        assert len(list(loader)) == 9
