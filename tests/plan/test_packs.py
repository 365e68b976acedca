"""Packs are those of docs/order.md, their number follows from the lengths alone, and no token is
lost.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from oracles import best_fit as oracle

from dataplane.model.changes import TakenDocument
from dataplane.model.errors import ConfigError
from dataplane.model.records import Exhausted, LongPolicy, PackPolicy, PackSpec
from dataplane.plan import advice
from dataplane.plan import packs as product
from dataplane.plan.balance import numbered
from dataplane.plan.loops import best_fit, best_fit_count
from dataplane.plan.mixed_order import MixedOrder, SourceOrder
from dataplane.plan.mixture import Mixed, plan_of
from dataplane.plan.order import Order
from dataplane.plan.packs import (
    KEYS_MAX,
    PACK_BITS,
    Packing,
    Packs,
    costs,
    documents_max,
    drawn_rows,
    pack_count,
    packing_of,
    packs_of,
    without,
)
from dataplane.plan.windows import distinct
from plan import golden, plain

LENGTHS = st.lists(st.integers(0, 40) | st.integers(0, 5), max_size=60)
KEYS = st.none() | st.integers(0, 2**64 - 1)


@st.composite
def forms(draw: st.DrawFn) -> PackSpec:
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    return PackSpec(
        "tokens",
        multiple * draw(st.integers(1, 12)),
        draw(st.sampled_from(PackPolicy)),
        draw(st.sampled_from(LongPolicy)),
        multiple=multiple,
        documents=draw(st.sampled_from([0, 1, 2, 3])),
        balanced=draw(st.booleans()),
    )


def _plain(lengths: list[int], form: PackSpec, keyed: int | None) -> list[list[tuple[int, ...]]]:
    packs = plain.packs(
        lengths,
        form.length,
        keyed,
        policy=form.policy.value,
        long=form.long.value,
        multiple=form.multiple,
        most=form.documents,
    )
    is_padded = form.policy is PackPolicy.PAD
    return plain.numbered(packs, form.multiple, is_padded=is_padded) if form.balanced else packs


def _listed(packs: Packs) -> list[list[tuple[int, ...]]]:
    pieces = list(zip(*packs.pieces.tolist(), strict=True))
    ends = packs.starts.tolist()
    return [pieces[ends[at] : ends[at + 1]] for at in range(len(packs))]


def _text(pack: list[tuple[int, ...]]) -> str:
    return " ".join(f"{row}:{begin}+{length}" for row, begin, length, _ in pack)


@given(LENGTHS, forms(), KEYS)
def test_packs_are_those_of_the_specification(
    lengths: list[int], form: PackSpec, keyed: int | None
) -> None:
    found = _listed(packs_of(np.array(lengths, np.int64), form, keyed))
    assert found == _plain(lengths, form, keyed)


@given(LENGTHS, forms(), KEYS)
def test_packs_are_those_of_the_oracle(
    lengths: list[int], form: PackSpec, keyed: int | None
) -> None:
    array = np.array(lengths, np.int64)
    rests, order = array % form.length, np.random.default_rng(len(lengths)).permutation(len(array))
    most = documents_max(form)
    expected = oracle.best_fit(rests, order, form.length, most)
    for found, wanted in zip(best_fit(rests, order, form.length, most), expected, strict=True):
        assert found.tolist() == wanted.tolist()
    assert best_fit_count(rests, form.length, most) == len(expected[1]) - 1


@given(LENGTHS, forms(), KEYS, st.randoms(use_true_random=False))
def test_the_number_of_packs_follows_from_the_lengths_in_any_order(
    lengths: list[int], form: PackSpec, keyed: int | None, drawn: np.random.Generator
) -> None:
    packs = packs_of(np.array(lengths, np.int64), form, keyed)
    others = list(lengths)
    drawn.shuffle(others)
    assert pack_count(np.array(others, np.int64), form) == len(packs)


@given(LENGTHS, forms(), KEYS)
def test_every_token_is_in_one_pack_at_most_and_lost_ones_are_counted(
    lengths: list[int], form: PackSpec, keyed: int | None
) -> None:
    array = np.array(lengths, np.int64)
    packs, told = packs_of(array, form, keyed), packing_of(array, form)
    seen = [
        (row, begin + token)
        for pack in _listed(packs)
        for row, begin, length, _ in pack
        for token in range(length)
    ]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= {
        (row, token) for row, length in enumerate(lengths) for token in range(length)
    }
    assert (told.tokens, told.packs) == (sum(lengths), len(packs))
    if form.policy is not PackPolicy.WRAP:
        assert told.packed_tokens == len(seen)
        if form.long is LongPolicy.FRAGMENT:
            assert len(seen) == sum(lengths)
    elif keyed is None or form.multiple == 1:
        assert told.packed_tokens == len(seen)
    else:
        assert abs(told.packed_tokens - len(seen)) < form.length


@given(LENGTHS, forms(), KEYS)
def test_pieces_lie_side_by_side_within_their_pack(
    lengths: list[int], form: PackSpec, keyed: int | None
) -> None:
    for pack in _listed(packs_of(np.array(lengths, np.int64), form, keyed)):
        end = 0
        assert 1 <= len(pack) <= documents_max(form)
        if form.policy is PackPolicy.PAD:
            continue
        for _, _, length, place in pack:
            assert place == end
            assert length > 0
            end += -(-length // form.multiple) * form.multiple
        assert end <= form.length


@given(LENGTHS, forms(), KEYS)
def test_a_padded_batch_has_equal_rows_within_its_tokens_and_padding_is_counted(
    lengths: list[int], form: PackSpec, keyed: int | None
) -> None:
    form, room, widths = replace(form, policy=PackPolicy.PAD, balanced=False), 0, []
    array = np.array(lengths, np.int64)
    for batch in _listed(packs_of(array, form, keyed)):
        width = max(-(-length // form.multiple) * form.multiple for _, _, length, _ in batch)
        assert [place for *_, place in batch] == [at * width for at in range(len(batch))]
        assert len(batch) * width <= form.length
        room += len(batch) * width
        widths += [width]
    whole = int((product.kept_tokens(array, form) // form.length).sum())
    assert widths[whole:] == sorted(widths[whole:], reverse=True)
    assert packing_of(array, form).room_tokens == room


def test_golden_packs() -> None:
    for (lengths, size, policy, long, multiple, keyed), expected in golden.PACKS.items():
        form = PackSpec("tokens", size, PackPolicy(policy), LongPolicy(long), multiple=multiple)
        found = _listed(packs_of(np.array(lengths, np.int64), form, keyed))
        assert " / ".join(map(_text, found)) == expected


def test_golden_packs_without_documents_that_were_taken_out() -> None:
    for (
        lengths,
        size,
        policy,
        long,
        multiple,
        keyed,
        gone,
    ), expected in golden.PACKS_WITHOUT.items():
        form = PackSpec("tokens", size, PackPolicy(policy), LongPolicy(long), multiple=multiple)
        documents, keys = (
            np.array(lengths, np.int64),
            {row: plain.key(7, 9, 0, row) for row in gone},
        )
        taken_out = [TakenDocument(*one) for one in keys.items()]
        found = without(packs_of(documents, form, keyed), documents, form, taken_out)
        assert " / ".join(map(_text, _listed(found))) == expected
        made = plain.packs(lengths, size, keyed, policy=policy, long=long, multiple=multiple)
        kept = plain.packed_tokens(lengths, size, long)
        assert plain.without(made, kept, keys, multiple, policy) == _listed(found)


@pytest.mark.parametrize("length", [2048, 8192])
def test_groups_of_128_packs_of_web_text_waste_less_than_one_percent(length: int) -> None:
    rng = np.random.default_rng(length)
    drawn = np.ceil(rng.lognormal(np.log(616) - 0.72, 1.2, 128 * length // 500)).astype(np.int64)
    found = packing_of(drawn, PackSpec("tokens", length))
    assert found.packed_tokens == found.tokens >= 128 * length
    assert found.room_tokens == found.packs * length
    assert found.padding < 0.01


def test_padded_batches_of_web_text_waste_less_than_two_percent() -> None:
    rng = np.random.default_rng(5)
    drawn = np.ceil(rng.lognormal(np.log(616) - 0.72, 1.2, 5000)).astype(np.int64)
    found = packing_of(drawn, PackSpec("tokens", 16_384, PackPolicy.PAD))
    assert found.padding < 0.02
    # Batches of 16 rows as they come, padded to the longest.
    rows = drawn[: 5000 // 16 * 16].reshape(-1, 16)
    assert rows.sum() < 0.3 * 16 * rows.max(axis=1).sum()


def test_users_hear_of_packs_that_waste_many_tokens() -> None:
    spec, many = PackSpec("tokens", 1000), 2_000_000
    good = Packing(many, 2_020, many, 0, 2_020_000)
    assert advice.packing(good, spec, 10) == ""
    poor = Packing(many, 2_500, many, 0, 2_500_000)
    assert advice.packing(poor, spec, 250).startswith("20.0% of the tokens in packs are padding")
    assert "blocks have 10.0 packs" in advice.packing(poor, spec, 250)
    assert advice.packing(Packing(many // 100, 25, many // 100, 0, 25_000), spec, 2) == ""
    cut = Packing(many, 1_800, 1_800_000, 0, 1_800_000)
    assert "10.0% of the tokens are dropped" in advice.packing(
        cut, PackSpec("tokens", 1000, PackPolicy.WRAP), 400
    )
    padded = PackSpec("tokens", 1000, PackPolicy.PAD)
    assert "blocks have only 10.0 padded batches" in advice.packing(poor, padded, 250)
    assert advice.packing(good, padded, 10) == ""
    assert advice.packing(cut, spec, 400) == ""  # those of long documents, as it was asked


Int64 = NDArray[np.int64]
LAYOUTS = st.lists(st.integers(1, 150), min_size=1, max_size=10).map(np.array)
LANES = st.integers(1, 9) | st.sampled_from([70, 200, 600])
WINDOWS, RAMPS, SEEDS = st.integers(1, 400), st.integers(0, 4), st.integers(0, 2**64 - 1)


def balanced(rows: Int64, seed: int, lanes: int, window: int, epoch: int, ramp: int) -> Order:
    return Order(rows, seed, True, lanes, window, epoch, ramp, balanced=True)


@given(LAYOUTS, SEEDS, LANES, WINDOWS, st.integers(0, 1), RAMPS)
def test_the_order_is_what_the_documentation_defines_and_its_inverse_leads_back(
    rows: Int64, seed: int, lanes: int, window: int, epoch: int, ramp: int
) -> None:
    order = balanced(rows, seed, lanes, window, epoch, ramp)
    positions = np.arange(order.sample_count)
    block, row = order.locate(positions)
    expected = plain.order(rows.tolist(), seed, lanes, window, epoch, ramp, balanced=True)
    assert list(zip(block.tolist(), row.tolist(), strict=True)) == expected
    assert len(set(expected)) == order.sample_count
    assert np.array_equal(order.position_of(block, row), positions)
    first, last = order.block_span(block)
    assert (first <= positions).all()
    assert (positions <= last).all()


@given(LAYOUTS, SEEDS, LANES, WINDOWS, st.lists(st.integers(0, 2000), max_size=20))
def test_positions_are_found_alike_in_any_company(
    rows: Int64, seed: int, lanes: int, window: int, some: list[int]
) -> None:
    order = balanced(rows, seed, lanes, window, 1, 0)
    chosen = np.array([at % order.sample_count for at in some], np.int64)
    whole = order.locate(np.arange(order.sample_count))
    found = balanced(rows, seed, lanes, window, 1, 0).locate(chosen)
    assert np.array_equal(found, [each[chosen] for each in whole])


@settings(max_examples=25)
@given(LAYOUTS, LAYOUTS, SEEDS, WINDOWS, RAMPS, st.integers(0, 2), st.integers(1, 20))
def test_batches_of_one_source_each_have_the_balanced_order_of_every_pass_over_it(
    first: Int64, second: Int64, seed: int, window: int, ramp: int, epoch: int, batch: int
) -> None:
    layouts, share = (first, second), 1 << 31
    counts = tuple(int(rows.sum()) for rows in layouts)
    length = batch * (-(-sum(counts) // batch))
    mixed = Mixed(counts, (share, share), (0, 0), 1, Exhausted.CYCLE, length, batch)
    sources = [SourceOrder(rows, window, ramp, balanced=True) for rows in layouts]
    order = MixedOrder(plan_of(mixed, epoch), sources, seed, True, 3)
    positions = np.arange(order.sample_count)
    source, sample = order.samples_at(positions)
    assert all(len(set(some)) == 1 for some in source.reshape(-1, batch).tolist())
    block, row = order.locate(positions)
    for at, rows in enumerate(layouts):
        own, begin = plain.key(seed, plain.SOURCE, at), at * len(first)
        passes = {
            number: plain.order(rows.tolist(), own, 3, window, number, ramp, balanced=True)
            for number in set((sample[source == at] // counts[at]).tolist())
        }
        for position in np.flatnonzero(source == at).tolist():
            number, place = divmod(int(sample[position]), counts[at])
            found = (int(block[position]) - begin, int(row[position]))
            assert found == passes[number][place]
    some = positions[:: max(1, len(positions) // 7)]
    for position in some.tolist():
        assert position in order.positions_of(int(block[position]), int(row[position]))


def test_golden_positions_of_balanced_packs() -> None:
    for (epoch, position), expected in golden.BALANCED.items():
        order = balanced(np.full(1000, 300), 7, 8, 5000, epoch, 2)
        block, row = order.locate(np.array([position]))
        assert (int(block[0]), int(row[0])) == expected


def test_any_numbers_in_a_row_have_packs_of_all_costs() -> None:
    found = numbered(np.random.default_rng(0).permutation(1000))
    assert sorted(found.tolist()) == list(range(1000))
    ranks = np.random.default_rng(0).permutation(1000)[found]
    for begin in range(0, 1000, 50):
        part = np.sort(ranks[begin : begin + 50])
        assert np.abs(part - np.arange(10, 1000, 20)).max() < 60


def step_costs(
    pack: PackSpec, blocks: int, shuffle: tuple[int, int], ranks: int, batch: int
) -> Int64:
    """The cost of each rank at each step, for documents as web pages are.

    Shapes:  result: int64[steps, ranks].
    """
    rng = np.random.default_rng(0)
    of_blocks = []
    for number in range(blocks):
        lengths = np.ceil(rng.lognormal(np.log(616) - 0.72, 1.2, 3300)).astype(np.int64)
        of_blocks.append(costs(packs_of(lengths, pack, number), pack))
    counts = np.array([len(each) for each in of_blocks])
    order = Order(counts, 7, True, *shuffle, 1, balanced=pack.balanced)
    block, row = order.locate(np.arange(order.sample_count))
    found = np.concatenate(of_blocks)[(np.cumsum(counts) - counts)[block] + row]
    whole = len(found) // (ranks * batch) * ranks * batch
    return found[:whole].reshape(-1, batch, ranks).sum(axis=1)


@pytest.mark.parametrize("policy", [PackPolicy.BEST_FIT, PackPolicy.PAD])
@pytest.mark.parametrize(
    ("lanes", "window", "ranks", "batch"),
    [(1, 10**6, 64, 1), (64, 600, 64, 1), (64, 150, 64, 1), (64, 600, 48, 2), (8, 3000, 256, 1)],
)
def test_ranks_have_packs_of_about_the_same_cost_at_each_step(
    policy: PackPolicy, lanes: int, window: int, ranks: int, batch: int
) -> None:
    worst = []
    for is_balanced in (False, True):
        pack = PackSpec("tokens", 8192, policy, balanced=is_balanced)
        found = step_costs(pack, 192, (lanes, window), ranks, batch)
        worst.append(float(found.max(axis=1).sum() / found.mean(axis=1).sum()))
    assert worst[0] > 2
    assert worst[1] - 1 < (worst[0] - 1) / 5


SEED = 7


def test_packs_of_one_dataset_have_a_key_for_each_block_and_epoch() -> None:
    order = Order(np.array([5, 3, 9]), SEED, True, 1, 4, 2)
    positions = np.arange(17)
    blocks, rows = order.locate(positions)
    used, index = distinct(blocks)
    drawn = drawn_rows(order, positions, blocks, rows, index)
    assert drawn.rows.tolist() == rows.tolist()
    assert drawn.keys == tuple((plain.key(SEED, plain.PACK, 2, block),) for block in used.tolist())


def test_packs_of_a_mixture_have_a_key_for_each_pass_over_their_source() -> None:
    counts, block_rows = (12, 5), (np.array([4, 8]), np.array([2, 3]))
    share = 1 << 31
    plan = plan_of(Mixed(counts, (share, share), (0, 0), 1, Exhausted.CYCLE, 40, 1), 1)
    order = MixedOrder(plan, [SourceOrder(rows, 3) for rows in block_rows], SEED, True, 1)
    positions = np.arange(order.sample_count)
    source, sample = order.samples_at(positions)
    blocks, rows = order.locate(positions)
    used, index = distinct(blocks)
    drawn = drawn_rows(order, positions, blocks, rows, index)
    assert any(len(each) > 1 for each in drawn.keys)
    for at, (of, which) in enumerate(zip(source.tolist(), sample.tolist(), strict=True)):
        own = plain.key(SEED, 7, of)
        key = plain.key(own, plain.PACK, which // counts[of], int(blocks[at]) - 2 * of)
        ordinal, row = divmod(int(drawn.rows[at]), 1 << PACK_BITS)
        assert (drawn.keys[index[at]][ordinal], row) == (key, rows[at])
    assert [len(set(each)) for each in drawn.keys] == [len(each) for each in drawn.keys]
    assert len(drawn.keys) == len(used)


def test_a_source_that_one_slab_would_read_too_often_is_refused() -> None:
    share = 1 << 31
    plan = plan_of(Mixed((1000, 1), (share, share), (0, 0), 1, Exhausted.CYCLE, 1000, 1), 0)
    sources = [SourceOrder(np.array([1000]), 10), SourceOrder(np.array([1]))]
    order = MixedOrder(plan, sources, SEED, True, 1)
    for count, is_refused in ((KEYS_MAX, False), (4 * KEYS_MAX, True)):
        positions = np.arange(count)
        blocks, rows = order.locate(positions)
        _, index = distinct(blocks)
        if is_refused:
            with pytest.raises(ConfigError, match="so few packs"):
                drawn_rows(order, positions, blocks, rows, index)
        else:
            drawn_rows(order, positions, blocks, rows, index)
