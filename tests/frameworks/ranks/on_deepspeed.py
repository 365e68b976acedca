"""The ranks of a world that DeepSpeed divides in three ways, one after the other; prints their
places, by the way.
"""

import contextlib
import json
import os
import sys
import warnings
from dataclasses import asdict

import torch.distributed
from dataplane_torch import Topology
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")
with contextlib.redirect_stdout(sys.stderr):
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

SIZE = 8
found = {"pipeline": [], "sequence": [], "tensor": []}


def world(rank):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE), LOCAL_RANK=str(rank))
    deepspeed.init_distributed("gloo", verbose=False)
    assert Topology.auto().dp_size == SIZE, "DeepSpeed divides nothing yet"


def leave():
    groups._release_process_group_references()
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None


with contextlib.redirect_stdout(sys.stderr):
    for rank in range(SIZE):
        world(rank)
        # As the engine of a PipelineModule does.
        groups.mpu = PipelineParallelGrid(PipeModelDataParallelTopology(2, 2, 2))
        found["pipeline"].append(asdict(Topology.auto()))
        leave()
        world(rank)
        parallel_state_sp.initialize_sequence_parallel(4)
        found["sequence"].append(asdict(Topology.auto()))
        groups.mpu = parallel_state_sp  # as deepspeed.initialize(mpu=) does
        assert asdict(Topology.auto()) == found["sequence"][-1]
        leave()
        world(rank)
        # As the engine does with tensor_parallel.autotp_size in its configuration.
        groups._init_tp_mesh_device(2)
        groups.mpu = groups
        found["tensor"].append(asdict(Topology.auto()))
        leave()
json.dump(found, sys.stdout)
