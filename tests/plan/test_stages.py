"""The first epoch of a stage that begins with what was unread: against a plain twin."""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dataplane.client.stages import STAGES_MAX, follows, stages_with
from dataplane.client.state import RunState
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import DatasetIdentity, Exhausted, PackSpec, Region, ShareChange, View
from dataplane.plan.defaults import BlockSizes, shuffle_of, source_window
from dataplane.plan.manifest import Manifest
from dataplane.plan.mixed_order import MixedOrder
from dataplane.plan.orders import ReducedOrder, job_order, sample_count_of
from dataplane.plan.packed_blocks import packed
from dataplane.plan.shards import Shard
from dataplane.plan.stages import SourceRead, with_left
from dataplane.plan.tombstones import RowNames
from dataplane.plan.views import chosen, joined_hash, limited, shard_words, shared_counts
from dataplane.rpc.messages import JobOpened

Sample = tuple[str, int]
DOCUMENTS = 3  # a pack has three rows of its block


def dataset(*names: str) -> Manifest:
    """A dataset of these shards, each with a few blocks of different lengths."""
    rows = {name: [5 + (ord(name[-1]) + block) * 7 % 11 for block in range(4)] for name in names}
    shards = [Shard(f"s3://b/{name}", 100, f"tag {name}", 4, Region(0, 0), False) for name in names]
    counts = np.array(list(itertools.chain(*rows.values())))
    return Manifest(
        urls=("s3://b/",),
        format="parquet",
        schema=b"",
        shards=shards,
        block_shard=np.repeat(np.arange(len(names), dtype=np.int32), 4),
        block_rows=counts,
        block_offset=np.arange(len(counts)),
        block_length=np.ones(len(counts), np.int64),
        block_decoded=counts * 100,
    )


