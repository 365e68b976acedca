"""The checksum of an epoch depends on everything but order and batching."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from dataplane_bench.model import CROP, ColumnType, Workload, WorkloadColumn
from dataplane_bench.trial.checksum import BatchRefused, Sum, check
from dataplane_bench.workloads import images
from hypothesis import assume, given
from hypothesis import strategies as st

COLUMNS = (
    WorkloadColumn("id", ColumnType.FIXED, "int64"),
    WorkloadColumn("weight", ColumnType.FIXED, "float32"),
    WorkloadColumn("pair", ColumnType.FIXED, "int16", (3,)),
    WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    WorkloadColumn("text", ColumnType.STRING),
)

samples = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.integers(-(1 << 63), (1 << 63) - 1),
            "weight": st.floats(width=32),
            "pair": st.tuples(*[st.integers(-(1 << 15), (1 << 15) - 1)] * 3),
            "tokens": st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5).map(tuple),
            "text": st.text(st.characters(exclude_categories=("Cs",)), max_size=5),
        }
    ),
    min_size=1,
    max_size=12,
)


def workload(columns=COLUMNS, batch_size=64):
    return Workload("mine", columns, batch_size, 100, Path("/nowhere"), "print", 1.0, ("mine",))


def batch_of(rows, width=0):
    """As a loader would collate them, padded to `width` at least."""
    lengths = [len(row["tokens"]) for row in rows]
    tokens = np.zeros((len(rows), max([width, *lengths])), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row["tokens"])] = row["tokens"]
    return {
        "id": torch.tensor([row["id"] for row in rows], dtype=torch.int64),
        "weight": torch.tensor([row["weight"] for row in rows], dtype=torch.float32),
        "pair": torch.tensor([row["pair"] for row in rows], dtype=torch.int16).reshape(-1, 3),
        "tokens": torch.from_numpy(tokens),
        "tokens.length": torch.tensor(lengths, dtype=torch.int64),
        "text": [row["text"] for row in rows],
    }


def digest(*batches, of=None):
    total = Sum(of or workload())
    for batch in batches:
        total.add(batch)
    return total.digest


def exact(row):
    """Compared by bits, as in the checksum."""
    return (row["id"], np.float32(row["weight"]).tobytes(), row["pair"], row["tokens"], row["text"])


@given(rows=samples, draw=st.data())
def test_order_and_batching_do_not_matter(rows, draw):
    shuffled = draw.draw(st.permutations(rows))
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    edges = [0, *cuts, len(rows)]
    parts = [shuffled[a:b] for a, b in itertools.pairwise(edges)]
    width = draw.draw(st.integers(0, 9))
    assert digest(*(batch_of(part, width) for part in parts)) == digest(batch_of(rows))


@given(rows=samples, draw=st.data())
def test_a_changed_missing_or_repeated_sample_is_seen(rows, draw):
    at = draw.draw(st.integers(0, len(rows) - 1))
    other = draw.draw(samples)[0]
    before = digest(batch_of(rows))
    assert digest(batch_of([*rows, rows[at]])) != before
    assert digest(batch_of([*rows[:at], *rows[at + 1 :]])) != before
    assume(exact(other) != exact(rows[at]))
    assert digest(batch_of([*rows[:at], other, *rows[at + 1 :]])) != before


@given(rows=samples, draw=st.data())
def test_a_column_from_another_sample_is_detected(rows, draw):
    name = draw.draw(st.sampled_from(["id", "weight", "pair", "tokens", "text"]))
    moved = [{**row, name: other[name]} for row, other in zip(rows, rows[::-1], strict=True)]
    assume(sorted(map(repr, map(exact, moved))) != sorted(map(repr, map(exact, rows))))
    assert digest(batch_of(moved)) != digest(batch_of(rows))


@given(
    left=st.lists(st.integers(-100, 100), min_size=1, max_size=8),
    right=st.lists(st.integers(-100, 100), min_size=1, max_size=8),
)
def test_swapped_columns_are_seen(left, right):
    assume(len(left) == len(right))
    assume(sorted(zip(left, right, strict=True)) != sorted(zip(right, left, strict=True)))
    columns = (
        WorkloadColumn("a", ColumnType.FIXED, "int64"),
        WorkloadColumn("b", ColumnType.FIXED, "int64"),
    )
    a, b = torch.tensor(left), torch.tensor(right)
    of = workload(columns)
    assert digest({"a": a, "b": b}, of=of) != digest({"a": b, "b": a}, of=of)


@given(rows=samples)
def test_only_the_chosen_columns_matter(rows):
    batch = batch_of(rows)
    assert digest({**batch, "more": torch.zeros(3)}) == digest(batch)


def changed(**columns):
    rows = [
        {"id": 1, "weight": 0.5, "pair": (1, 2, 3), "tokens": (1, 2), "text": "a"},
        {"id": 2, "weight": 1.5, "pair": (4, 5, 6), "tokens": (3,), "text": "b"},
    ]
    return {**batch_of(rows), **columns}


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (changed(tokens=torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)), "pads a list is not 0"),
        (changed(id=torch.tensor([1, 2], dtype=torch.int32)), "id: int32, not int64"),
        (changed(id=torch.tensor([1, 2, 3])), "columns differ in length"),
        (changed(id=np.array([1, 2])), "id: ndarray, not a torch tensor"),
        (changed(pair=torch.zeros((2, 4), dtype=torch.int16)), r"pair: shape \(2, 4\), not"),
        (changed(pair=torch.zeros((2, 1, 3), dtype=torch.int16)), "pair: shape"),
        (changed(weight=torch.zeros(2, dtype=torch.float64)), "weight: float64, not float32"),
        (changed(text=["a", b"b"]), "text: not a list of str"),
        (changed(text=("a", "b")), "text: not a list of str"),
        (changed(**{"tokens.length": torch.tensor([2, 3])}), "lengths of up to 3 in 2 places"),
        (changed(**{"tokens.length": torch.tensor([2])}), "and 1 lengths"),
        (changed(**{"tokens.length": None}), "tokens.length is missing"),
        ({"id": torch.tensor([1])}, "column weight is missing"),
    ],
)
def test_what_the_contract_does_not_say_is_refused(batch, says):
    with pytest.raises(BatchRefused, match=says):
        digest(batch)
    with pytest.raises(BatchRefused, match=says):
        check(batch, workload())


def test_a_batch_has_at_most_as_many_samples_as_requested():
    check(changed(), workload(batch_size=2))
    with pytest.raises(BatchRefused, match="2 samples, not 1"):
        check(changed(), workload(batch_size=1))
    with pytest.raises(BatchRefused, match="0 samples"):
        check(batch_of([]), workload())


def test_an_empty_batch_adds_nothing():
    assert digest(batch_of([]), changed()) == digest(changed())


def test_bytes_and_samples_are_counted():
    total = Sum(workload())
    total.add(changed())
    total.add(changed())
    assert total.sample_count == 4
    assert total.byte_count == 2 * 2 * (8 + 4 + 6 + 8 + 1)


def crops(labels, dtype=np.uint8, side=CROP):
    colours = images.colour_of_label(np.array(labels))
    pixels = np.broadcast_to(colours[:, None, None, :], (len(labels), side, side, 3))
    return {
        "id": torch.arange(len(labels)),
        "label": torch.tensor(labels, dtype=torch.int32),
        "image": torch.from_numpy(pixels.astype(dtype)),
    }


def test_generated_images_must_come_with_their_labels():
    made = dataclasses.replace(workload(images.RECIPE.columns), urls=())
    batch = crops([3, 77, 124])
    turned = crops([124, 77, 3]) | {"id": torch.tensor([2, 1, 0])}
    assert digest(batch, of=made) == digest(turned, of=made)
    for of in (made, workload(images.RECIPE.columns)):
        digest(batch, of=of)
    mixed = batch | {"image": batch["image"].flip(0)}
    with pytest.raises(BatchRefused, match="colour of label 124, and comes with label 3; so do 2"):
        digest(mixed, of=made)
    # A user's own images may have any colour.
    digest(mixed, of=workload(images.RECIPE.columns))


@pytest.mark.parametrize("batch", [crops([1], np.float32), crops([1], side=CROP - 1)])
def test_images_have_the_shape_and_type_of_the_contract(batch):
    with pytest.raises(BatchRefused, match="image: "):
        digest(batch, of=workload(images.RECIPE.columns))
