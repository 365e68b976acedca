"""Nulls in columns whose tensors cannot hold them: the values that replace them, or an error.

Null floats become NaN, lists become empty, text and objects become None. For integers, bools and
times the job must give a value. Columns without one are reported before anything is read, all in
one error, as far as indexing counted nulls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from dataplane.base.units import meant, some_of
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind
from dataplane.plan.columns import NullCounts
from dataplane.plan.texts import Texts
from dataplane.transforms.annotations import marks_nulls
from dataplane.transforms.columns import ColumnPlan, LeafPart, shown
from dataplane.transforms.leaves import Leaf

_COLUMNS_SHOWN = 100


class Fills(Struct, frozen=True):
    """The values that replace nulls, by column; `everywhere` is for all other columns."""

    by_column: Mapping[str, float]
    everywhere: float | None

    @classmethod
    def of(cls, options: ColumnOptions) -> Fills:
        """Return the values that a job gives."""
        return cls(dict(options.fill_null), options.fill_null_all)

    def is_given(self, spec: ColumnSpec) -> bool:
        """Return whether the job gives a value for the nulls of this column."""
        if spec.name in self.by_column:
            return True
        return self.everywhere is not None and is_value_of(spec.dtype, self.everywhere)

    def value(self, spec: ColumnSpec, *, is_marked: bool = False) -> float | None:
        """Return the value for one column: NaN for floats without a value, None if its nulls must
        be refused. Marked nulls without a value become 0.
        """
        named = self.by_column.get(spec.name)
        if named is not None:
            return named
        if self.is_given(spec):
            return self.everywhere
        if "float" in spec.dtype:
            return math.nan
        return 0.0 if is_marked else None


def check_fills(plan: ColumnPlan) -> None:
    """Refuse values that a column cannot hold, and values for columns that do not exist.

    Raises:  ConfigError: names the refused values, and says what is allowed.
    """
    options = plan.options
    columns = zip(plan.specs, plan.parts, strict=True)
    specs = [spec for spec, part in columns if part is not LeafPart.IS_NULL]
    by_name = {spec.name: spec for spec in specs} if options.fill_null else {}
    for name, value in options.fill_null:
        if name not in by_name:
            raise ConfigError(
                f"fill_null names {name!r}, which is not a column of the batches; they have: "
                f"{shown(sorted(by_name))}{meant(name, by_name)}",
                field="fill_null",
            )
        dtype = by_name[name].dtype
        if not is_value_of(dtype, value):
            why = f"since it holds {dtype}: choose another value"
            if not dtype:
                why = f"since it holds {by_name[name].kind} values: its nulls arrive as None"
            raise ConfigError(
                f"fill_null: column {name!r} cannot hold {value:g}, {why}", field="fill_null"
            )
    everywhere = options.fill_null_all
    if everywhere is not None and not any(is_value_of(s.dtype, everywhere) for s in specs):
        held = sorted({spec.dtype or str(spec.kind) for spec in specs})
        raise ConfigError(
            f"fill_null={everywhere:g}: no column can hold it; they hold {', '.join(held)}",
            field="fill_null",
        )


def is_value_of(dtype: str, value: float) -> bool:
    """Return whether a numpy type holds this number: exactly, or as the nearest float. A finite
    number must not become infinity.
    """
    if not dtype:
        return False
    if "float" in dtype:
        return not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max)
    if dtype == "bool":
        return value in {0, 1}
    limits = np.iinfo(dtype)
    return value == value // 1 and limits.min <= value <= limits.max


def check_nulls(plan: ColumnPlan, nulls: NullCounts | None, urls: Texts | Sequence[str]) -> None:
    """Refuse columns that are known to have nulls but have no value to replace them. `urls` are the
    urls of the shards.

    Raises:  ConfigError: names all of these columns, with the fill_null to pass.
    """
    if nulls is None or not (nulls.shards >= 0).any():
        return
    fills = Fills.of(plan.options)
    found = NullsFound(plan)
    for spec, leaf, part in zip(plan.specs, plan.leaves, plan.parts, strict=True):
        if part is not LeafPart.VALUES or not spec.dtype:
            continue
        shards = nulls.shards[_nodes(spec, leaf, plan.options)]
        first = min((shard for shard in shards if shard >= 0), default=None)
        if first is not None:
            found.add(spec, fills.value(spec), urls[first])
    found.check("the dataset")


def _nodes(spec: ColumnSpec, leaf: Leaf, options: ColumnOptions) -> list[int]:
    """Return the field nodes whose nulls a tensor of this column cannot hold."""
    is_refused = spec.kind is Kind.FIXED and not marks_nulls(options)
    rows = leaf.row_nodes if is_refused else ()
    return [*rows, *range(*leaf.inner_nodes)]


class NullsFound:
    """The columns that have nulls in a dataset, or in a block."""

    def __init__(self, plan: ColumnPlan) -> None:
        self._options = plan.options
        self._fills: dict[str, float] = {}
        self._refused: list[tuple[ColumnSpec, str]] = []

    def add(self, spec: ColumnSpec, fill: float | None, url: str = "") -> None:
        """Note a column with nulls, the value that replaces them, if any, and a shard with
        a null.
        """
        if fill is None:
            self._refused.append((spec, f", the first in {url}" if url else ""))
        elif not math.isnan(fill):
            self._fills[spec.name] = fill

    def check(self, source: str) -> None:
        """Refuse columns with nulls and no value to replace them.   Raises:  ConfigError."""
        refused = self._refused
        if not refused:
            return
        columns = [f"{s.name!r} ({s.dtype}{where})" for s, where in refused]
        listed = some_of(columns, _COLUMNS_SHOWN)
        what = "column" if len(refused) == 1 else f"{len(refused)} columns:"
        where, masks = "in", '; add nulls="mask" to mark rows that were null'
        if marks_nulls(self._options):
            where, masks = "within lists of", '; nulls="mask" marks rows, not items of lists'
        raise ConfigError(
            f"{source} has nulls {where} {what} {listed}. Tensors of integers, bools and times "
            f"cannot hold nulls: pass {self._to_paste()}{masks}. Or choose other columns with "
            "columns=[…]",
            field=refused[0][0].name,
        )

    def _to_paste(self) -> str:
        """Return the `fill_null` to pass, including the values already passed."""
        if len(self._refused) > _COLUMNS_SHOWN:
            return "fill_null=0, which is for all columns"
        passed = dict(self._options.fill_null)
        if self._options.fill_null_all is not None:
            passed |= self._fills
        pairs = {name: _written(value) for name, value in passed.items()}
        pairs |= {s.name: "False" if s.dtype == "bool" else "0" for s, _ in self._refused}
        listed = (f"{json.dumps(name, ensure_ascii=False)}: {pairs[name]}" for name in pairs)
        return f"fill_null={{{', '.join(listed)}}}"


def _written(value: float) -> str:
    """Format a value as Python source."""
    if not math.isfinite(value):
        return f'float("{value}")'
    return str(int(value)) if value == int(value) else repr(value)
