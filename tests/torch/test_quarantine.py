"""Rows whose images cannot be decoded, of a job of a service: its ledger names them, and no row that
was taken out of the job stands for one.
"""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import CenterCrop, DataLoader
from fleet import Service
from PIL import Image
from plan.plain import substitute

from dataplane.cli import run

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
