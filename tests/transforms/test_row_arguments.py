"""The arguments sample=, split= and limit=: what they mean, and how mistakes are told."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.transforms.options import view_of

UNIT = 1 << 32


@pytest.mark.parametrize(
    ("given", "view"),
    [
        ({}, View()),
        ({"sample": 0.25}, View(sample=UNIT // 4)),
        ({"sample": 1}, View(sample=UNIT)),
        ({"split": ("train", 0.75)}, View(split_to=3 * UNIT // 4)),
        ({"split": ["validation", 0.25]}, View(split_from=3 * UNIT // 4, split_to=UNIT)),
        ({"split": ("mine", 0.25, 0.5)}, View(split_from=UNIT // 4, split_to=UNIT // 2)),
        ({"split": ("Test", 1)}, View(split_to=UNIT)),
        ({"limit": 7}, View(limit=7)),
    ],
)
def test_rows_are_chosen(given: dict[str, Any], view: View) -> None:
    assert view_of(**given) == view


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sample": 0}, "share of all rows"),
        ({"sample": 1.5}, "share of all rows"),
        ({"sample": "0.1"}, "share of all rows"),
        ({"sample": float("nan")}, "share of all rows"),
        ({"sample": True}, "share of all rows"),
        ({"sample": 1e-12}, "share of all rows"),
        ({"split": "train"}, "first 99 %"),
        ({"split": ("train",)}, "first 99 %"),
        ({"split": ("train", 0)}, "first 99 %"),
        ({"split": ("train", 0.5, 0.25)}, "first 99 %"),
        ({"split": ("train", 0.1, 1.01)}, "first 99 %"),
        ({"split": ("mine", 0.5)}, "which end"),
        ({"split": ("mine", 0.5, 0.5 + 1e-12)}, "no rows"),
        ({"limit": 0}, "number of rows"),
        ({"limit": 2.5}, "number of rows"),
        ({"limit": True}, "number of rows"),
    ],
)
def test_a_mistake_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        view_of(**given)
    assert told.value.nouns["field"] in given
