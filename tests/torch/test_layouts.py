"""Topology.auto() over torch's own meshes and groups: one process plays each rank of a world."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch.distributed
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from dataplane_torch import DataLoader, Topology
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dataplane.client.meshes import READERS
from dataplane.client.topology import find_topology
from dataplane.model.errors import ConfigError
from dataplane.rpc.messages import OpenJob


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Become a rank of a world of this size, whose other ranks do not exist."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") or name.startswith(("SLURM", "OMPI")):
            monkeypatch.delenv(name)

    def become(rank: int, size: int) -> None:
        leave()
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    yield become
    leave()


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def test_ranks_of_a_3d_mesh_read_by_their_batch_axis(world) -> None:
    found = []
    for rank in range(8):
        world(rank, 8)
        found.append(Topology.auto(device_mesh=mesh_of(dp=2, pp=2, tp=2)))
    assert [(one.rank, one.world_size) for one in found] == [(rank, 8) for rank in range(8)]
    assert [one.dp_rank for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.pp_rank for one in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert {(one.dp_size, one.pp_size, one.cp_size) for one in found} == {(2, 2, 1)}
    assert found[0].source == "DeviceMesh(dp=2, pp=2, tp=2), batch axes: dp"


def test_a_mesh_that_is_entered_is_found_and_other_meshes_are_not(world) -> None:
    world(5, 8)
    mesh = mesh_of(dp_replicate=2, dp_shard=2, cp=2)
    assert Topology.auto().source == "torch.distributed: rank 5 of 8"
    assert Topology.auto() == Topology(5, 8, 5, 8)
    with mesh:
        found = Topology.auto()
        assert (found.dp_rank, found.dp_size, found.cp_rank, found.cp_size) == (2, 4, 1, 2)
        with mesh["dp_replicate", "dp_shard"]:
            assert Topology.auto().dp_rank == 2
    assert Topology.auto().dp_size == 8


def test_parts_of_meshes_are_compared_with_the_whole(world) -> None:
    world(5, 8)
    mesh = mesh_of(dp_replicate=2, dp_shard=2, tp=2)
    both = mesh["dp_replicate", "dp_shard"]
    assert Topology.auto(device_mesh=both).dp_rank == 2
    assert Topology.auto(device_mesh=both._flatten("dp")).dp_rank == 2
    with pytest.raises(ConfigError, match="lacks the batch axis 'dp_replicate'"):
        Topology.auto(device_mesh=mesh["dp_shard", "tp"])
    with pytest.raises(ConfigError, match="lacks every batch axis"):
        Topology.auto(device_mesh=DeviceMesh("cpu", [[4, 5]], mesh_dim_names=("dummy", "tp"))["tp"])
    with pytest.raises(ConfigError, match="batch_axes"):
        Topology.auto(device_mesh=mesh["dp_shard", "tp"]._flatten("dp_tp"))


def test_views_of_the_world_say_which_of_their_axes_are_for_batches(world) -> None:
    # As torchtitan/distributed/parallel_dims.py makes them.
    world(5, 8)
    whole = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    for_batches = whole._unflatten(0, (2, 2, 2), ("batch", "cp", "tp"))
    dense = whole._unflatten(0, (4, 2), ("fsdp", "tp"))
    assert Topology.auto(device_mesh=for_batches["batch"]).dp_rank == 1
    found = Topology.auto(device_mesh=for_batches)
    assert (found.dp_rank, found.dp_size, found.cp_rank) == (1, 2, 0)
    with pytest.raises(ConfigError, match=r"parallel_dims.get_mesh\('batch'\)"):
        Topology.auto(device_mesh=dense)
    assert Topology.auto(device_mesh=dense, batch_axes=["fsdp"]).dp_rank == 2
    assert Topology.auto(device_mesh=mesh_of(fsdp=4, tp=2)).dp_rank == 2


def test_a_view_of_the_world_with_one_of_two_batch_axes_is_refused(world) -> None:
    """Replicas would read the same samples without a word."""
    world(5, 8)
    whole = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    view = whole._unflatten(0, (2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    for part, other in (
        (view["dp_shard"], "dp_replicate"),
        (view["dp_replicate"], "dp_shard"),
        (view["dp_shard", "tp"], "dp_replicate"),
    ):
        with pytest.raises(ConfigError, match=f"may lie along '{other}'.*get_mesh\\('batch'\\)"):
            Topology.auto(device_mesh=part)
    assert Topology.auto(device_mesh=view["dp_shard"], batch_axes=["dp_shard"]).dp_size == 2
    found = Topology.auto(device_mesh=view["dp_replicate", "dp_shard"])
    assert (found.dp_rank, found.dp_size) == (2, 4)
    assert Topology.auto(device_mesh=view).dp_size == 4
    every = whole._unflatten(0, (1, 8), ("dp_replicate", "dp_shard"))
    assert Topology.auto(device_mesh=every["dp_shard"]).dp_rank == 5, "it has all ranks"


def test_a_loader_takes_its_place_from_the_mesh(world, fake) -> None:
    world(6, 8)
    mesh, node = mesh_of(dp=2, cp=2, tp=2), fake()
    with DataLoader("/data", 5, device_mesh=mesh) as loader:
        len(loader)
    (request,) = [one for one in node.seen if isinstance(one, OpenJob)]
    place = request.topology
    assert (place.dp_rank, place.dp_size, place.rank, place.world_size) == (1, 2, 6, 8)
    assert (place.cp_rank, place.cp_size) == (1, 2)
    assert place.source == "DeviceMesh(dp=2, cp=2, tp=2), batch axes: dp"
    assert request.spec.global_batch == 10


def test_arguments_that_contradict_each_other_are_refused(world) -> None:
    world(0, 2)
    mesh = mesh_of(dp=2)
    for given, said in (
        ({"device_mesh": mesh, "topology": Topology()}, "pass one"),
        ({"batch_axes": ["dp"]}, r"batch_axes=\['dp'\] without a mesh"),
        ({"device_mesh": "dp"}, "pass a torch.distributed.device_mesh.DeviceMesh"),
        ({"topology": (0, 2)}, "pass a dataplane_torch.Topology"),
    ):
        with pytest.raises(ConfigError, match=said):
            DataLoader("/data", **given)


@pytest.fixture
def accelerated(world, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Become a rank of a world with Accelerate's own state."""

    def forget() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    def become(rank: int, size: int, **sizes: int) -> None:
        forget()
        world(rank, size)
        launched = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        others = {"MASTER_ADDR": "localhost", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
        for name, value in {**launched, **others}.items():
            monkeypatch.setenv(name, str(value))
        state = Accelerator(cpu=True).state
        if sizes:  # which it refuses on a CPU; elsewhere it sets these two attributes
            state.parallelism_config = config = ParallelismConfig(**sizes)
            state.device_mesh = config.build_device_mesh("cpu")

    forget()
    yield become
    forget()


def test_accelerate_knows_the_sizes_of_its_axes(accelerated) -> None:
    for rank in range(8):
        accelerated(rank, 8, dp_replicate_size=2, dp_shard_size=2, tp_size=2)
        found = Topology.auto()
        assert found.source == "Accelerate: dp=4 cp=1 tp=2"
        assert (found.rank, found.dp_rank, found.local_rank) == (rank, rank // 2, rank)
        assert found == Topology.auto(device_mesh=AcceleratorState().device_mesh)
        accelerated(rank, 8, dp_shard_size=2, cp_size=4)
        found = Topology.auto()
        assert (found.dp_size, found.cp_rank, found.cp_size) == (2, rank % 4, 4)
        assert found == Topology.auto(device_mesh=AcceleratorState().device_mesh)
    accelerated(3, 8)
    assert (Topology.auto().dp_rank, Topology.auto().dp_size) == (3, 8)
    AcceleratorState().parallelism_config = ParallelismConfig(tp_size=3)
    with pytest.raises(ConfigError, match="8 processes are not a multiple of tp=3"):
        Topology.auto()


def test_horovod_is_asked_for_its_ranks() -> None:
    # A stand-in with the functions of horovod/common/basics.py that are called, which needs MPI or
    # a build with Gloo to import.
    horovod = ModuleType("horovod.torch")
    told = {"is_initialized": True, "rank": 5, "size": 8, "local_rank": 1, "local_size": 4}
    for name, value in told.items():
        setattr(horovod, name, lambda value=value: value)
    found = find_topology({}, modules={"horovod.torch": horovod})
    assert found == Topology(5, 8, 5, 8, 1, 4)
    assert found.source == "Horovod: rank 5 of 8"
    horovod.is_initialized = lambda: False
    assert find_topology({}, modules={"horovod.torch": horovod}) == Topology()
    horovod.is_initialized, horovod.rank = lambda: True, lambda: 1 // 0
    with pytest.raises(ConfigError, match=r"Horovod is initialised, but .*ZeroDivisionError"):
        find_topology({}, modules={"horovod.torch": horovod})


def test_frameworks_are_asked_in_the_order_of_the_docs() -> None:
    order = ["Megatron-Core", "DeepSpeed", "Accelerate", "Horovod", "torch.distributed"]
    assert [name for name, _ in READERS] == order
    horovod, group = ModuleType("horovod.torch"), ModuleType("torch.distributed")
    for module, told in (
        (horovod, {"is_initialized": True, "rank": 1, "size": 2, "local_rank": 0, "local_size": 1}),
        (
            group,
            dict.fromkeys(("is_available", "is_initialized"), True)
            | {"get_rank": 3, "get_world_size": 4},
        ),
    ):
        for name, value in told.items():
            setattr(module, name, lambda value=value: value)
    both = {"horovod.torch": horovod, "torch.distributed": group}
    environ = {"RANK": "5", "WORLD_SIZE": "8"}
    assert find_topology(environ, modules=both).dp_rank == 1
    assert find_topology(environ, modules={"torch.distributed": group}).dp_rank == 3
    assert find_topology(environ, modules={}).dp_rank == 5


def test_no_framework_is_imported_to_ask_it(world) -> None:
    before = set(sys.modules)
    world(0, 2)
    Topology.auto()
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert new.isdisjoint({"accelerate", "deepspeed", "horovod", "lightning", "megatron"})
