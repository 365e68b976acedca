"""Hosts of one job must make the same pixels, and a run that resumes says if they changed."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import CenterCrop, DataLoader
from fleet import Service
from kernels import without
from pictures import drawn, encoded
from PIL import Image
from plan.plain import substitute
from small_nodes import alone

from dataplane.base.build_kernels import PIXELS, compile_library
from dataplane.cli import run
from dataplane.model.errors import SpecMismatch
from dataplane.transforms.pixels_library import load, maker

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--block-arena-bytes", "16MiB", "--worker-count", "1")
CROP = {"jpg": [CenterCrop(16)]}


@contextmanager
def serving(folder: Path, *arguments: str, **environ: str) -> Iterator[str]:
    """The address that `dataplane serve` printed when it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dataplane", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,  # Python looks there first
        env=os.environ | {"DATAPLANE_STATE_DIR": str(folder / "state")} | environ,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            line = process.stdout.readline()
            if not line.startswith("ready: "):
                pytest.fail(f"{line}{process.stderr.read()}")
            yield line.split()[-1]
        finally:
            process.kill()
            process.wait()


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
    pictures: str, without_libjpeg: Path, tmp_path: Path
) -> None:
    services = [f"host-{name}-{os.getpid()}:7077" for name in "ab"]
    ranks = [
        {"service": service, "dp_rank": rank, "dp_size": 2, "name": f"job-{os.getpid()}"}
        for rank, service in enumerate(services)
    ]
    with (
        serving(tmp_path, "--coordinator", "--listen", "127.0.0.1:0") as address,
        serving(tmp_path, "--node", "--join", address, "--service", services[0], *SMALL),
        serving(
            tmp_path, "--node", "--join", address, "--service", services[1], *SMALL,
            PYTHONPATH=str(without_libjpeg),
        ),
    ):  # fmt: skip
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


ROWS, GROUP, SEED = 40, 10, 5
BAD = {3, 17, 18}
OPTIONS: dict[str, Any] = {
    "name": "j", "shuffle": True, "seed": SEED, "transforms": {"jpg": [CenterCrop(8)]},
    "bad_images": "replace",
}  # fmt: skip


def test_the_ledger_names_each_row_once_and_no_row_that_was_taken_out_stands_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = io.BytesIO()
    Image.fromarray(np.full((12, 12, 3), 99, np.uint8)).save(sink, "JPEG")
    images = [b"none" if row in BAD else sink.getvalue() for row in range(ROWS)]
    table = pa.table({"id": range(ROWS), "jpg": pa.array(images, pa.binary())})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=GROUP)
    first = {row: stand_in(row) for row in BAD}
    name = f"quarantine-{os.getpid()}:7077"
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DATAPLANE_SERVICE", name)
    with Service("--listen", "127.0.0.1:0", "--service", name, "--worker-count", "1") as service:

        def command(*arguments: str) -> Any:
            capsys.readouterr()
            assert run([*arguments, "--join", service.address, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        with DataLoader(str(path), 8, **OPTIONS) as loader:
            before = [*ids(loader), *ids(loader)]
        assert {*range(ROWS)} - {*before} == BAD
        assert sorted(before) == sorted(2 * [first.get(row, row) for row in range(ROWS)])
        while (shown := command("ledger", "show", "j"))[-1]["kind"] != "end":
            threading.Event().wait(0.05)
        found = [one for one in shown if one["kind"] == "quarantine"]
        rows = [row for one in found for row in one["payload"]["rows"]]
        assert {row["row"]: row["instead"] for row in rows} == first
        assert len(rows) == len(BAD)
        assert {row["url"] for row in rows} == {path.as_uri()}
        assert all("4 bytes" in row["reason"] for row in rows)
        assert command("ledger", "verify", "j")["ok"]

        gone = first[3]
        command("tombstone", "j", "--row", f"0:{gone}")
        with DataLoader(str(path), 8, **OPTIONS) as loader:
            after = ids(loader)
        assert gone not in after
        assert sorted(after) == sorted(
            stand_in(row, gone) if row in {*BAD, gone} else row for row in range(ROWS)
        )


def stand_in(row: int, *gone: int) -> int:
    """What stands for a row that is bad or gone. A row that is gone has a stand-in that may be bad,
    which then has its own.
    """
    block = row // GROUP * GROUP
    taken = {one - block for one in gone if one // GROUP == row // GROUP}
    if row in gone:
        row = block + substitute(SEED, 0, row, GROUP, taken)
        if row not in BAD:
            return row
    bad = {one - block for one in BAD if one // GROUP == row // GROUP}
    return block + substitute(SEED, 0, row, GROUP, bad | taken)


def ids(loader: Any) -> list[int]:
    return [one for batch in loader for one in batch["id"].tolist()]


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
