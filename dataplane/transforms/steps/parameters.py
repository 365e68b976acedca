"""Checks and normalises the parameters of steps. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from dataplane.base.units import whole
from dataplane.model.errors import ConfigError

Size = int | Sequence[int]

SIDE_MAX: Final = 1 << 14


def pair(given: Size, where: str) -> tuple[int, int]:
    """Return height and width, from one int or two.   Raises:  ConfigError: `given` is neither."""
    side = whole(given)
    if side is not None:
        return side, side
    sides = [whole(each) for each in given] if isinstance(given, Iterable) else []
    match sides:
        case [int(height), int(width)]:
            return height, width
    raise ConfigError(f"{where}: a size must be one int, or (height, width)", field="transforms")


def numbers(given: Sequence[float], count: int, name: str, where: str) -> tuple[float, ...]:
    """Check that `given` has `count` finite numbers.   Raises:  ConfigError: it does not."""
    try:
        found = tuple(float(value) for value in given)
    except (TypeError, ValueError):
        found = ()
    if len(found) != count or not all(math.isfinite(value) for value in found):
        raise ConfigError(
            f"{where}: {name} must be {count} finite number{'s' * (count > 1)}", field="transforms"
        )
    return found


def word(given: str, words: Sequence[str], where: str) -> str:
    """Check that a word is one of `words`.   Raises:  ConfigError: the word is another one."""
    if given not in words:
        raise ConfigError(f"{where}: choose one of {', '.join(words)}", field="transforms")
    return given


def sides_fault(sides: Sequence[int]) -> str:
    """Describe the problem of these sides of an image, in pixels; "" if they are valid."""
    if all(1 <= side <= SIDE_MAX for side in sides):
        return ""
    return f"every side must have 1 to {SIDE_MAX} pixels, not {tuple(sides)}"
