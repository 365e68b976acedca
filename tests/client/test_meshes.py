"""Batch axes of a mesh: which axes they are, and the rank along all of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.meshes import BATCH_AXES, OTHER_AXES, SEQUENCE_AXES, STAGE_AXES, mesh_topology
from dataplane.model.errors import ConfigError


@dataclass(frozen=True)
class AMesh:
    """What is read of torch's; test_layouts.py reads torch's own."""

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self):
        return self.coordinate


def place(names, shape, at, axes=None, *, size=None, whole=None):
    mesh = AMesh(names and tuple(names.split()), shape, at)
    count = 1
    for extent in shape:
        count *= extent
    found = mesh_topology(mesh, axes, rank=7, world_size=size or count, whole=whole)
    assert (found.rank, found.world_size) == (7, size or count)
    return found


def test_batch_axes_are_joined_and_others_left_out() -> None:
    found = place("pp dp_replicate dp_shard cp tp", (2, 2, 3, 2, 4), (1, 1, 2, 0, 3))
    assert (found.dp_rank, found.dp_size) == (5, 6)
    assert (found.pp_rank, found.pp_size, found.cp_rank, found.cp_size) == (1, 2, 0, 2)
    assert found.source == (
        "DeviceMesh(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=4), "
        "batch axes: dp_replicate, dp_shard"
    )
    assert place("tp", (4,), (2,)).dp_size == 1
    assert place("dp", (4,), (2,), size=8).dp_size == 4


@given(st.data())
def test_every_batch_rank_occurs_once_for_each_place_along_the_other_axes(data) -> None:
    pool = sorted(BATCH_AXES | SEQUENCE_AXES | STAGE_AXES | OTHER_AXES)
    names = data.draw(st.lists(st.sampled_from(pool), min_size=1, max_size=4, unique=True))
    shape = tuple(data.draw(st.integers(1, 3)) for _ in names)
    seen = [place(" ".join(names), shape, at) for at in itertools.product(*map(range, shape))]
    size = seen[0].dp_size
    counts = [sum(one.dp_rank == rank for one in seen) for rank in range(size)]
    assert counts == [len(seen) // size] * size


@pytest.mark.parametrize("name", ["fsdp_cp", "dp_cp", "dp_shard_cp", "x", "loss"])
def test_a_name_that_may_be_either_is_refused_with_what_to_pass(name) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=2.*batch_axes=\['dp_replicate'\]") as caught:
        place(f"dp_replicate {name}", (2, 2), (0, 0))
    assert caught.value.field == "batch_axes"
    assert place(f"dp_replicate {name}", (2, 1), (1, 0)).dp_size == 2  # nobody lies along it
    found = place(f"dp_replicate {name}", (2, 2), (1, 1), ["dp_replicate", name])
    assert (found.dp_rank, found.dp_size) == (3, 4)


def test_axes_without_names_have_numbers() -> None:
    with pytest.raises(ConfigError, match="axis 0"):
        place(None, (2, 2), (0, 1))
    assert place(None, (2, 2), (0, 1), [1]).dp_rank == 1
    assert place(None, (2, 2), (1, 0), ["axis 0"]).dp_rank == 1
    assert place("dp tp", (2, 2), (1, 0), "dp").dp_rank == 1
    for wrong in (["pp"], [2], [-1], [True], [1.0]):
        with pytest.raises(ConfigError, match="is no axis of DeviceMesh"):
            place("dp tp", (2, 2), (1, 0), wrong)


def test_a_part_of_a_mesh_that_lacks_a_batch_axis_is_refused() -> None:
    whole = AMesh(("dp_replicate", "dp_shard", "tp"), (2, 2, 2), (0, 1, 0))
    with pytest.raises(ConfigError, match="lacks the batch axis 'dp_replicate'"):
        place("dp_shard tp", (2, 2), (1, 0), size=8, whole=whole)
    with pytest.raises(ConfigError, match=r"lacks every batch axis, and covers 2 of 8 ranks"):
        place("tp", (2,), (1,), size=8)
    assert place("dp_shard", (2,), (1,), ["dp_shard"], size=8, whole=whole).dp_size == 2
    # flattened: its name is not one of the whole mesh's
    assert place("dp", (4,), (3,), size=8, whole=whole).dp_size == 4
    with pytest.raises(ConfigError, match="rank 7 is not in DeviceMesh"):
        place("dp", (4,), None, size=8)