def viewed(whole: Manifest, view: View, seed: int) -> Manifest:
    counts = limited(shared_counts(whole, view), view.limit)
    rows = whole if np.array_equal(counts, whole.block_rows) else whole.viewed(counts)
    return rows if view.pack is None else packed(rows, -(-rows.block_rows // DOCUMENTS))


ORDER = {"seed": 3, "shuffle": True, "lanes": 2, "window": 9}
MIXED = Exhausted.RENORMALISE


def job(of: Any, **options: Any) -> tuple[JobSpec, list[Manifest]]:
    """A job over the shards of a text, or over a mixture of those of several by name."""
    given = {**ORDER, **options}
    if isinstance(of, (str, tuple)):
        view = given.pop("view", View())
        manifest = viewed(dataset(*of), view, given["seed"])
        return JobSpec(manifest.fingerprint, view=view, **given), [manifest]
    exhausted, length = given.pop("exhausted", MIXED), given.pop("length", 0)
    views = {name: given.pop(name, View()) for name in of}
    manifests = [viewed(dataset(*of[name]), views[name], given["seed"]) for name in of]
    sizes = [BlockSizes.of(manifest.block_rows, manifest.block_decoded) for manifest in manifests]
    most = 0 if exhausted is Exhausted.CYCLE else 1
    sources = []
    for name, manifest, size in zip(of, manifests, sizes, strict=True):
        shuffle = shuffle_of(size, 2, source_window(size, 2, sizes))
        facts = name, manifest.fingerprint, (1 << 32) // len(of), most
        sources.append(SourceSpec(*facts, shuffle.window, shuffle.ramp, views[name]))
    given |= {"window": max(source.window for source in sources), "lanes": 2}
    mixture = MixtureSpec(tuple(sources), exhausted, length)
    return JobSpec(
        joined_hash(manifest.fingerprint for manifest in manifests), mixture=mixture, **given
    ), manifests


def names_of(spec: JobSpec, manifests: Sequence[Manifest]) -> list[str]:
    return [""] if spec.mixture is None else [source.name for source in spec.mixture.sources]


def state_of(spec: JobSpec, manifests: Sequence[Manifest], epoch: int, cursor: int) -> RunState:
    """The state of a run, as it is saved and loaded."""
    count = sample_count_of(spec, manifests, epoch)
    known = DatasetIdentity("content", "layout")
    opened = JobOpened(spec, spec.digest(), known, count, (), 0, 0, 1, 60.0)
    mix = None if spec.mixture is None else spec.mixture.history
    state = replace(RunState.of(opened, epoch, cursor), sample_count=count, mix=mix)
    return RunState.from_dict(json.loads(json.dumps(state.to_dict())))


def rows_left(manifest: Manifest, view: View) -> Any:
    """The rows of each block that the view leaves."""
    whole = manifest.whole or manifest
    words, kept = shard_words(whole.shards.urls), manifest.kept
    first = np.concatenate([[0], np.cumsum(whole.block_rows)])

    def left(block: int) -> Any:
        number = block if kept is None else int(kept[block])
        shard = int(whole.block_shard[number])
        begin = int(first[number] - first[whole.shards.block_starts[shard]])
        rows = chosen(view, int(words[shard]), begin, int(whole.block_rows[number]))
        return np.flatnonzero(rows)

    return left


def samples(
    spec: JobSpec, manifests: Sequence[Manifest], epoch: int, begin: int = 0, end: int | None = None
) -> list[Sample]:
    """The samples of an epoch, by the name of the shard and the number in it; of a packed source,
    by the name and the block.
    """
    order = job_order(spec, manifests, epoch)
    blocks, rows = order.locate(np.arange(begin, order.sample_count if end is None else end))
    views = (
        [spec.view] if spec.mixture is None else [source.view for source in spec.mixture.sources]
    )
    first = np.concatenate([[0], np.cumsum([manifest.block_count for manifest in manifests])])
    source = first.searchsorted(blocks, side="right") - 1
    located: list[Sample] = [("", 0)] * len(blocks)
    for at, (manifest, view) in enumerate(zip(manifests, views, strict=True)):
        (mine,) = np.nonzero(source == at)
        own, whole = blocks[mine] - first[at], manifest.whole or manifest
        if manifest.documents is None:
            names = RowNames(manifest, rows_left(manifest, view))
            shards, numbers = names.of(own, rows[mine])
        else:
            own = own if manifest.kept is None else manifest.kept[own]
            shards = whole.block_shard[own]
            numbers = whole.shards.block_starts[shards] - own - 1
        for place, shard, number in zip(
            mine.tolist(), shards.tolist(), numbers.tolist(), strict=True
        ):
            located[place] = whole.shards.urls[shard], number
    return located


@functools.cache
def ends_of(name: str) -> list[int]:
    return np.cumsum(dataset(name).block_rows).tolist()


def block_of(sample: Sample) -> Sample:
    """The block of a row, as packs are named."""
    url, row = sample
    return (url, row) if row < 0 else (url, -1 - bisect.bisect(ends_of(url[-1]), row))


def twin(old: list[Sample], delivered: list[Sample], new: list[Sample]) -> Counter[Sample]:
    """The plain rule: each sample of the new recipe's data that was not delivered. Of blocks that
    are packed before or after, those of which all was delivered are left out, and no others.
    """
    if all(row >= 0 for _, row in (*old, *new)):
        gone = set(delivered)
        return Counter(sample for sample in new if sample not in gone)
    every, some = Counter(map(block_of, old)), Counter(map(block_of, delivered))
    gone = {block for block in every if every[block] == some[block]}
    return Counter(sample for sample in new if block_of(sample) not in gone)


PACK, HALF = View(pack=PackSpec("tokens", 8)), View(sample=1 << 31)
AB = {"a": "ab", "b": "cd"}
BOTH = {"a": "ab", "b": "ab"}
SPLITS = {"a": View(split_to=1 << 31), "b": View(split_from=1 << 31, split_to=1 << 32)}
CASES: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "seed": ("abc", {}, "abc", {"seed": 4}),
    "lanes": ("abc", {}, "abc", {"lanes": 5, "window": 4}),
    "unshuffled": ("abc", {}, "abc", {"shuffle": False, "lanes": 1, "window": 1}),
    "shuffled": ("abc", {"shuffle": False, "lanes": 1, "window": 1}, "abc", {}),
    "one window": ("abc", {"lanes": 1, "window": 500}, "abc", {"seed": 5}),
    "shards added": ("abc", {}, "abcde", {}),
    "shards added before": ("cd", {}, "abcd", {}),
    "shards in another order": ("abc", {}, "cba", {}),
    "shard lost": ("abc", {}, "ac", {}),
    "shard lost, shard added": ("abc", {}, "adb", {}),
    "view": ("abc", {"view": HALF}, "abc", {"view": HALF, "seed": 5}),
    "view of more shards": ("abc", {"view": HALF}, "abcd", {"view": HALF}),
    "higher limit": ("abc", {"view": View(limit=70)}, "abc", {"view": View(limit=90)}),
    "lower limit": ("abc", {}, "abc", {"view": View(limit=60)}),
    "packed": ("abc", {}, "abc", {"view": PACK}),
    "packed no more": ("abc", {"view": PACK}, "abc", {}),
    "other packs": ("abc", {"view": PACK}, "abc", {"view": PACK, "seed": 4}),
    "packs of more shards": ("abc", {"view": PACK}, "abcd", {"view": PACK}),
    "becomes a mixture": ("abcd", {}, AB, {}),
    "source added": (AB, {}, {**AB, "c": "ef"}, {}),
    "source removed": (AB, {}, {"b": "cd"}, {}),
    "mixture no more": (AB, {}, "abcd", {}),
    "sources exchange shards": (AB, {}, {"a": "ac", "b": "bd"}, {}),
    "mixture with other seed": (AB, {}, AB, {"seed": 5}),
    "mixture that cycles": (AB, {"exhausted": Exhausted.CYCLE}, AB, {"seed": 5}),
    "sources that overlap": ({"a": "ab", "b": "bc"}, {}, "abc", {"seed": 5}),
    "sources that will overlap": ("abc", {}, {"a": "ab", "b": "bc"}, {}),
    "splits of one dataset": (BOTH, SPLITS, BOTH, {**SPLITS, "seed": 5}),
    "mixture with a length": (AB, {"length": 50}, AB, {"seed": 5}),
    "mixture of views": (AB, {"a": HALF}, AB, {"a": HALF, "seed": 5}),
    "mixture of packs": (AB, {"a": PACK, "b": PACK}, AB, {"a": PACK, "b": PACK, "seed": 5}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_1_an_epoch_has_each_sample_as_often_as_the_twin_says(case: str) -> None:
    epoch = len(case) % 3
    old_of, old_options, new_of, new_options = CASES[case]
    old, old_manifests = job(old_of, **old_options)
    new, manifests = job(new_of, **new_options)
    count = sample_count_of(old, old_manifests, epoch)
    before = [
        SourceRead(name, View(), manifest.whole or manifest)
        for name, manifest in zip(names_of(old, old_manifests), old_manifests, strict=True)
    ]
    for cursor in (count // 5, count // 2, count - 1):
        state = state_of(old, old_manifests, epoch, cursor)
        spec = replace(new, stages=stages_with(state, "unread"))
        reduced = with_left(spec, manifests, viewed, before)
        delivered = samples(old, old_manifests, epoch, 0, cursor)
        whole = samples(new, manifests, 0)
        expected = twin(samples(old, old_manifests, epoch), delivered, whole)
        located = samples(spec, reduced, spec.first_epoch)
        if new.mixture is None or (new.mixture.exhausted is MIXED and not new.mixture.length):
            assert Counter(located) == (expected or Counter(whole))
        else:
            assert not Counter(located) - expected
        assert samples(spec, reduced, epoch + 2) == samples(new, manifests, epoch + 2)
        check_order(spec, reduced)


def check_order(spec: JobSpec, manifests: Sequence[Manifest]) -> None:
    """All methods of a reduced order agree."""
    order = job_order(spec, manifests, spec.first_epoch)
    assert order.sample_count == sample_count_of(spec, manifests, spec.first_epoch)
    if not isinstance(order, ReducedOrder):
        return
    positions = np.arange(order.sample_count)
    blocks, rows = order.locate(positions)
    first, last = order.block_span(blocks)
    assert ((first <= positions) & (positions <= last)).all()
    for at in positions[:: max(1, len(positions) // 7)].tolist():
        assert at in order.positions_of(int(blocks[at]), int(rows[at])).tolist()
    total = sum(manifest.block_count for manifest in manifests)
    gone = np.setdiff1d(np.arange(total), blocks)
    assert (order.block_span(gone)[1] < 0).all()
    for block in gone.tolist():
        assert not len(order.positions_of(block, 0))


def test_2_changes_within_one_epoch_add_up() -> None:
    """Each row of the same data is delivered once, however often the recipe changes."""
    spec, manifests = job("abcd")
    total, stages, seen = sample_count_of(spec, manifests, 0), (), list[Sample]()
    epoch, whole = 0, manifests
    for seed in (4, 5, 6, 7):
        count = sample_count_of(spec, manifests, epoch)
        cursor = math.ceil(count / 3)
        seen += samples(spec, manifests, epoch, 0, cursor)
        stages = stages_with(state_of(spec, manifests, epoch, cursor), "unread")
        spec = replace(job("abcd", seed=seed)[0], stages=stages)
        manifests, epoch = with_left(spec, whole, viewed), spec.first_epoch
    assert [stage.epoch for stage in stages] == [0, 1, 2, 3]
    seen += samples(spec, manifests, epoch)
    assert len(seen) == len(set(seen)) == total


def test_2_a_change_before_the_first_step_of_a_stage_brings_nothing_back() -> None:
    """A stage that ended at position 0 of its first epoch hands on what was left for it."""
    spec, whole = job("abcd")
    seen, at, manifests = samples(spec, whole, 0, 0, 50), (0, 50), whole
    for seed in (4, 5, 6):
        stages = stages_with(state_of(spec, manifests, *at), "unread")
        spec = replace(job("abcd", seed=seed)[0], stages=stages)
        manifests, at = with_left(spec, whole, viewed), (1, 0)
    seen += samples(spec, manifests, spec.first_epoch)
    assert len(seen) == len(set(seen)) == sample_count_of(*job("abcd"), 0)
    opened = JobOpened(spec, spec.digest(), DatasetIdentity("c", "l"), 1, (), 0, 0, 1, 60.0)
    sentence = follows(state_of(spec, manifests, 1, 0), opened)[1]
    assert "Epoch 1 had not begun, and still has only what was not delivered" in sentence
    first = replace(
        job("abcd", seed=4)[0], stages=stages_with(state_of(spec, whole, 1, 0), "unread")
    )
    assert with_left(replace(first, stages=first.stages[-1:]), whole, viewed)[0].left is None


def test_2_many_changes_within_one_epoch_take_no_recursion() -> None:
    spec, whole = job("a")
    total, stages, count = sample_count_of(spec, whole, 0), (), 20
    for number in range(count):
        state = state_of(replace(spec, stages=stages), whole, number, 1)
        stages = stages_with(replace(state, sample_count=total - number), "unread")
    last, limit = replace(spec, seed=9, stages=stages), sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 2 * count)
    try:
        left = with_left(last, whole, viewed)
    finally:
        sys.setrecursionlimit(limit)
    assert sample_count_of(last, left, count) == total - count
    many = replace(state, stages=(stages[0],) * STAGES_MAX)
    with pytest.raises(ConfigError, match="stages, the most"):
        stages_with(many, "unread")


def test_2_a_length_is_at_most_what_is_left() -> None:
    old, whole = job(AB, length=120)
    stages = stages_with(state_of(old, whole, 0, 100), "unread")
    for rule, most in ((MIXED, 59), (Exhausted.STOP, 58)):
        spec = replace(job(AB, length=120, seed=5, exhausted=rule)[0], stages=stages)
        manifests = with_left(spec, whole, viewed)
        located = samples(spec, manifests, 1)
        assert 0 < len(set(located)) == len(located) <= most
        assert (len(located) == most) == (rule is MIXED)
        assert not set(located) & set(samples(old, whole, 0, 0, 100))
        assert sample_count_of(spec, manifests, 2) == 120 or rule is Exhausted.STOP


def test_2_shares_that_changed_in_a_former_epoch_hold_from_the_first_sample_on() -> None:
    old, whole = job(AB)
    stages = stages_with(state_of(old, whole, 0, 40), "unread")
    new, _ = job(AB, seed=5)
    assert new.mixture is not None
    few, many = 1 << 29, (1 << 32) - (1 << 29)
    changes = (ShareChange(0, 30, (many, few)), ShareChange(0, 60, (few, many)))
    spec = replace(new, mixture=replace(new.mixture, changes=changes), stages=stages)
    order = job_order(spec, with_left(spec, whole, viewed), 1)
    assert isinstance(order, ReducedOrder)
    assert isinstance(order.order, MixedOrder)
    assert order.order.plan.segments[0].shares == (few, many)
    assert not order.order.plan.changed


def test_3_a_source_that_was_replaced_twice_is_that_of_its_stage() -> None:
    spec, whole = job({"a": "ab", "b": "cd"})
    manifests, before, stages, at = whole, list[SourceRead](), (), (0, 40)
    seen = samples(spec, manifests, 0, 0, 40)
    for number, shards in enumerate(("be", "ef")):
        before.insert(number % 2, SourceRead("a", View(), whole[0], number))
        stages = stages_with(state_of(spec, manifests, *at), "unread")
        made, whole = job({"a": shards, "b": "cd"})
        spec, at = replace(made, stages=stages), (number + 1, 20)
        manifests = with_left(spec, whole, viewed, before)
        seen += samples(spec, manifests, at[0], 0, at[1])
    assert len(set(seen)) == len(seen)


def test_3_shards_that_were_added_are_found_without_the_former_list() -> None:
    for old_of, options in (("ab", {}), ("ab", {"view": HALF}), ("ab", {"view": PACK})):
        old, old_manifests = job(old_of, **options)
        new, manifests = job("abcde", **options)
        spec = replace(new, stages=stages_with(state_of(old, old_manifests, 2, 9), "unread"))
        assert with_left(spec, manifests, viewed)[0].left is not None


def test_former_packs_are_counted_with_as_many_bad_rows_as_the_present_recipe_allows() -> None:
    views = list[View]()

    def seen(whole: Manifest, view: View, seed: int) -> Manifest:
        views.append(view)
        return viewed(whole, view, seed)

    old, old_manifests = job("ab", view=replace(PACK, bad_max=0.5))
    new, manifests = job("abc", view=replace(PACK, bad_max=0.25))
    stages = stages_with(state_of(old, old_manifests, 0, 9), "unread")
    with_left(replace(new, stages=stages), manifests, seen)
    assert {view.bad_max for view in views} == {0.25}


def test_3_more_than_64_shards_may_be_added_after_a_reduced_epoch() -> None:
    names = [chr(number) for number in range(0x100, 0x100 + 90)]
    old, whole = job(tuple(names[:1]))
    stages = stages_with(state_of(old, whole, 0, 9), "unread")
    made, whole = job(tuple(names[:3]))
    spec = replace(made, stages=stages)
    stages = stages_with(state_of(spec, with_left(spec, whole, viewed), 1, 20), "unread")
    made, whole = job(tuple(names))
    spec = replace(made, stages=stages)
    left = with_left(spec, whole, viewed)
    assert sample_count_of(spec, left, 2) == sample_count_of(made, whole, 0) - 29


def test_what_cannot_be_computed_is_refused_with_the_way_out() -> None:
    def left(old_of: Any, new_of: Any, new_options: Any = None, **options: Any) -> Any:
        old, old_manifests = job(old_of, **options)
        new, manifests = job(new_of, **(new_options or options))
        spec = replace(new, stages=stages_with(state_of(old, old_manifests, 0, 9), "unread"))
        before = [SourceRead("", View(), old_manifests[0].whole or old_manifests[0])]
        return with_left(spec, manifests, viewed, before if isinstance(old_of, tuple) else ())

    with pytest.raises(ConfigError, match=r'before= .*pass change="restart"'):
        left("abc", "bcd")  # the first shard is gone
    with pytest.raises(ConfigError, match=r's3://b/a had other rows .* pass change="restart"'):
        left("abc", "abc", {"view": HALF})
    for view in (HALF, replace(HALF, limit=30)):  # counts of blocks tell nothing below a limit
        with pytest.raises(ConfigError, match=r"s3://b/x/a had other rows .* below the common"):
            left(("x/a", "x/b"), ("x/a", "x/b", "y/c"), {"view": view}, view=view)
    with pytest.raises(ConfigError, match=r"s3://b/a had other rows"):
        left("ab", BOTH, {"a": HALF})
    with pytest.raises(ConfigError, match=r'before= .*pass change="restart"'):
        left(AB, {"b": "cd"})
