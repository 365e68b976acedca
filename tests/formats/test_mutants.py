"""A few mutants of each format; tests/foreign.py reads thousands, and other writers' files."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from foreign_read import FAULTS, verdict

_COUNT = 36


@pytest.mark.parametrize("kind", mutants.WHOLE)
def test_a_damaged_shard_is_refused_or_has_the_values_that_other_readers_find(
    kind: str, tmp_path: Path
) -> None:
    whole = mutants.write_whole(tmp_path, kind)
    results = []
    for name, path in whole.items():
        assert verdict(path, mutants.FORMATS[kind], path) == ("equal", "")
        changed = path.with_suffix(".mutant")
        count = _COUNT // len(whole)
        for content in mutants.mutants(path.read_bytes(), kind, name, count, seed=0):
            changed.write_bytes(content)
            results.append((name, *verdict(changed, mutants.FORMATS[kind], path)))
    assert len(results) == _COUNT
    assert not [result for result in results if result[1] in FAULTS]
    assert any(word.startswith("refused") for _, word, _ in results)


def test_the_comparison_sees_one_value_that_differs(tmp_path: Path) -> None:
    path = mutants.write_whole(tmp_path, "jsonl")["plain"]
    changed = tmp_path / "changed"
    changed.write_bytes(path.read_bytes().replace(b'"id": 7,', b'"id": 8,'))
    assert verdict(changed, "jsonl", path) == ("equal", "")  # as Python's json reads it
    records = mutants.write_whole(tmp_path, "tfrecord")["plain"]
    written = records.with_suffix(".written")
    written.write_text(written.read_text().replace('"id": 7,', '"id": 8,'))
    assert verdict(records, "tfrecord")[0] == "DIFFERS"
