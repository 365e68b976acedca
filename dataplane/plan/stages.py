"""Former stages of a run whose recipe has changed: their specs and datasets, and the samples that
are left for the first epoch of the next stage. docs/order.md specifies which samples are left.

1. The samples that an epoch delivered up to a position follow from its order alone, and are the
   same on every rank. Nothing is recorded.
2. Finding these samples takes O(K) in blocks, and the rows of the blocks in open windows; never
   O(N).
3. Of the rows that both stages have, exactly those that were not delivered are left. If samples are
   packs, before or after the change, a block counts as delivered if all of its samples are
   delivered; otherwise the whole block is left.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dataplane.model.changes import first_counted, resizes
from dataplane.model.config import JobSpec, SourceSpec, Stage
from dataplane.model.errors import ConfigError
from dataplane.model.records import DatasetIdentity, View
from dataplane.model.redact import unsigned
from dataplane.plan.defaults import BlockSizes, Shuffle, shuffle_of, source_window
from dataplane.plan.manifest import Left, Manifest
from dataplane.plan.order import PassRead, TracedOrder
from dataplane.plan.orders import ReducedOrder, job_order
from dataplane.plan.permute import Words
from dataplane.plan.shards import starts_of
from dataplane.plan.texts import Bools, Int64
from dataplane.plan.views import (
    has_shares,
    identity_of,
    identity_of_job,
    joined_hash,
    mixed_identity,
    shard_words,
)

Viewed = Callable[[Manifest, View, int], Manifest]
"""Opens a view of a whole dataset for a job with this seed: its samples, which may be packs."""
_SAMPLES_TOGETHER = 1 << 20
# How many first parts of a dataset are tried, and for fewer shards how many shards together.
_PREFIXES_MAX, _SHARDS_TRIED = 64, 1 << 17


class SourceRead(Struct, frozen=True):
    """A dataset that a stage reads: its name, "" without a mixture, the view, and the manifest of
    its samples. `stage` is the number of the stage that read it, counted from 0.
    """

    name: str
    view: View
    manifest: Manifest
    stage: int = 0

    @property
    def whole(self) -> Manifest:
        """The manifest of the whole dataset."""
        return self.manifest.whole or self.manifest


def sources_of(spec: JobSpec, manifests: Sequence[Manifest]) -> list[SourceRead]:
    """Return the datasets that a job with this spec reads."""
    views = [("", spec.view)]
    if spec.mixture is not None:
        views = [(source.name, source.view) for source in spec.mixture.sources]
    return [SourceRead(*view, manifest) for view, manifest in zip(views, manifests, strict=True)]


def with_left(
    spec: JobSpec,
    manifests: Sequence[Manifest],
    viewed: Viewed,
    before: Sequence[SourceRead] = (),
) -> list[Manifest]:
    """Return the manifests of a job, each with the part that is left for the first epoch. Datasets
    of former stages are searched for among the job's own datasets, and among the datasets `before`.

    Raises:  ConfigError: the samples that the former stage has delivered cannot be computed.
    """
    begin = first_counted(spec.stages)
    part = list(manifests)
    former: tuple[JobSpec, list[Manifest]] | None = None
    for count in range(begin + 1, len(spec.stages) + 1):
        reader, whole = former_of(spec, manifests, viewed, before, count)
        if former is not None:
            whole = _after(spec.stages[count - 2], *former, sources_of(reader, whole))
        former = reader, whole
    if former is not None:
        part = _after(spec.stages[-1], *former, sources_of(spec, manifests))
    return part


def former_of(
    spec: JobSpec,
    manifests: Sequence[Manifest],
    viewed: Viewed,
    before: Sequence[SourceRead] = (),
    count: int | None = None,
) -> tuple[JobSpec, list[Manifest]]:
    """Return the spec of the last of a job's first `count` former stages, and the manifests that
    the stage read, which are searched for as in `with_left`.

    Raises:  ConfigError: the manifests are not among them.
    """
    now = len(spec.stages)
    sources = [*before, *(replace(own, stage=now) for own in sources_of(spec, manifests))]

    def opened(whole: Manifest, view: View, seed: int) -> Manifest:
        return viewed(whole, replace(view, bad_max=spec.bad_max), seed)  # no state names `bad_max`

    return former_job(spec.stages[: now if count is None else count], sources, opened)


def _after(
    stage: Stage, spec: JobSpec, manifests: Sequence[Manifest], sources: Sequence[SourceRead]
) -> list[Manifest]:
    """Return the manifests of these sources, each with the part that is left of it after a stage
    with this spec, which read the manifests.
    """
    order = job_order(spec, manifests, stage.epoch)
    delivered = _delivered_before(order, manifests, stage.cursor)
    return _left(sources, sources_of(spec, manifests), delivered)


# -- delivered ---------------------------------------------------------------------------------


class _Delivered(Struct, frozen=True):
    """The delivered part of a dataset: whole blocks, and samples of some others, by block.

    Shapes:  whole: bool[K].   samples: bool[n] each.
    """

    whole: Bools
    samples: dict[int, Bools]


def _delivered_before(
    order: TracedOrder, manifests: Sequence[Manifest], cursor: int
) -> list[_Delivered]:
    """Return the samples of each dataset that were delivered before this position of an epoch. If
    the epoch read only what an earlier epoch had left, the samples delivered by the earlier epoch
    are included.
    """
    is_reduced = isinstance(order, ReducedOrder)
    parts = []
    for manifest, passes in zip(manifests, order.read_before(cursor), strict=True):
        left = manifest.left if is_reduced else None
        part = manifest if left is None else left.manifest
        read = _read_by(passes, part.block_rows)
        parts.append(read if left is None else _with_others(read, manifest.block_rows, left))
    return parts


def _read_by(passes: Sequence[PassRead], counts: Int64) -> _Delivered:
    blocks = np.arange(len(counts))
    whole, touched = np.zeros(len(counts), np.bool_), np.zeros(len(counts), np.bool_)
    for read in passes:
        first, last = read.order.block_span(blocks)
        whole |= (read.begin <= first) & (last < read.end)
        stop = max(read.end, int(read.others[-1]) + 1) if len(read.others) else read.end
        touched |= (first < stop) & (last >= read.begin)
    samples = dict[int, Bools]()
    for some in _together(np.flatnonzero(touched & ~whole), counts):
        starts = starts_of(counts[some])
        number = np.repeat(some, counts[some])
        rows = np.arange(starts[-1]) - np.repeat(starts[:-1], counts[some])
        is_read = np.zeros(len(rows), np.bool_)
        for read in passes:
            at = read.order.position_of(number, rows)
            is_read |= (read.begin <= at) & (at < read.end)
            if len(read.others):
                place = np.minimum(read.others.searchsorted(at), len(read.others) - 1)
                is_read |= read.others[place] == at
        for block, part in zip(some.tolist(), np.split(is_read, starts[1:-1]), strict=True):
            whole[block] = part.all()
            if part.any() and not whole[block]:
                samples[block] = part
    return _Delivered(whole, samples)


def _together(blocks: Int64, counts: Int64) -> Iterator[Int64]:
    """Yield groups of blocks whose positions are computed together."""
    turns = np.cumsum(counts[blocks]) // _SAMPLES_TOGETHER
    yield from filter(len, np.split(blocks, np.flatnonzero(np.diff(turns)) + 1))


def _with_others(read: _Delivered, counts: Int64, left: Left) -> _Delivered:
    """Return the samples `read` of the part that was left of a dataset, and all samples outside of
    this part, which were delivered earlier.
    """
    whole, samples = np.ones(len(counts), np.bool_), dict[int, Bools]()
    if left.is_nothing:
        return _Delivered(whole, samples)
    whole[left.kept] = read.whole
    is_partial = left.starts >= 0
    is_partial[list(read.samples)] = True
    for number in np.flatnonzero(is_partial & ~read.whole).tolist():
        block, own = int(left.kept[number]), left.of(number)
        is_read = np.ones(int(counts[block]), np.bool_)
        some = np.arange(len(is_read)) if own is None else own
        is_read[some] = read.samples.get(number, np.zeros(len(some), np.bool_))
        samples[block] = is_read
    return _Delivered(whole, samples)


# -- left --------------------------------------------------------------------------------------

_Shard = tuple[str, str, int]
_Rows = tuple[str, int, int, int]
_Places = dict[_Shard, dict[_Rows, dict[int, int]]]
"""The number of each shard in each source that has it, by the shard and by the rows that the
source's view reads of it.
"""


def _left(
    sources: Sequence[SourceRead], former: Sequence[SourceRead], delivered: Sequence[_Delivered]
) -> list[Manifest]:
    """Return the manifests of a stage, each with the part that is left of it. If nothing is left of
    any manifest, return them whole.

    Raises:  ConfigError: no shard is in both stages, or the stages read other rows of a shard.
    """
    places = _places(sources)
    gone = [np.zeros(source.manifest.block_count, np.bool_) for source in sources]
    some = [dict[int, Bools]() for _ in sources]
    is_known = False
    for old, part in zip(former, delivered, strict=True):
        for at, blocks, own in _matched(old, places, sources):
            is_known = True
            new = sources[at].manifest
            is_packed = old.manifest.documents is not None or new.documents is not None
            is_longer = new.block_rows[blocks] > old.manifest.block_rows[own]
            is_whole = part.whole[own] & (is_longer <= is_packed)
            gone[at][blocks[is_whole]] = True
            partial = ~is_whole & (part.whole[own] | _among(own, part.samples))
            for block, number in zip(blocks[partial].tolist(), own[partial].tolist(), strict=True):
                if is_packed:
                    break
                length = int(new.block_rows[block])
                is_read = some[at].setdefault(block, np.zeros(length, np.bool_))
                given = part.samples.get(number, np.ones(old.manifest.block_rows[number], np.bool_))
                is_read[: len(given)] |= given[:length]
    if not is_known:
        raise ConfigError(
            "no shard of the state's run is in this dataset (by url, size and ETag), so "
            'change="unread" cannot say what is unread: pass change="restart"',
            field="change",
        )
    counts = [
        np.where(blocks, 0, source.manifest.block_rows)
        for source, blocks in zip(sources, gone, strict=True)
    ]
    for count, parts in zip(counts, some, strict=True):
        for block, is_read in parts.items():
            count[block] = min(count[block], np.count_nonzero(~is_read))
    if not any(count.any() for count in counts):
        return [source.manifest for source in sources]
    return [
        _reduced(source.manifest, count, parts)
        for source, count, parts in zip(sources, counts, some, strict=True)
    ]


def _reduced(manifest: Manifest, counts: Int64, read: dict[int, Bools]) -> Manifest:
    """Return a manifest with the part that is left of it: so many samples of each block, which are
    those that were not `read`.
    """
    if np.array_equal(counts, manifest.block_rows):
        return manifest
    numbers = [np.empty(0, np.int32)]
    if not counts.any():
        nothing = Left(manifest, np.full(len(counts), -1), numbers[0], is_nothing=True)
        return dataclasses.replace(manifest, left=nothing)
    part = manifest.viewed(counts)
    assert part.kept is not None
    starts, end = np.full(len(part.kept), -1), 0
    for at in np.flatnonzero(_among(part.kept, read)).tolist():
        numbers.append(np.flatnonzero(~read[int(part.kept[at])]).astype(np.int32))
        starts[at], end = end, end + len(numbers[-1])
    return dataclasses.replace(manifest, left=Left(part, starts, np.concatenate(numbers)))


def _among(blocks: Int64, some: dict[int, Bools]) -> Bools:
    return np.isin(blocks, np.fromiter(some, np.int64, len(some)))


def _rows_of(view: View) -> _Rows:
    made = f" {view.map}" if view.resizes else ""
    return view.where + made, view.sample, view.split_from, view.split_to


def _shards_of(manifest: Manifest) -> Iterator[_Shard]:
    shards = manifest.shards
    return zip(map(unsigned, shards.urls), shards.etags, shards.size_bytes.tolist(), strict=True)


def _places(sources: Sequence[SourceRead]) -> _Places:
    places: _Places = {}
    for at, source in enumerate(sources):
        for number, shard in enumerate(_shards_of(source.whole)):
            of_source = places.setdefault(shard, {}).setdefault(_rows_of(source.view), {})
            of_source[at] = number
    return places


def _matched(
    old: SourceRead, places: _Places, sources: Sequence[SourceRead]
) -> Iterator[tuple[int, Int64, Int64]]:
    """Yield each source that shares shards with a former dataset: its index, the numbers of the
    shared blocks in the source, and their numbers in the former dataset.

    Raises:  ConfigError: a source reads other rows of a shard than the former dataset.
    """
    before = old.whole
    numbers = _numbers_in(old, places, sources)
    own_blocks = _numbers_of(old.manifest)
    shards = before.block_shard[own_blocks].astype(np.int64)
    in_shard = own_blocks - before.shards.block_starts[shards]
    for source, place_of in numbers.items():
        new, now = sources[source], sources[source].whole
        kept = _numbers_of(new.manifest)
        own = np.flatnonzero(place_of[shards] >= 0)
        own = own[in_shard[own] < now.shards.block_counts[place_of[shards[own]]]]
        blocks = now.shards.block_starts[place_of[shards[own]]] + in_shard[own]
        places_now = np.minimum(kept.searchsorted(blocks), len(kept) - 1)
        is_same = (kept[places_now] == blocks) & (
            now.block_rows[blocks] == before.block_rows[own_blocks[own]]
        )
        places_now, own = places_now[is_same], own[is_same]
        has_all = all(view.pack is None and not view.limit for view in (old.view, new.view))
        is_other = old.manifest.block_rows[own] != new.manifest.block_rows[places_now]
        if has_all and is_other.any():
            raise _other_rows(before.shards.urls[int(shards[own[is_other]][0])])
        yield source, places_now, own


def _numbers_in(
    old: SourceRead, places: _Places, sources: Sequence[SourceRead]
) -> dict[int, Int64]:
    """Return the numbers of a former dataset's shards in each source that has some of them, by the
    source's index; -1 for others.

    Raises:  ConfigError: a source reads other rows of a shard, which may be among those delivered.
    """
    numbers = dict[int, Int64]()
    words, own = [_words_of(old), *map(_words_of, sources)], _rows_of(old.view)
    for number, shard in enumerate(_shards_of(old.whole)):
        by_rows = places.get(shard)
        if by_rows is None:
            continue
        if own not in by_rows:
            raise _other_rows(shard[0])
        for rows, of_sources in by_rows.items():
            if rows != own and not _are_apart(rows, own):
                raise _other_rows(shard[0])
            for source, place in of_sources.items():
                before, now = words[0], words[source + 1]
                if before is not None and now is not None and before[number] != now[place]:
                    raise _other_rows(shard[0])
                if rows == own:
                    if source not in numbers:
                        numbers[source] = np.full(len(old.whole.shards), -1, np.int64)
                    numbers[source][number] = place
    return numbers


def _are_apart(rows: _Rows, others: _Rows) -> bool:
    """Return whether two views read disjoint splits of a shard."""
    (*_, begin, end), (*_, other_begin, other_end) = rows, others
    return 0 < end <= other_begin or 0 < other_end <= begin


def _words_of(source: SourceRead) -> Words | None:
    """Return the words on which it depends which rows of each shard are in the view's shares; None
    for a view without shares.
    """
    return shard_words(source.whole.shards.urls) if has_shares(source.view) else None


def _other_rows(url: str) -> ConfigError:
    return ConfigError(
        f"{unsigned(url)} had other rows in the state's run (where=, sample= or split=, of which "
        "the rows follow from names below the common folder of all shards), so what is unread of "
        'it is not known: pass change="restart"',
        field="change",
        shard=unsigned(url),
    )


def _numbers_of(manifest: Manifest) -> Int64:
    """Return the numbers of a manifest's blocks in its whole dataset."""
    return np.arange(manifest.block_count) if manifest.kept is None else manifest.kept


