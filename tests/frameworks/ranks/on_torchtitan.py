"""The ranks of a world that torchtitan divides, one after the other; prints their places."""

import json
import logging
import sys
import warnings
from dataclasses import asdict

import torch.distributed
from dataplane_torch import Topology
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataplane.model.errors import ConfigError

warnings.filterwarnings("ignore")
logging.disable()
from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: E402 - it logs and warns

SIZES = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 1, "ep": 1}


def place(mesh):
    try:
        return asdict(Topology.auto(device_mesh=mesh))
    except ConfigError as error:
        return str(error)


found = {}
for backend in ("partial_dtensor", "full_dtensor", "spmd_types"):
    ranks = found[backend] = []
    for rank in range(16):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        dims = ParallelDims(**SIZES, world_size=16, spmd_backend=backend)
        dims.build_mesh()
        meshes = dims.get_all_one_dimensional_meshes()
        told = {name: place(mesh) for name, mesh in meshes.items()}
        if backend != "partial_dtensor":
            told["both"] = place(dims.get_mesh(["dp_replicate", "dp_shard"]))
        ranks.append(told)
        torch.distributed.destroy_process_group()
json.dump(found, sys.stdout)
