"""Stacked columns: the same numbers as the columns by themselves, side by side."""

from __future__ import annotations

import arrow_columns
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dataplane.model.config import JobSpec
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, Kind, StackSpec
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.stacks import Stack, stack_specs
from dataplane.worker.stacking import canonical_stacked, plan_stacked

FLOATS = ("float16", "float32", "float64")
numbers = st.sampled_from(
    ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", *FLOATS]
)


def table(dtypes: list[str], rows: int, seed: int, *, nulls: bool) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    columns = {}
    for i, dtype in enumerate(dtypes):
        values = random.integers(0, 2 if dtype == "bool" else 100, rows).astype(dtype)
        mask = random.random(rows) < 0.2 if nulls and dtype in FLOATS else None
        columns[f"c{i}"] = pa.array(values, mask=mask)
    return pa.record_batch(columns)


@settings(max_examples=60)
@given(
    dtypes=st.lists(numbers, min_size=1, max_size=7),
    rows=st.sampled_from([0, 1, 5, 300]),
    seed=st.integers(0, 99),
    target=st.sampled_from(["", *FLOATS]),
    data=st.data(),
)
def test_a_stack_is_its_columns_side_by_side(dtypes, rows, seed, target, data):
    dtypes = dtypes if target else [dtypes[0]] * len(dtypes)
    batch = table(["int64", *dtypes, "float32"], rows, seed, nulls=True)
    members = data.draw(st.permutations([f"c{i + 1}" for i in range(len(dtypes))]))
    stack = StackSpec("x", tuple(members), target)
    plan = plan_stacked(batch.schema, ColumnOptions(stack=(stack,)))
    last = f"c{len(dtypes) + 1}"
    assert [spec.name for spec in plan.specs] == ["c0", last, "x"]
    spec = plan.specs[-1]
    assert (spec.kind, spec.dtype, spec.shape) == (
        Kind.FIXED,
        target or dtypes[0],
        (len(dtypes),),
    )
    plain = canonical(batch, plan_columns(batch.schema), "")
    wanted = [plain.column(name).to_numpy().astype(spec.dtype) for name in members]
    found = canonical_stacked(batch, plan, "")
    assert found.schema == plan.schema
    assert found.column("c0").equals(plain.column("c0"))
    values = found.column("x").values.to_numpy().reshape(rows, len(dtypes))
    np.testing.assert_array_equal(values, np.stack(wanted, 1))


@settings(max_examples=40)
@given(drawn=st.integers(1, 9).flatmap(lambda rows: arrow_columns.batches(rows, 5)))
def test_any_column_that_is_a_number_can_be_stacked_and_any_other_says_why_not(drawn):
    batch, leaves = drawn
    specs = plan_columns(batch.schema).specs
    fills = tuple((leaf.name, 3.0) for leaf in leaves)
    for spec in specs:
        stack = (StackSpec("a new name", (spec.name,)),)
        if spec.kind is Kind.FIXED and not spec.shape:
            options = ColumnOptions((spec.name,), fill_null=fills, stack=stack)
            plan = plan_stacked(batch.schema, options)
            top = batch.select(list(plan.leaves.top_level))
            found = canonical_stacked(top, plan, "").column(0)
            wanted = canonical(top, plan.leaves, "").column(0)
            assert found.values.equals(wanted)
        else:
            with pytest.raises(ConfigError, match="not one number per sample"):
                plan_stacked(batch.schema, ColumnOptions((spec.name,), stack=stack))


SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("f", pa.float32()),
        ("text", pa.string()),
        ("some", pa.list_(pa.int32())),
        ("vector", pa.list_(pa.float32(), 3)),
        ("parts", pa.struct([("a", pa.int64())])),
    ]
)


@pytest.mark.parametrize(
    ("stack", "says"),
    [
        (StackSpec("x", ("i", "f")), 'Stack.*dtype="float32"'),
        (StackSpec("x", ("text",)), "'text' .string. is not one number"),
        (StackSpec("x", ("some",)), "'some' .padded. is not one number"),
        (StackSpec("x", ("vector",)), r"float32 of shape \[3\]"),
        (StackSpec("x", ("parts",)), "list its fields"),
        (StackSpec("x", ("nowhere",)), "there is no column 'nowhere'; the dataset has: i"),
        (StackSpec("f", ("i",)), "choose another"),
        (StackSpec("x", ("i", "f"), "int32"), "cannot hold"),
    ],
)
def test_what_cannot_be_stacked_says_what_to_do(stack, says):
    with pytest.raises(ConfigError, match=says):
        plan_stacked(SCHEMA, ColumnOptions(stack=(stack,)))


@pytest.mark.parametrize(
    "given",
    [["a"], {"x": "a"}, {"x": []}, {"x": [1]}, {1: ["a"]}, {"x": Stack(["a"], dtype="complex64")},
     {"x": ["a", "a"]}, {"x": ["a"], "y": ["a"]}],
)  # fmt: skip
def test_what_is_no_stack_is_refused_before_anything_is_opened(given):
    with pytest.raises(ConfigError):
        stack_specs(given)


def test_a_stack_may_use_columns_that_are_not_chosen_and_their_fill_values():
    batch = pa.record_batch(
        {"a": pa.array([1, None, 3]), "b": pa.array([4, 5, 6]), "c": pa.array(["x", "y", "z"])}
    )
    (stack,) = stack_specs({"x": ["b", "a"]})
    options = ColumnOptions(("c",), stack=(stack,))
    plan = plan_stacked(batch.schema, replace(options, fill_null=(("a", 9.0),)))
    assert [spec.name for spec in plan.specs] == ["c", "x"]
    assert plan.leaves.top_level == ("c", "b", "a")
    found = canonical_stacked(batch, plan, "")
    assert found.column("x").to_pylist() == [[4, 1], [5, 9], [6, 3]]
    with pytest.raises(ConfigError, match="fill_null"):
        canonical_stacked(batch, plan_stacked(batch.schema, options), "")


def test_a_stack_is_part_of_the_digest_and_jobs_without_one_keep_theirs():
    plain = JobSpec("f" * 32)
    one, other = (
        JobSpec("f" * 32, column_options=ColumnOptions(stack=(StackSpec("x", c),)))
        for c in (("a", "b"), ("b", "a"))
    )
    assert len({plain.digest(), one.digest(), other.digest()}) == 3
    assert [name for name, _, _ in one.differences(other)] == ["stack"]


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        ([1.0, None, 1e39, float("inf")], "float32", "1e+39"),
        ([1, 2, 70_000, 4], "float16", "70000"),
    ],
)
def test_a_number_that_would_become_infinite_in_a_stack_is_refused(values, dtype, shown):
    batch = pa.record_batch({"x": [0.0] * 4, "y": values})
    plan = plan_stacked(batch.schema, ColumnOptions(stack=(StackSpec("xy", ("x", "y"), dtype),)))
    with pytest.raises(ConfigError) as caught:
        canonical_stacked(batch, plan, "file:///a")
    assert f"file:///a: stack 'xy': row 2 of its block has {shown} in column 'y'" in str(
        caught.value
    )
    found = canonical_stacked(pa.record_batch({"x": [0.0], "y": pa.array(values[3:])}), plan, "")
    assert found.column("xy").to_pylist() == [[0.0, values[3]]]
