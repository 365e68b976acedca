"""Values without a tensor form: every Arrow layout gives the same values in one plain layout."""

from __future__ import annotations

import pyarrow as pa
import pytest
from arrow_layouts import cases
from foreign_values import comparable, exact_values, leaves

from dataplane.model.records import ColumnOptions, ListPolicy
from dataplane.transforms.canonical import canonical
from dataplane.transforms.columns import plan_columns
from dataplane.transforms.plain import object_type, objects

CASES = dict(cases())


def test_layouts_are_drawn_below_every_parent() -> None:
    assert len(CASES) > 350


@pytest.mark.parametrize("cut", [slice(None), slice(1, 3), slice(1, 2), slice(0, 0)], ids=str)
def test_any_layout_can_be_taken_from_joined_and_made_objects_of(cut: slice) -> None:
    for name, arrays in CASES.items():
        cut_out = [array[cut] for array in arrays]
        plain = [objects(array) for array in cut_out]
        for array in plain:
            array.validate(full=True)
            assert array.type.equals(object_type(arrays[0].type)), name
        joined = pa.concat_arrays(plain)
        backwards = list(reversed(range(len(joined))))
        found = joined.take(pa.array(backwards, pa.int64())).to_pylist()
        expected = [value for array in cut_out for value in exact_values(array)]
        assert comparable(found) == comparable([expected[row] for row in backwards]), name


def test_the_leaves_of_null_structs_are_null_whatever_their_layout() -> None:
    for name, arrays in CASES.items():
        for array in arrays:
            batch = pa.record_batch([array], ["x"])
            plan = plan_columns(batch.schema, ColumnOptions(lists=ListPolicy.RAGGED))
            plan_filled = plan_columns(
                batch.schema,
                ColumnOptions(
                    lists=ListPolicy.RAGGED,
                    fill_null=tuple((s.name, 0.0) for s in plan.specs if s.dtype),
                ),
            )
            found = canonical(batch, plan_filled, "url")
            expected = leaves(pa.Table.from_batches([batch]))
            assert found.schema.names == list(expected), name
            for column in found.columns:
                column.validate(full=True)
            for spec, column in zip(plan.specs, found.columns, strict=True):
                if not spec.dtype:
                    got = [v.encode() if isinstance(v, str) else v for v in expected[spec.name]]
                    if spec.kind.value == "object":
                        got = expected[spec.name]
                    assert comparable(column.to_pylist()) == comparable(got), (name, spec)
