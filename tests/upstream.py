"""The suites of others, with our DataLoader in the place of theirs.

    python tests/upstream.py [--pytorch CHECKOUT] [--torchdata CHECKOUT] [pytest arguments …]

PyTorch's test/test_dataloader.py, and test/stateful_dataloader/ of torchdata, run unchanged: what
they import as torch.utils.data.DataLoader, or as StatefulDataLoader, is dataplane_torch.DataLoader,
in every process that they start, whatever way they start it. The tests in EXCEPTIONS are left out.
The tests need the packages expecttest, parameterized and psutil, and take about twenty minutes.
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
        "expects an AssertionError from iter(): our load_state_dict() raises ConfigError, and "
        "only for datasets that have a state"
    ),
    "TestInitialState_shard0::test_init_error": (
        "expects worker_init_fn's error from iter(): ours comes with the first batch, as torch's "
        "does"
    ),
}

# Every Python that is started with this folder on its path imports this first. Where torch is
# imported, by whom ever, its loader is replaced before anybody can import that.
_SITECUSTOMIZE = """
import importlib.util
import sys


def replace(module, name):
    from dataplane_torch import DataLoader

    setattr(sys.modules[module], name, DataLoader)


def import_ours():
    if "dataplane_torch" not in sys.modules:
        import dataplane_torch


AFTER = {
    "torch": import_ours,
    "dataplane_torch": lambda: replace("torch.utils.data", "DataLoader"),
    "torchdata.stateful_dataloader": (
        lambda: replace("torchdata.stateful_dataloader", "StatefulDataLoader")
    ),
}


class Finder:
    def find_spec(self, name, path=None, target=None):
        if (after := AFTER.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), after())
        return spec


sys.meta_path.insert(0, Finder())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch, of the version in use")
    parser.add_argument("--torchdata", type=Path, help="a checkout of torchdata")
    given, arguments = parser.parse_known_args()
    if given.pytorch is None and given.torchdata is None:
        parser.error("name a checkout: --pytorch, --torchdata, or both")
    for package in ("expecttest", "parameterized", "psutil"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"the suites need {package}: pip install {package}")
    status = 0
    if given.pytorch is not None:
        status |= run([given.pytorch / "test" / "test_dataloader.py"], None, arguments)
    if given.torchdata is not None:
        files = sorted((given.torchdata / "test" / "stateful_dataloader").glob("test_*.py"))
        status |= run(files, given.torchdata, arguments)
    return status


def run(files: list[Path], torchdata: Path | None, arguments: list[str]) -> int:
    """Copies of test files, in processes that have ours: pytest's exit status."""
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        sys.exit(f"upstream.py: not a checkout: {', '.join(missing) or torchdata} is not there")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        left_out = [f"--deselect={file.name}::{name}" for file in files for name in EXCEPTIONS]
        environ = with_ours(Path(folder), torchdata)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore"]
        return subprocess.call([*command, *left_out, *arguments], cwd=folder, env=environ)


def with_ours(folder: Path, torchdata: Path | None = None) -> dict[str, str]:
    """An environment in which every Python has our loader in the place of the others'. The folder
    is to stay, and is on their path.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    paths = [str(folder), str(torchdata or ""), os.environ.get("PYTHONPATH")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_TEST_WITH_SLOW": "1",  # test_proper_exit, for one
    }


if __name__ == "__main__":
    sys.exit(main())
