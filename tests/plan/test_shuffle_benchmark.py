"""The table in docs/order.md is what `benchmarks/plans.py shuffle` prints."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from dataplane.plan.defaults import BlockSizes, shuffle_of
from dataplane.plan.quality import quality

ROOT = Path(__file__).resolve().parents[2]
_NAME = "shuffle_benchmark"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(_NAME, ROOT / "benchmarks" / "plans.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = found
    try:
        spec.loader.exec_module(found)
        yield found
    finally:
        del sys.modules[_NAME]


@pytest.fixture(scope="module")
def rows():
    """The cells of the page's table, by dataset."""
    text = (ROOT / "docs" / "order.md").read_text()
    table = text.split("| dataset | lanes |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: rest for name, *rest in cells}


def test_the_page_has_the_defaults_of_every_dataset(script, rows):
    assert list(rows) == [shape.name for shape in script.SHAPES]
    for shape in script.SHAPES:
        counts = np.full(shape.blocks, shape.rows)
        found = shuffle_of(BlockSizes.of(counts, counts * shape.sample_bytes))
        expected = [f"{each:,}" for each in (found.lanes, found.window, found.ramp)]
        assert rows[shape.name][:3] == expected


@pytest.mark.parametrize("at", [0, 1, 2, 4, 8])
def test_datasets_of_few_blocks_shuffle_as_the_page_says(script, rows, at):
    shape = script.SHAPES[at]
    found = script.figures(shape, 12)
    assert found.missed == ()
    entropy, epoch_0, first, _, *rest = rows[shape.name][3:]
    assert float(entropy.rstrip("%")) == pytest.approx(100 * found.entropy, abs=1.5)
    assert float(epoch_0.rstrip("%")) == pytest.approx(100 * found.entropy_of_epoch_0, abs=2)
    assert first == f"{found.entropy_first:.1%}"
    cells = script.row_of(found).strip("| ").split(" | ")
    assert cells[8:] == rest


def test_the_plan_shows_the_entropy_that_the_page_has(rows, script):
    for shape in script.SHAPES:
        counts = np.full(shape.blocks, shape.rows)
        sizes = BlockSizes.of(counts, counts * shape.sample_bytes)
        shuffle = shuffle_of(sizes)
        later = replace(shuffle, ramp=0)
        for one, cell in zip((later, shuffle), rows[shape.name][3:5], strict=True):
            expected = min(float(cell.rstrip("%")) / 100, 1)
            assert quality(sizes, one, 256) == pytest.approx(expected, abs=0.025)


def test_reads_are_those_of_the_ranks_of_each_host(script):
    order = script.Order(np.full(50, 20), 7, True, 12, 30, 1)
    block, _ = order.locate(np.arange(1000))
    host = np.arange(1000) % 16 // 8
    pairs = len(np.unique(block * 2 + host))
    assert script.reads_of(order, 2) == pairs / 50
