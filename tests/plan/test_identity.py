"""A dataset's identity does not depend on its location."""

from __future__ import annotations

import numpy as np
import pytest
from manifests import small
from msgspec.structs import replace

from dataplane.plan.texts import Texts
from dataplane.plan.views import identity_of, relative_names


def renamed(manifest, name, **change):
    """The same shards elsewhere; `name` gives the new url of each, by its number."""
    shards = (replace(shard, url=name(i), **change) for i, shard in enumerate(manifest.shards))
    return replace_shards(manifest, tuple(shards))


def replace_shards(manifest, shards):
    columns = ("block_shard", "block_rows", "block_offset", "block_length", "block_decoded")
    return small(shards=shards, **{column: getattr(manifest, column) for column in columns})


@pytest.mark.parametrize(
    ("urls", "names"),
    [
        (["s3://b/train/0.parquet", "s3://b/train/1.parquet"], ["0.parquet", "1.parquet"]),
        (["file:///data/a/0.tar", "file:///data/b/0.tar"], ["a/0.tar", "b/0.tar"]),
        (["s3://b/train/only.parquet"], ["only.parquet"]),
        (["s3://b/x/part-2", "s3://b/x/part-1", "s3://b/x/y/1"], ["part-2", "part-1", "y/1"]),
        (["s3://one/x/0", "s3://two/x/0"], ["one/x/0", "two/x/0"]),
        (["s3://b/0", "gs://b/0"], ["s3://b/0", "gs://b/0"]),
        (["https://h/a/0?sig=1", "https://h/a/1?sig=/2/"], ["0", "1"]),
        (["s3://b/a?b/0", "s3://b/a?b/1"], ["0", "1"]),
    ],
)
def test_names_begin_below_the_longest_folder_that_all_share(urls, names):
    found = relative_names(Texts.of(urls))
    assert [
        found.content[start:stop].tobytes().decode()
        for start, stop in zip(found.starts, found.stops, strict=True)
    ] == names


def test_golden_identity():
    found = identity_of(small())
    assert found.content == "a9ff96e5404ae3a844561a6b89b6c92f"
    assert found.layout == "dfe7ef56c8798893c9f42bea4d22d2e2"


@pytest.mark.parametrize(
    "name",
    [
        lambda i: f"s3://another-bucket/deeper/{i}",
        lambda i: f"file:///mnt/b/{i}",
        lambda i: f"https://host/b/{i}?X-Amz-Signature={i}",
    ],
)
def test_a_move_changes_no_identity(name):
    moved = renamed(small(), name)
    assert moved.fingerprint != small().fingerprint
    assert identity_of(moved) == identity_of(small())


def test_what_our_code_estimates_is_no_part_of_the_identity():
    guessed = small(block_decoded=np.array([1, 2, 3]))
    shards = tuple(replace(shard, zero_copy=not shard.zero_copy) for shard in small().shards)
    assert identity_of(guessed) == identity_of(small()) == identity_of(small(shards=shards))


def test_a_copy_with_other_etags_keeps_the_layout_alone():
    copied = renamed(small(), lambda i: f"gs://b/{i}", etag="new")
    was, now = identity_of(small()), identity_of(copied)
    assert (was.content != now.content, was.layout) == (True, now.layout)


def test_any_other_difference_is_another_layout():
    first, second, third = small().shards
    changes = [
        {"format": "arrow_ipc"},
        {"schema": b"hcs"},
        {"block_rows": np.array([20, 10, 30])},
        {"block_offset": np.array([0, 41, 4])},
        {"block_length": np.array([40, 49, 56])},
        {"shards": (replace(first, size_bytes=101), second, third)},
        {"shards": (replace(first, url="s3://b/00"), second, third)},
        {"shards": (replace(first, url=second.url), replace(second, url=first.url), third)},
    ]
    made = [identity_of(small(**change)).layout for change in changes]
    assert len({identity_of(small()).layout, *made}) == len(changes) + 1
