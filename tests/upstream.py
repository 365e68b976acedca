"""The suites of others, with our DataLoader in the place of theirs.

    python tests/upstream.py [--pytorch CHECKOUT] [--torchdata CHECKOUT] [pytest arguments …]

PyTorch's test/test_dataloader.py, and test/stateful_dataloader/ of torchdata, run unchanged: what
they import as torch.utils.data.DataLoader, or as StatefulDataLoader, is dataplane_torch.DataLoader.
The tests in EXCEPTIONS are left out; docs/datasets.md gives the same list. They need the packages
expecttest and parameterized, and take about twenty minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_LAYOUT = "reads the layout of torchdata's state, which is its own"

EXCEPTIONS: dict[str, str] = {
    "TestInitialState_shard0::test_initial_state": _LAYOUT,
    "TestInitialState_shard0::test_load_state_after_initial_state_dict": _LAYOUT,
    "TestDynamicStateIterableDataset_shard0::test": _LAYOUT,
    "TestDatasetIteratorStateDuplication_shard0::test": _LAYOUT,
    "TestSingleIterCalled_shard0::test_inline": _LAYOUT,
    "TestSingleIterCalled_shard0::test_inline_iter": _LAYOUT,
    "TestSingleIterCalled_shard0::test_mp": _LAYOUT,
    "TestSingleIterCalled_shard0::test_mp_iter": _LAYOUT,
    "TestOutOfOrderWithCheckpointing::test_out_of_order_iterable_ds_no_completed_workers": _LAYOUT,
    "TestOutOfOrderWithCheckpointing::test_out_of_order_iterable_ds_one_completed_worker": _LAYOUT,
    "TestNumWorkersMismatch_shard3::test_num_workers_mismatch": (
        "wants an AssertionError from iter(): load_state_dict() raises ConfigError, and only for "
        "datasets that have a state"
    ),
    "TestInitialState_shard0::test_init_error": (
        "wants worker_init_fn's error from iter(): it comes with the first batch, as torch's does"
    ),
}

# Before a test file is imported: it gets ours, whatever it calls it.
_CONFTEST = """
import torch.utils.data
from dataplane_torch import DataLoader
{torchdata}
torch.utils.data.DataLoader = DataLoader
"""
_TORCHDATA = """
import torchdata.stateful_dataloader
torchdata.stateful_dataloader.StatefulDataLoader = DataLoader
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch, of the version in use")
    parser.add_argument("--torchdata", type=Path, help="a checkout of torchdata")
    given, arguments = parser.parse_known_args()
    if given.pytorch is None and given.torchdata is None:
        parser.error("name a checkout: --pytorch, --torchdata, or both")
    for package in ("expecttest", "parameterized"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"the suites need {package}: pip install {package}")
    status = 0
    if given.pytorch is not None:
        status |= _run([given.pytorch / "test" / "test_dataloader.py"], None, arguments)
    if given.torchdata is not None:
        files = sorted((given.torchdata / "test" / "stateful_dataloader").glob("test_*.py"))
        status |= _run(files, given.torchdata, arguments)
    return status


def _run(files: list[Path], torchdata: Path | None, arguments: list[str]) -> int:
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        sys.exit(f"upstream.py: not a checkout: {', '.join(missing) or torchdata} is not there")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        conftest = _CONFTEST.format(torchdata="" if torchdata is None else _TORCHDATA)
        Path(folder, "conftest.py").write_text(conftest)
        left_out = [f"--deselect={file.name}::{name}" for file in files for name in EXCEPTIONS]
        paths = [os.environ.get("PYTHONPATH"), None if torchdata is None else str(torchdata)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]
        return subprocess.call([*command, *left_out, *arguments], cwd=folder, env=environ)


if __name__ == "__main__":
    sys.exit(main())