# -- former stages -----------------------------------------------------------------------------


def former_job(
    stages: Sequence[Stage], sources: Sequence[SourceRead], viewed: Viewed
) -> tuple[JobSpec, list[Manifest]]:
    """Return the spec of the last of these stages, and the manifests that the stage read. They are
    searched for among `sources`, the datasets of a later stage, and among the first shards of
    these, since shards may be added.

    Raises:  ConfigError: the manifests are not among them.
    """
    *earlier, stage = stages
    number = len(earlier)
    # A dataset that was replaced later is named by the first stage from this one on that names it.
    sources = sorted(sources, key=lambda of: (of.stage < number, abs(of.stage - number)))
    if stage.spec is not None:
        spec = replace(stage.spec, stages=tuple(earlier))
        for manifests in _candidates(stage, spec, sources, viewed):
            filled = _filled(spec, manifests, stage.digest)
            if filled is not None:
                _check_made(stage, spec, manifests)
                return filled, manifests
    raise ConfigError(
        f"the shards that this run read until epoch {stage.epoch} are not all in this dataset, or "
        "not at its beginning, so what it delivered cannot be computed: name them with before= "
        "(urls, or a manifest that `dataplane index -o` made of them; of a mixture, by source), or "
        'pass change="restart", which needs none of them',
        field="change",
    )


