"""Convert the arguments of a loader that choose rows to a View, checked as far as possible without
the dataset. Pure: a trainer links it.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from dataplane.errors import ConfigError
from dataplane.model import View
from dataplane.units import whole

_WHOLE = 1 << 32
_LIMIT_MAX = (1 << 62) - 1
_FIRST: Final = ("train", "training")
_LAST: Final = ("validation", "valid", "val", "dev", "test", "eval", "holdout")
_SPLIT_EXAMPLES = (
    'split=("train", 0.99) is the first 99 % by the hash of each row, split=("validation", 0.01) '
    'the last 1 %, and split=("test", 0.98, 0.99) the part between'
)


def view_of(
    *,
    where: str | None = None,
    sample: float | None = None,
    split: Sequence[object] | None = None,
    limit: int | None = None,
) -> View:
    """Convert these arguments of a DataLoader to a view.

    Raises:  ConfigError: one of them is invalid; says what is allowed.
    """
    lower, upper = (0, 0) if split is None else _split(split)
    return View(
        where="" if where is None else _canonical(where),
        sample=_sample(sample),
        split_from=lower,
        split_to=upper,
        limit=_limit(limit),
    )


def _canonical(where: str) -> str:
    # A late import: a loader starts its node sooner without it.
    from dataplane.transforms.where import canonical_where

    return canonical_where(where)


VIEW_ARGUMENTS: Final = tuple(inspect.signature(view_of).parameters)
"""The arguments of a DataLoader that choose rows."""


def split_of_text(text: str) -> tuple[object, ...]:
    """Convert the text of a command line, such as "train:0.99", to the argument `split`."""
    name, *shares = text.split(":")
    try:
        return (name, *map(float, shares))
    except ValueError:
        return (text,)


def _sample(given: object) -> int:
    if given is None:
        return 0
    share = _share(given)
    found = 0 if share is None else share * _WHOLE // 1
    if not 0 < found <= _WHOLE:
        raise ConfigError(
            f"sample={given!r:.80}: pass the share of all rows to read, such as 0.1; more than 0, "
            "and 1 at most",
            field="sample",
        )
    return int(found)


def _split(given: object) -> tuple[int, int]:
    """Return the range of hashes, in units of 2**-32. A share and its complement meet exactly."""
    wrong = ConfigError(f"split={given!r:.80}: {_SPLIT_EXAMPLES}", field="split")
    match given:
        case str() | bytes():
            raise wrong
        case [str(name), share] if (found := _share(share)) is not None:
            if name.lower() in _FIRST:
                lower, upper = Fraction(0), found
            elif name.lower() in _LAST:
                lower, upper = 1 - found, Fraction(1)
            else:
                known = ", ".join((*_FIRST, *_LAST))
                raise ConfigError(
                    f"split={given!r:.80}: {name!r} does not say which end of the dataset it takes "
                    f"({known} do): pass its range, as in split=({name!r}, 0.98, 0.99)",
                    field="split",
                )
        case [str(), begin, end]:
            ends = (_share(begin), _share(end))
            lower, upper = (Fraction(-1) if one is None else one for one in ends)
        case _:
            raise wrong
    if not 0 <= lower < upper <= 1:
        raise wrong
    first, last = (int(bound * _WHOLE // 1) for bound in (lower, upper))
    if first == last:
        raise ConfigError(f"split={given!r:.80}: a share this small has no rows", field="split")
    return first, last


def _share(given: object) -> Fraction | None:
    """Parse a number exactly as it is written: 0.1 is a tenth."""
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return None
    try:
        return Fraction(str(given))
    except ValueError:  # not finite
        return None


def _limit(given: object) -> int:
    if given is None:
        return 0
    found = None if isinstance(given, bool) else whole(given)
    if found is None or not 1 <= found <= _LIMIT_MAX:
        raise ConfigError(
            f"limit={given!r:.80}: pass the number of rows to read, 1 or more", field="limit"
        )
    return found
