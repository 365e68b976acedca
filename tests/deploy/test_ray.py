"""dataplane.ray and its example on a local Ray.

pip install 'ray[data,train,tune]', then: pytest -m slow tests/deploy/test_ray.py
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataplane_torch import DataLoader
from PIL import Image

pytest.importorskip("ray", reason="needs ray[data,train,tune]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
SMALL = {
    "DATAPLANE_BLOCK_ARENA_BYTES": "16MiB",
    "DATAPLANE_WORKER_COUNT": "1",
    "DATAPLANE_INSECURE": "true",
}
BATCH = 12
NODES = """
import glob, os, signal, sys, tempfile
import ray
from dataplane.model.errors import ConfigError
from dataplane.ray import start_nodes
from dataplane.rpc import local
from dataplane.rpc.address import served_name

url, *environ = sys.argv[1:]
environ = dict(pair.split("=", 1) for pair in environ)
ray.init(num_cpus=2, include_dashboard=False)
try:
    start_nodes(environ={name: environ[name] for name in environ if "INSECURE" not in name})
except ConfigError as error:
    assert "the coordinator is not ready: error: " in str(error), error
    assert "--insecure" in str(error), error
else:
    raise AssertionError("plain text beyond this host needs a setting")

@ray.remote
def total(service):
    from dataplane_torch import DataLoader
    with DataLoader(url, 12, service=service) as loader:
        return sum(batch["id"].sum().item() for batch in loader)

nodes = start_nodes(environ=environ)
coordinator, actor = nodes._actors.values()
def works():
    assert ray.get(total.remote(nodes.service)) == sum(range(300))
    return local.holder_of(served_name(os.getuid(), nodes.service))[0]

nodes.start_missing()
assert [coordinator, actor] == [*nodes._actors.values()]
first = works()
os.kill(first, signal.SIGKILL)
second = works()
ray.kill(actor, no_restart=False)
third = works()
assert len({first, second, third}) == 3
assert glob.glob(f"{tempfile.gettempdir()}/dataplane-ray-*")
nodes.close()
nodes.close()
assert not glob.glob(f"{tempfile.gettempdir()}/dataplane-ray-*")
for pid in (first, second, third):
    assert not os.path.exists(f"/proc/{pid}"), pid
print("works")
"""

PACK = """
import sys
import ray
from dataplane.pack import pack_shards
from dataplane.ray import pack_with_ray
from dataplane.settings import default_node_config

ray.init(num_cpus=2, include_dashboard=False)
url, dest = sys.argv[1:]
manifest, parts = pack_shards([url], dest, default_node_config(), shard_bytes=1000, run=pack_with_ray)
print("parts", len(parts), "rows", manifest.sample_count)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": range(300)}), tmp_path / "rows.parquet", row_group_size=50)
    return str(tmp_path / "rows.parquet")


def run(folder: Path, *command: str) -> str:
    # Short, since Ray puts sockets there.
    with tempfile.TemporaryDirectory(prefix="r") as short:
        environ = {
            **os.environ, "RAY_TMPDIR": short, "TMPDIR": short, "HOME": short,
            "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command], env=environ, cwd=folder, capture_output=True, text=True,
            check=False, timeout=330,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def test_a_node_on_each_host_is_started_again_whether_it_or_its_actor_dies(tmp_path, url):
    environ = [f"{name}={value}" for name, value in SMALL.items()]
    assert "works" in run(tmp_path, "-c", NODES, url, *environ)


def test_ray_data_packs_the_rows_of_a_dataset_in_order(tmp_path, url):
    assert "parts 6 rows 300" in run(tmp_path, "-c", PACK, url, str(tmp_path / "packed"))
    assert pq.read_table(tmp_path / "packed")["id"].to_pylist() == [*range(300)]


def test_the_example_goes_on_with_fewer_workers(tmp_path, url):
    environ = [f"{name}={value}" for name, value in SMALL.items()]
    for workers, steps in ((2, 40), (1, 70)):
        printed = run(
            tmp_path, str(EXAMPLES / "ray_train.py"), url, "--workers", str(workers), "--steps", str(steps),
            "--storage", str(tmp_path / "store"), "--every", "10", "--global-batch", str(BATCH),
            "--record", str(tmp_path / "ids"), "--environ", *environ,
        )  # fmt: skip
        assert f"steps={steps}" in printed
    rows: dict[int, list[int]] = {}
    for path in tmp_path.glob("ids-*"):
        for line in path.read_text().splitlines():
            step, _, ids = line.partition(" ")
            rows.setdefault(int(step), []).extend(json.loads(ids))
    expected: list[list[int]] = []
    with DataLoader(url, global_batch_size=BATCH, shuffle=True, seed=7) as whole:
        while len(expected) < 70:
            expected += [sorted(batch["id"].tolist()) for batch in whole]
    assert {step: sorted(ids) for step, ids in rows.items()} == dict(enumerate(expected[:70], 1))


def test_trials_of_tune_share_the_decode_of_what_ray_data_has_converted(tmp_path):
    chance, shards = np.random.default_rng(0), tmp_path / "shards"
    for number in range(96):
        jpeg = io.BytesIO()
        Image.fromarray(chance.integers(0, 256, (480, 640, 3), np.uint8)).save(jpeg, "JPEG")
        path = tmp_path / "photos" / str(number % 3) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg.getvalue())
    printed = run(
        tmp_path, str(EXAMPLES / "ray_tune.py"), str(tmp_path / "photos"), str(shards),
        "--storage", str(tmp_path / "results"), "--cpus", "0.25", "--environ",
        *(f"{name}={value}" for name, value in (SMALL | {"DATAPLANE_BLOCK_ARENA_BYTES": "256MiB"}).items()),
    )  # fmt: skip
    trials = [json.loads(line) for line in printed.splitlines() if line.startswith('{"lr"')]
    assert [trial["rows"] for trial in trials] == [96] * 4
    assert len({trial["loss"] for trial in trials}) == 4
    labels = pq.read_table(shards, columns=["label"])["label"].to_pylist()
    assert sorted(labels) == [0] * 32 + [1] * 32 + [2] * 32