def _check_made(stage: Stage, spec: JobSpec, manifests: Sequence[Manifest]) -> None:
    """Check that maps that resize make as many rows of each block as they did for this stage.

    Raises:  ConfigError: they do not.
    """
    is_mixture = spec.mixture is not None
    if resizes(spec) and identity_of_job(manifests, is_mixture=is_mixture) != stage.dataset:
        raise ConfigError(
            f"map= makes other rows than it did until epoch {stage.epoch}, so what this run "
            'delivered cannot be computed: restore its module, or pass change="restart"',
            field="change",
        )


def _candidates(
    stage: Stage, spec: JobSpec, sources: Sequence[SourceRead], viewed: Viewed
) -> Iterator[list[Manifest]]:
    """Yield the manifests that the stage may have read."""
    if spec.mixture is not None:
        wholes = {source.name: source.whole for source in reversed(sources)}
        named = spec.mixture.sources
        if all(source.name in wholes for source in named):
            datasets = [wholes[source.name] for source in named]
            for some in itertools.chain([datasets], _firsts(datasets, stage.dataset.content)):
                pairs = zip(named, some, strict=True)
                yield [viewed(whole, source.view, spec.seed) for source, whole in pairs]
        return
    for source in sources:
        whole = source.whole
        every = viewed(whole, replace(spec.view, limit=0), spec.seed)
        of_shards = np.zeros(len(whole.shards), np.int64)
        np.add.at(of_shards, whole.block_shard[_numbers_of(every)], every.block_rows)
        ends = np.cumsum(of_shards)
        # `stage.sample_count` counts the samples of all shards that the stage read, unless a limit
        # or an earlier change of the recipe made the count smaller.
        is_less = bool(spec.view.limit) or spec.first_epoch == stage.epoch > 0
        fits = ends >= stage.sample_count if is_less else ends == stage.sample_count
        most = max(_PREFIXES_MAX, _SHARDS_TRIED // len(whole.shards))
        for last in np.flatnonzero(fits)[::-1][:most].tolist():
            is_all = last + 1 == len(whole.shards)
            first = whole if is_all else whole.first_shards(last + 1)
            is_other = not is_all and first.fingerprint == whole.fingerprint
            if not is_other and _filled(spec, [first], stage.digest) is not None:
                yield [viewed(first, spec.view, spec.seed)]


def _firsts(wholes: Sequence[Manifest], content: str) -> Iterator[list[Manifest]]:
    """Yield the first shards of each of these datasets, if together they have this content."""

    @functools.cache
    def first(at: int, lost: int) -> tuple[Manifest, DatasetIdentity]:
        part = wholes[at].first_shards(len(wholes[at].shards) - lost) if lost else wholes[at]
        return part, identity_of(part)

    sizes = [len(whole.shards) for whole in wholes]
    most = [min(size - 1, _PREFIXES_MAX, max(8, _SHARDS_TRIED // size)) for size in sizes]
    counts = itertools.chain.from_iterable(_sums(total, most) for total in range(1, sum(most) + 1))
    for lost in itertools.islice(counts, _PREFIXES_MAX**2):
        parts = [first(at, count) for at, count in enumerate(lost)]
        if mixed_identity([identity for _, identity in parts]).content == content:
            yield [part for part, _ in parts]


def _sums(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all numbers with this sum, of which each is at most that of `most`."""
    if not most:
        yield from [()] if total == 0 else []
        return
    for own in range(max(0, total - sum(most[1:])), min(total, most[0]) + 1):
        for others in _sums(total - own, most[1:]):
            yield own, *others


def _filled(spec: JobSpec, manifests: Sequence[Manifest], digest: str) -> JobSpec | None:
    """Return the spec with the facts that follow from its datasets, if it then has this digest."""
    mixture = spec.mixture
    if mixture is None:
        filled = replace(spec, fingerprint=manifests[0].fingerprint)
        return filled if filled.digest() == digest else None
    sizes = [BlockSizes.of(m.block_rows, m.block_decoded) for m in manifests]
    fingerprint = joined_hash(manifest.fingerprint for manifest in manifests)
    for window in (0, spec.window):  # each source's default window, then the window of the spec
        sources: list[SourceSpec] = []
        for source, size, manifest in zip(mixture.sources, sizes, manifests, strict=True):
            of = Shuffle(1, 1, 0)
            if spec.shuffle:
                of = shuffle_of(size, spec.lanes, window or source_window(size, spec.lanes, sizes))
            facts = {"fingerprint": manifest.fingerprint, "window": of.window, "ramp": of.ramp}
            sources.append(replace(source, **facts))
        mixed = replace(mixture, sources=tuple(sources))
        filled = replace(spec, fingerprint=fingerprint, mixture=mixed)
        if filled.digest() == digest:
            return filled
    return None
