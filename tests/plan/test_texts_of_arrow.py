"""Texts, flags and lists of a part of an Arrow array are those of that part."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dataplane.plan import texts as text_module


@given(
    st.lists(st.tuples(st.text(max_size=5), st.booleans(), st.lists(st.integers(0, 9)))), st.data()
)
def test_a_part_of_an_array_has_its_own_values(rows, data):
    begin = data.draw(st.integers(0, len(rows)))
    some = rows[begin : data.draw(st.integers(begin, len(rows)))]
    names, flags, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    texts, bools, lists = (
        pa.array(values, kind)[begin : begin + len(some)]
        for values, kind in (
            (names, pa.string()),
            (flags, pa.bool_()),
            (numbers, pa.list_(pa.int64())),
        )
    )
    found = text_module.texts_of(texts)
    assert [*found] == [name for name, _, _ in some]
    assert found.starts[0] == 0
    assert text_module.flags_of(bools).tolist() == [flag for _, flag, _ in some]
    assert text_module.starts_of_lists(lists)[0] == 0
    assert text_module.values_of_lists(lists).tolist() == [n for _, _, each in some for n in each]
    again = text_module.lists(
        text_module.starts_of_lists(lists), text_module.values_of_lists(lists)
    )
    assert again.to_pylist() == [each for _, _, each in some]
