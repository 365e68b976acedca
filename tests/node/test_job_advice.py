"""Which rank of a job tells its user what, when the job opens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.records import Topology, View
from dataplane.node.jobs import _advice
from dataplane.plan.defaults import GIB, BlockSizes
from dataplane.transforms.images import image_specs
from dataplane.transforms.steps.registry import RandomHorizontalFlip, RandomResizedCrop, Resize

# 1.28 million photographs in blocks of 1,000: with one lane, whose window is 1.4 blocks, batches
# come from few blocks, and every host reads all of them.
PHOTOS = BlockSizes(1_280_000, 1280, 1000, 110_000_000, 110_000, 1000)
SPEC = JobSpec("f", shuffle=True, lanes=1, window=1440, global_batch=256)
SOURCES = tuple(SourceSpec(name, "f", 1 << 31, window=1440) for name in ("web", "code"))
MIXTURE = JobSpec(
    "f", shuffle=True, lanes=1, window=1440, global_batch=256, mixture=MixtureSpec(SOURCES)
)
HOSTS = 4
URLS = ("s3://bucket/a.parquet", "s3://bucket/b.parquet")


def told(spec: JobSpec, rank: int, arena_bytes: int = 4 * GIB) -> tuple[str, ...]:
    count = 1 if spec.mixture is None else len(spec.mixture.sources)
    stored = PHOTOS.dataset_bytes
    opened = SimpleNamespace(
        sizes=PHOTOS, stored_bytes=stored, packing=None, view=View(), folders="",
        manifest=SimpleNamespace(
            sample_count=PHOTOS.samples, urls=URLS, shards=SimpleNamespace(urls=URLS), schema=b"",
        ),
    )  # fmt: skip
    dataset = SimpleNamespace(kept_bytes=stored)
    job: Any = SimpleNamespace(
        opened=(opened,) * count, datasets=(dataset,) * count, sample_count=count * PHOTOS.samples
    )
    place = Topology(
        dp_rank=rank, dp_size=8 * HOSTS, rank=rank, world_size=8 * HOSTS,
        local_rank=rank % 8, local_world_size=8,
    )  # fmt: skip
    member: Any = SimpleNamespace(spec=spec, request=SimpleNamespace(topology=place))
    return _advice(job, member, arena_bytes)


@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dataset", "mixture"])
def test_one_rank_tells_of_the_job_and_one_a_host_of_its_memory(spec: JobSpec) -> None:
    (of_job,) = told(spec, 0)
    assert "come from about" in of_job
    assert f"each of {HOSTS} hosts reads about" in of_job
    assert f"{HOSTS}.0 times its share" in of_job
    small = GIB // 8
    (whole,) = told(spec, 0, small)
    others, (memory,), same_host = (told(spec, rank, small) for rank in (7, 8, 9))
    assert others == same_host == ()
    for said in (whole, memory):
        assert "its block arena has 128.0 MiB" in said
        assert said.count("raise block_arena_bytes to") == 1
    assert "come from about" in whole
    assert "come from about" not in memory
    assert told(spec, 1) == ()


@pytest.mark.parametrize("spec", [SPEC, MIXTURE], ids=["dataset", "mixture"])
def test_what_is_not_shuffled_needs_no_advice(spec: JobSpec) -> None:
    assert told(replace(spec, shuffle=False), 0, 1) == ()


def test_masks_beside_pictures_are_told_of_and_single_pictures_are_not() -> None:
    crop, flip, still = (
        [RandomResizedCrop(8)],
        [Resize((8, 8)), RandomHorizontalFlip()],
        [Resize((8, 8))],
    )

    def of(**transforms: Any) -> tuple[str, ...]:
        spec = replace(SPEC, shuffle=False, transforms=image_specs(transforms))
        assert told(spec, 1) == ()
        return told(spec, 0)

    (both,) = of(jpg=crop, png=flip)
    assert "columns jpg and png independently" in both
    assert "map=" in both
    (mask,) = of(jpg=crop, **{"seg.png": still})
    assert "column 'seg.png'" in mask
    (beside,) = of(jpg=crop, png=still)
    assert "column 'png'" in beside
    assert of(jpg=crop) == of(png=crop) == of(left=still, labelled_photo=still) == ()
