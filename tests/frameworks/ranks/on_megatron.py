"""The ranks of a world that Megatron-Core divides, one after the other; prints their places."""

import json
import sys
import warnings
from dataclasses import asdict

import torch.distributed
from dataplane_torch import Topology
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")
from megatron.core import parallel_state  # noqa: E402 - it warns when it is imported

found = []
for rank in range(16):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
    assert Topology.auto().dp_size == 16, "parallel_state is not initialised yet"
    parallel_state.initialize_model_parallel(
        2, 2, context_parallel_size=2, create_gloo_process_groups=False
    )
    tp = parallel_state.get_tensor_model_parallel_rank()
    found.append(asdict(Topology.auto()) | {"tp_rank": tp})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
json.dump(found, sys.stdout)
