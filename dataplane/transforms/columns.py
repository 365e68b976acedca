"""Map any Arrow schema to the columns of a batch, in the few forms that a slab has.

`plan_columns` decides once, from the dataset's schema and the job's options, which leaf columns
there are and which form each of them has; `canonical.py` converts decoded blocks to that form.
Structs become leaves with dotted names ("image.bytes"); dictionaries, run-end encodings and views
become their plain values; bools become bytes.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from dataplane.base.units import meant, some_of
from dataplane.formats.unsupported import refusal, unsupported_mark, unsupported_type
from dataplane.model.errors import ConfigError
from dataplane.model.records import ColumnOptions, ColumnSpec, Kind
from dataplane.transforms.annotations import marks_nulls, required_nodes
from dataplane.transforms.casts import cast_columns, check_casts
from dataplane.transforms.codes import CODE_TYPE, categories_in, check_codes, coded_columns
from dataplane.transforms.leaves import (
    Leaf,
    are_numbers,
    block_type,
    coded_leaf,
    is_number,
    leaves_of,
    spec_of,
)
from dataplane.transforms.stacks import stacks_of

_NO_OPTIONS = ColumnOptions()
_NAMES_SHOWN = 100


class LeafPart(enum.Enum):
    """The part of a leaf that a column delivers: its values, their codes, whether they are null, or
    the distinct values in the lists of a block (`codes.distinct_of`).
    """

    VALUES = enum.auto()
    CODES = enum.auto()
    DISTINCT = enum.auto()
    IS_NULL = enum.auto()


class ColumnPlan(Struct, frozen=True):
    """The mapping from a dataset's blocks to batch columns.

    `top_level` are the columns that a format must decode. `leaves`, `parts`, `specs` and `schema`
    describe the batch columns, in batch order; `schema` has one canonical Arrow field for each.
    `categories` are the sorted values of coded columns: complete in workers, and in other processes
    as far as they are known.
    """

    options: ColumnOptions
    top_level: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    parts: tuple[LeafPart, ...]
    specs: tuple[ColumnSpec, ...]
    schema: pa.Schema
    categories: Mapping[str, pa.Array] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        options: ColumnOptions,
        columns: Sequence[tuple[Leaf, LeafPart]],
        categories: Mapping[str, pa.Array] | None = None,
    ) -> Self:
        """Make the plan of these columns."""
        stored = [_spec(leaf, part, options) for leaf, part in columns]
        kinds = [_type(leaf, part) for leaf, part in columns]
        of_values = [
            leaf.type if part is LeafPart.VALUES else kind
            for (leaf, part), kind in zip(columns, kinds, strict=True)
        ]
        specs, types = cast_columns(stored, kinds, of_values, options)
        return cls(
            options,
            top_level=tuple(dict.fromkeys(leaf.top for leaf, _ in columns)),
            leaves=tuple(leaf for leaf, _ in columns),
            parts=tuple(part for _, part in columns),
            specs=tuple(specs),
            schema=pa.schema([(s.name, kind) for s, kind in zip(specs, types, strict=True)]),
            categories=categories or {},
        )


def plan_columns(
    schema: pa.Schema, options: ColumnOptions = _NO_OPTIONS, url: str = ""
) -> ColumnPlan:
    """Choose the leaves that `options.columns` names, or all of them; the name of a struct means
    all of its leaves. If the job marks nulls, each leaf that may have nulls is followed by its
    mark. `url` is that of a shard, for errors.

    Raises:  ConfigError: a column does not exist (lists those that do), is named twice, or cannot
    be in a batch; the name of a mark is taken.
    """
    _refuse_twins(options.columns)
    every = list(leaves_of(schema))
    leaves = _named(options.columns, every) if options.columns else every
    _refuse_unsupported(schema, every, leaves, url)
    _refuse_twins([leaf.name for leaf in leaves])
    codes = coded_columns(options)
    check_codes(codes, leaves, every)
    check_casts(options, leaves, every)
    categories, coded = categories_in(schema), set(codes)
    parts = [(leaf, LeafPart.CODES if leaf.name in coded else LeafPart.VALUES) for leaf in leaves]
    if options.distinct_in_lists:
        is_list = {leaf.name: coded_leaf(leaf) is not leaf for leaf in leaves}
        parts = [(leaf, LeafPart.DISTINCT if is_list[leaf.name] else part) for leaf, part in parts]
    if not marks_nulls(options):
        return ColumnPlan.of(options, parts, categories)
    marked = _marked(schema, options, leaves)
    return ColumnPlan.of(
        options,
        [
            (leaf, part)
            for leaf, value in parts
            for part in ((value, LeafPart.IS_NULL) if leaf.name in marked else (value,))
        ],
        categories,
    )


def changes_values(options: ColumnOptions) -> bool:
    """Return whether the values in batches differ from the stored ones, even if their types are
    equal. Every option that changes values is named here: a block without such changes is used as
    it is stored.
    """
    return bool(coded_columns(options) or stacks_of(options))


def is_plain_schema(schema: pa.Schema, plan: ColumnPlan) -> bool:
    """Return whether a plan takes all columns of a schema unchanged, and all are numbers."""
    return (
        schema.equals(plan.schema)
        and are_numbers(schema)
        and not changes_values(plan.options)
        and not marks_nulls(plan.options)
    )


def is_null_name(column: str) -> str:
    """Return the name of the column that marks the nulls of this one."""
    return f"{column}.is_null"


def _marked(schema: pa.Schema, options: ColumnOptions, leaves: Sequence[Leaf]) -> set[str]:
    """Return the leaves whose nulls are marked. If one leaf of a stack is marked, all are."""
    required = required_nodes(schema)
    marked = {leaf.name for leaf in leaves if not required.issuperset(leaf.row_nodes)}
    for stack in stacks_of(options):
        if not marked.isdisjoint(stack.columns):
            marked.update(stack.columns)
    names = {leaf.name for leaf in leaves}
    for name in marked:
        if is_null_name(name) in names:
            raise ConfigError(
                f'nulls="mask" adds a column {is_null_name(name)!r} for the nulls of {name!r}, but'
                " the dataset has a column of that name: leave one of them out with columns=[…], or"
                " rename it",
                field=name,
            )
    return marked


def _spec(leaf: Leaf, part: LeafPart, options: ColumnOptions) -> ColumnSpec:
    if part is LeafPart.VALUES:
        return spec_of(leaf, options.lists)
    if part is LeafPart.IS_NULL:
        return ColumnSpec(is_null_name(leaf.name), Kind.FIXED, "bool")
    if part is LeafPart.DISTINCT:
        return ColumnSpec(leaf.name, Kind.BYTES, "")
    if coded_leaf(leaf) is not leaf:
        return spec_of(replace(leaf, type=pa.list_(pa.int64())), options.lists)
    return ColumnSpec(leaf.name, Kind.FIXED, CODE_TYPE)


def _type(leaf: Leaf, part: LeafPart) -> pa.DataType:
    match part:
        case LeafPart.VALUES:
            return block_type(leaf.type)
        case LeafPart.CODES:
            return pa.int64() if coded_leaf(leaf) is leaf else pa.large_list(pa.int64())
        case LeafPart.DISTINCT:
            return pa.large_binary()
        case LeafPart.IS_NULL:
            return pa.uint8()


def _named(names: Sequence[str], leaves: Sequence[Leaf]) -> list[Leaf]:
    known: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        for name in (leaf.name, *leaf.structs):
            known[name].append(leaf)
    for name in names:
        if name not in known:
            have = shown(leaf.name for leaf in leaves)
            near = meant(name, known)
            text = f"{near} The dataset has" if near else "; the dataset has"
            raise ConfigError(f"there is no column {name!r}{text}: {have}", field=name)
    return [leaf for name in names for leaf in known[name]]


def shown(names: Iterable[str]) -> str:
    """Join names for an error message; only the first ones if there are many."""
    return some_of(list(names), _NAMES_SHOWN)


def _twins(names: Sequence[str]) -> list[str]:
    if len(set(names)) == len(names):
        return []
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _refuse_twins(names: Sequence[str]) -> None:
    if twins := _twins(names):
        raise ConfigError(f"column {twins[0]!r} occurs twice; list each one once", field=twins[0])


def _place(leaf: Leaf) -> str:
    field = leaf.name.removeprefix(f"{leaf.top}.")
    return f"field {field!r} of column {leaf.top!r}" if leaf.path else f"column {leaf.name!r}"


def _refuse_unsupported(
    schema: pa.Schema, leaves: Sequence[Leaf], chosen: Sequence[Leaf], url: str
) -> None:
    reasons = {
        field.name: mark for field in schema if field.metadata and (mark := unsupported_mark(field))
    }
    reasons |= {name: f"occurs twice ({name!r})" for name in _twins(schema.names)}
    twins: dict[str, list[str]] = {name: [] for name in _twins([leaf.name for leaf in leaves])}
    for leaf in leaves if twins else ():
        if leaf.name in twins:
            twins[leaf.name].append(_place(leaf))

    def reason(leaf: Leaf) -> str:
        if leaf.name in twins:
            places = " and ".join(dict.fromkeys(twins[leaf.name]))
            return f"occurs twice (as {places}: rename one of the two where the shards are written)"
        return reasons.get(leaf.top) or unsupported_type(leaf.type)

    if not reasons and not twins:
        chosen = [leaf for leaf in chosen if not is_number(leaf.type)]
    refused = {leaf.name: why for leaf in chosen if (why := reason(leaf))}
    if refused:
        raise refusal(refused, [leaf.name for leaf in leaves if not reason(leaf)], url)
