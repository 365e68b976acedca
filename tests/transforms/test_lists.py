"""Which lists may be padded and cut, and with what."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnSpec, Kind
from dataplane.transforms.lists import ListForm, check_lists, list_forms
from dataplane.transforms.options import column_options

SPECS = (
    ColumnSpec("id", Kind.FIXED, "int64"),
    ColumnSpec("tokens", Kind.PADDED, "int32"),
    ColumnSpec("flags", Kind.PADDED, "bool"),
    ColumnSpec("marks", Kind.RAGGED, "float16"),
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": {"id": 3}}, "max_length names 'id', which is not a column of lists"),
        ({"pad_value": {"gone": 3}}, "pad_value names 'gone'.*flags, marks, tokens"),
        ({"pad_value": {"tokens": 1.5}}, "column 'tokens' cannot hold 1.5.*int32"),
        ({"pad_value": {"marks": 1e6}}, r"column 'marks' cannot hold 1e\+06.*float16"),
        ({"pad_value": {"flags": 2}}, "column 'flags' cannot hold 2.*bool"),
    ],
)
def test_what_these_columns_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_lists(SPECS, column_options(**options))


def test_a_value_for_every_column_must_be_one_of_some_column() -> None:
    with pytest.raises(
        ConfigError,
        match=r"pad_value=1\.5: no column of lists can hold it; their types are bool, int32",
    ):
        check_lists(SPECS[:3], column_options(pad_value=1.5))
    with pytest.raises(ConfigError, match="no column of the batches has lists"):
        check_lists(SPECS[:1], column_options(max_length=3))


def test_only_lists_with_options_have_a_form() -> None:
    assert list_forms(SPECS, column_options()) == {}
    one = (1).to_bytes(4, "little")
    assert list_forms(SPECS, column_options(pad_value=1, max_length={"marks": 7})) == {
        1: ListForm(padding=one),
        2: ListForm(padding=b"\1"),
        3: ListForm(7),
    }
    assert list_forms(SPECS, column_options(max_length=5, truncation_side="left")) == {
        at: ListForm(5, keeps_end=True) for at in (1, 2, 3)
    }
