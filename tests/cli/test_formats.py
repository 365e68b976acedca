"""`dataplane formats`, and a format of another package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
READ = """
import json, sys
from dataplane.cli import run
from dataplane.index.indexing import index_dataset
status = run(["formats", "--json"])
manifest = index_dataset(sys.argv[1])
print(json.dumps([status, manifest.format, manifest.sample_count]))
"""


def test_the_format_of_the_page_is_listed_and_read_when_a_package_has_it(tmp_path: Path) -> None:
    code = re.search(
        r"^```python test\n(import pyarrow.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert code is not None
    (tmp_path / "lines.py").write_text(code[1])
    info = tmp_path / "lines_format-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dataplane.formats]\nlines = lines:Lines\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    made = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "a.txt"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    listed, _, last = made.stdout.rstrip().rpartition("\n")
    assert json.loads(last) == [0, "lines", 2]
    formats = {entry["name"]: entry for entry in json.loads(listed)}
    assert formats["lines"]["package"] == "lines-format"
    assert formats["mds"]["suffixes"] == [".mds.zstd", ".mds.zst", ".mds.gz", ".mds"]
    assert "index.json" in formats["litdata"]["needs"]
