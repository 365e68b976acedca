"""Options for lists in batches: their maximum length and their padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from dataplane.base.units import meant
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind, TruncationSide
from dataplane.transforms.columns import shown
from dataplane.transforms.nulls import is_value_of

LISTS = frozenset({Kind.PADDED, Kind.RAGGED})


class ListForm(Struct, frozen=True):
    """The form of one column's lists in a batch.

    Lists keep their first `length_max` values, or their last ones if `keeps_end`; 0 keeps all.
    `padding` is the bytes of one value, or b"" for zero. Lists are cut when rows are gathered, not
    when blocks are decoded, so that jobs with different limits share blocks.
    """

    length_max: int = 0
    keeps_end: bool = False
    padding: bytes = b""


AS_THEY_ARE = ListForm()


def list_forms(specs: Sequence[ColumnSpec], options: ColumnOptions) -> Mapping[int, ListForm]:
    """Return the form of each list column, by index, that is cut or not padded with zeros. Only
    padded lists have padding, and only a value that the column can hold: see `check_lists`.
    """
    if not _are_changed(options):
        return {}
    lengths, pads = dict(options.max_length), dict(options.pad_value)
    everywhere = options.pad_value_all
    forms = {}
    for at, spec in enumerate(specs):
        if spec.kind in LISTS:
            length = lengths.get(spec.name, options.max_length_all)
            keeps_end = length > 0 and options.truncation_side is TruncationSide.LEFT
            value = pads.get(spec.name)
            if value is None and everywhere is not None and is_value_of(spec.dtype, everywhere):
                value = everywhere
            padding = _bytes_of(value, spec.dtype) if value and spec.kind is Kind.PADDED else b""
            forms[at] = ListForm(length, keeps_end, padding)
    return {at: form for at, form in forms.items() if form != AS_THEY_ARE}


def check_lists(specs: Sequence[ColumnSpec], options: ColumnOptions) -> None:
    """Refuse values that a column cannot hold, and values for columns without lists.

    Raises:  ConfigError: names the refused values, and says what is allowed.
    """
    if not _are_changed(options):
        return
    lists = {spec.name: spec for spec in specs if spec.kind in LISTS}
    for argument, pairs in (("pad_value", options.pad_value), ("max_length", options.max_length)):
        for name, _ in pairs:
            if name not in lists:
                raise ConfigError(
                    f"{argument} names {name!r}, which is not a column of lists of numbers; the "
                    f"batches have: {shown(sorted(lists)) or 'none'}{meant(name, lists)}",
                    field=argument,
                )
    for name, value in options.pad_value:
        if not is_value_of(lists[name].dtype, value):
            raise ConfigError(
                f"pad_value: column {name!r} cannot hold {value:g}, since its lists are of type "
                f"{lists[name].dtype}: choose another value",
                field="pad_value",
            )
    _check_everywhere(list(lists.values()), options)


def _check_everywhere(lists: Sequence[ColumnSpec], options: ColumnOptions) -> None:
    if options.max_length_all and not lists:
        raise ConfigError(
            f"max_length={options.max_length_all}: no column of the batches has lists of numbers; "
            "leave it out",
            field="max_length",
        )
    value = options.pad_value_all
    if value is not None and not any(is_value_of(spec.dtype, value) for spec in lists):
        held = ", ".join(sorted({spec.dtype for spec in lists})) or "none"
        raise ConfigError(
            f"pad_value={value:g}: no column of lists can hold it; their types are {held}",
            field="pad_value",
        )


def _are_changed(options: ColumnOptions) -> bool:
    cut = options.max_length or options.max_length_all
    return bool(cut or options.pad_value or options.pad_value_all is not None)


def _bytes_of(value: float, dtype: str) -> bytes:
    exact = value if "float" in dtype else int(value)
    return np.array(exact).astype(dtype).tobytes()
