"""Packs are those of docs/order.md, their number follows from the lengths alone, and no token is
lost.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from oracles import best_fit as oracle

from dataplane.model.changes import TakenDocument
from dataplane.model.records import LongPolicy, PackPolicy, PackSpec
from dataplane.plan import advice
from dataplane.plan import packs as product
from dataplane.plan.loops import best_fit, best_fit_count
from dataplane.plan.packs import (
    Packing,
    Packs,
    documents_max,
    pack_count,
    packing_of,
    packs_of,
    without,
)
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


def test_documents_of_equal_length_change_packs_with_the_key() -> None:
    lengths = np.full(100, 5, np.int64)
    first, second = (packs_of(lengths, PackSpec("tokens", 16), keyed) for keyed in (1, 2))
    assert len(first) == len(second) == 34
    assert set(map(frozenset, np.split(first.pieces[0], first.starts[1:-1]))) != set(
        map(frozenset, np.split(second.pieces[0], second.starts[1:-1]))
    )
    assert product.packs_of(lengths, PackSpec("tokens", 16), None).pieces[0].tolist() == list(
        range(100)
    )


def test_users_hear_of_packs_that_waste_many_tokens() -> None:
    spec, many = PackSpec("tokens", 1000), 2_000_000
    good = Packing(many, 2_020, many, 0, 2_020_000)
    assert advice.packing(good, spec, 10) == ""
    poor = Packing(many, 2_500, many, 0, 2_500_000)
    assert advice.packing(poor, spec, 250).startswith("20.0% of the tokens in packs are padding")
    assert "blocks have 10.0 packs" in advice.packing(poor, spec, 250)
    assert advice.packing(Packing(many // 100, 25, many // 100, 0, 25_000), spec, 2) == ""
    cut = Packing(many, 1_800, 1_800_000, 0, 1_800_000)
    assert "10.0% of the tokens are in no pack" in advice.packing(
        cut, PackSpec("tokens", 1000, PackPolicy.WRAP), 400
    )
    padded = PackSpec("tokens", 1000, PackPolicy.PAD)
    assert "blocks have 10.0 padded batches" in advice.packing(poor, padded, 250)
    assert advice.packing(good, padded, 10) == ""
    assert advice.packing(cut, spec, 400) == ""  # those of long documents, as it was asked
