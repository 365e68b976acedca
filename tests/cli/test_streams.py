"""What becomes of a command whose output goes nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from shards import parquet_bytes

from dataplane.commands import output
from dataplane.plan.manifest import Manifest


def said(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command through a shell that redirects its streams."""
    command = [sys.executable, "-P", "-m", "dataplane", *words]
    return subprocess.run(
        ["/bin/sh", "-c", f'"$@" {script}', "sh", *command],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "0.parquet").write_bytes(parquet_bytes(pa.table({"id": range(9)})))
    return folder


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_command_does_its_work_with_closed_streams(shards, closed, form) -> None:
    found = said(closed, shards, "index", str(shards), "-o", "whole.manifest", *form)
    assert (found.returncode, found.stdout) == (output.EXIT_OK, "")
    assert "bug" not in found.stderr
    content = (shards / "whole.manifest").read_bytes()
    assert Manifest.from_bytes(content, "whole.manifest").sample_count == 9


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_output_that_cannot_be_written_is_no_bug(shards, form) -> None:
    found = said("> /dev/full", shards, "inspect", str(shards), *form)
    assert found.returncode == output.EXIT_NOT_WRITTEN
    assert found.stderr.splitlines() == [
        "error: the output cannot be written: No space left on device"
    ]
