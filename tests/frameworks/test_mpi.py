"""A real MPI launcher, where there is one: `pip install mpich` or `impi-rt` brings it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_nodes import alone_and_small

COUNT, SIZE = 50, 3
SCRIPT = Path(__file__).parent / "ranks" / "on_mpi.py"
# Open MPI refuses to start more ranks than processors, or anything for root, without these.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}  # fmt: skip
pytestmark = pytest.mark.slow


def launcher() -> str:
    """The mpirun of this environment, as the wheels mpich and impi-rt have it, or of this host."""
    own = Path(sys.executable).parent
    found = shutil.which("mpirun", path=f"{own}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("there is no mpirun")
    return found


def test_the_ranks_of_mpirun_share_an_epoch_and_a_node(tmp_path, monkeypatch) -> None:
    mpirun = launcher()
    alone_and_small(monkeypatch, tmp_path)
    pq.write_table(pa.table({"id": range(COUNT)}), tmp_path / "rows.parquet", row_group_size=10)
    command = [mpirun, "-n", str(SIZE), sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*command, str(tmp_path / "rows.parquet"), str(tmp_path)],
        env={**os.environ, **ALLOWED, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE)]
    assert [one["dp_rank"] for one in ranks] == [*range(SIZE)]
    assert {one["dp_size"] for one in ranks} == {SIZE}
    assert [one["local"] for one in ranks] == [[rank, SIZE] for rank in range(SIZE)]
    names = {one["source"].partition(":")[0] for one in ranks}
    assert names <= {"PMI", "Open MPI"}
    assert sorted(i for one in ranks for i in one["ids"]) == list(range(COUNT))
