"""Call a user's collate function with each batch of a slab, and write the results into the slab.

Batches lie one after the other, each with all of its columns, since the size of a batch is known
only once it is made.

Invariants:
1. A batch depends only on its rows, its position in the epoch, its dp rank and the job's seed: not
   on other batches in the same slab, nor on the worker.
2. The function is not called for a batch without rows: its arrays are empty.
3. If rows may be replaced, and the function fails, the rows at which it fails alone are bad.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import astuple, replace

from dataplane.arena.slab_layout import SIDE_BYTES, TEXTS, aligned, side_count, texts
from dataplane.formats.faults import bad_rows, is_out_of_memory, text_of
from dataplane.model.errors import FunctionError
from dataplane.model.records import ColumnSpec, Kind
from dataplane.rpc.messages import Batch, Column
from dataplane.rpc.tasks import Assemble, Collation, Reading
from dataplane.transforms.images import delivered
from dataplane.transforms.made_columns import CollatedColumns
from dataplane.worker.columns import Bytes, RowIndex
from dataplane.worker.decoding import ReadDataset
from dataplane.worker.functions import (
    CalledAt,
    batch_generator,
    called,
    check_code,
    kind_of,
    loaded,
    results_of,
)
from dataplane.worker.gather import Gathered, Gathers, NamedSources

_ARGUMENT = "collate"
_DTYPES = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""The dtypes that a tensor may have, in this machine's byte order."""
_Array = np.ndarray[Any, np.dtype[Any]]
_GatherSome = Callable[[tuple[Batch, ...], RowIndex], Gathers]
FaultOf = Callable[[RowIndex], FunctionError | None]
"""Returns the error of the function for a batch of these rows; None if it takes them."""
StandIns = Callable[[RowIndex, Mapping[int, FunctionError], FaultOf], RowIndex]
"""Replaces the rows of a batch at which the function fails alone, and returns all rows."""


class _Given(msgspec.Struct, frozen=True):
    """The input of the function for one batch: the batch's rows in the index, and the memory of its
    columns. `at` is the index of the batch in `columns`.
    """

    batch: Batch
    rows: RowIndex
    memory: Bytes
    columns: tuple[Column, ...]
    at: int


class CollateGather:
    """Applies a function of the user to the columns that another object gathers for some batches.
    `specs` are the gathered columns. Before each call of the function, `tell` gets the step and the
    rows of the batch. `stand_ins` replaces rows at which the function fails.

    Shapes:  row_index: int32[rows, 2], batch after batch.
    """

    def __init__(
        self,
        collate: Collation,
        specs: Sequence[ColumnSpec],
        row_index: RowIndex,
        batches: Sequence[Batch],
        gather: _GatherSome,
        tell: Callable[[int, RowIndex], None] | None = None,
        stand_ins: StandIns | None = None,
    ) -> None:
        self._collate, self._specs, self._batches = collate, specs, tuple(batches)
        # Copy the index: it lies in memory that the trainer can write to.
        self._index = np.array(row_index, np.int32, order="C")
        self._gather, self._tell, self._stand_ins = gather, tell, stand_ins

    def into(self, slab: memoryview, expect: Callable[[int], None] | None = None) -> Gathered:
        """Implement Gather.into.

        Raises:  FunctionError: the function fails, or returns something else than it did for the
        first batch.  ConfigError: the function cannot be imported.
        """
        memory: Bytes = np.frombuffer(slab, np.uint8)
        made: list[list[_Place]] = []
        end = 0
        for each in self._given(self._batches, self._index, len(slab)):
            try:
                arrays = self._arrays_or_replaced(each)
            except FunctionError:
                if not made:
                    raise
                break  # deliver the batches before this one; the next slab begins with it
            places, after = _places(arrays, end)
            if after > len(slab):
                if not made:
                    return Gathered(0, bytes_needed=after)
                break
            if expect is not None:
                expect(after)
            for array, place in zip(arrays, places, strict=True):
                place.write(memory, array)
            made.append(places)
            end = after
        columns = tuple(
            Column(*map(tuple, zip(*map(astuple, of), strict=True)))
            for of in zip(*made, strict=True)
        )
        return Gathered(len(made), bytes_used=end, columns=columns)

    def _arrays_or_replaced(self, given: _Given) -> list[_Array]:
        try:
            return self._arrays(given)
        except FunctionError as fault:
            if self._stand_ins is None or fault.nouns.get("step") is None:
                raise  # in the latter case, the function cannot be imported
            rows, first = given.rows, fault

        def arrays(some: RowIndex) -> list[_Array]:
            batch = Batch(given.batch.step, len(some), len(some))
            return self._arrays(next(self._given((batch,), some, 0)))

        def fault_of(some: RowIndex) -> FunctionError | None:
            try:
                arrays(some)
            except FunctionError as fault:
                return fault
            return None

        whys = bad_rows(
            lambda start, stop: arrays(rows[start:stop]), len(rows), first, (FunctionError,),
            is_block=False,
        )  # fmt: skip
        faults = {row: FunctionError(why, **first.nouns) for row, why in whys.items()}
        return arrays(self._stand_ins(rows, faults, fault_of))

    def _arrays(self, given: _Given) -> list[_Array]:
        """Return the arrays of one batch, one for each column."""
        collate, wanted, batch = self._collate, self._collate.columns, given.batch
        if not batch.rows and wanted:
            return [np.zeros(spec.shape, spec.dtype) for spec in wanted]
        position = collate.cursor + batch.step * collate.global_batch
        step = position // collate.global_batch
        if self._tell is not None:
            self._tell(step, given.rows)
        function = loaded(_ARGUMENT, collate.function)
        columns: dict[str, Any] = {}
        for spec, column in zip(self._specs, given.columns, strict=True):
            columns |= _numpy(spec, column, given)
        generator = None
        if function.takes_generator:
            key = collate.seed, collate.epoch, position, collate.dp_rank
            generator = batch_generator(*key)
        at = CalledAt(_ARGUMENT, collate.function, step=step)
        if wanted:
            check_code(function, collate.code, at)
        returned = called(function, columns, generator, at)
        with results_of(at):
            if wanted:
                return _as_before(returned, wanted, at)
            return [_found(returned, batch.rows, function.code, at)]

    def _given(self, batches: tuple[Batch, ...], index: RowIndex, room: int) -> Iterator[_Given]:
        """Yield the function's inputs, batch after batch. Batches are gathered together if they fit
        into `room` bytes, but at least one at a time.
        """
        first, left = 0, batches
        while left:
            gather = self._gather(left, index[first:])
            buffer = pa.allocate_buffer(room)
            made = gather.into(memoryview(buffer))
            if not made.batch_count:
                buffer = pa.allocate_buffer(made.bytes_needed)
                made = gather.into(memoryview(buffer))
            memory: Bytes = np.frombuffer(buffer, np.uint8)
            for at, batch in enumerate(left[: made.batch_count]):
                rows = index[first : first + batch.rows]
                yield _Given(batch, rows, memory, made.columns, at)
                first += batch.rows
            left = left[made.batch_count :]


def slab_gather(
    dataset: ReadDataset,
    body: Assemble,
    row_index: RowIndex,
    gather: Callable[[Assemble, RowIndex], Gathers],
    tell: Callable[[Reading], None],
    stand_ins: StandIns,
) -> Gathers:
    """Return the object that gathers this task's slab. `gather` collects the rows; the column of
    sources is added, and the user's function applied, if the task asks for them. `tell` reports
    progress. `stand_ins` replaces rows at which the function fails, if the job asks for that.
    """

    def gathered(batches: tuple[Batch, ...], rows: RowIndex) -> Gathers:
        found = gather(replace(body, batches=batches), rows)
        if not body.names_sources:
            return found
        return NamedSources(found, body.sources, rows, batches, body.part)

    def say(step: int, rows: RowIndex) -> None:
        tell(Reading(body.block_keys[rows[0, 0]], step=step))

    if body.collate is None:
        return gathered(body.batches, row_index)
    specs, told = _gathered_columns(dataset, body), say if body.say_where else None
    return CollateGather(
        body.collate,
        specs,
        row_index,
        body.batches,
        gathered,
        told,
        stand_ins if dataset.replaces and dataset.packs is None else None,
    )


def _gathered_columns(dataset: ReadDataset, body: Assemble) -> tuple[ColumnSpec, ...]:
    specs = tuple(dataset.plan.specs)
    if dataset.packs is not None:
        specs = dataset.packs.batch_specs
    if body.render is not None:
        specs = delivered(specs, body.render.images)
    name = "" if body.collate is None else body.collate.source_column
    return (*specs, ColumnSpec(name, Kind.FIXED, "int32")) if body.names_sources else specs


# -- what a function gets ----------------------------------------------------------------------


def _numpy(spec: ColumnSpec, column: Column, given: _Given) -> dict[str, Any]:
    """Return one column of one batch as a loader without tensors delivers it."""
    name, at, memory, rows = spec.name, given.at, given.memory, given.batch.rows
    start = column.values[at]
    if spec.kind is Kind.FIXED:
        return {name: _view(memory, start, spec.dtype, (rows, *spec.shape))}
    if spec.kind is Kind.ARRAY:
        shape = _view(memory, column.lengths[at], "int64", (len(spec.shape),))
        return {name: _view(memory, start, spec.dtype, tuple(shape.tolist()))}
    width = column.width[at]
    if spec.kind is Kind.OBJECT:
        if not width:
            return {name: []}
        stream = memory[start : start + width]
        return {name: pa.ipc.open_stream(stream).read_all().column(0).to_pylist()}
    if spec.kind in TEXTS:
        return {name: texts(memory, column, at, rows).listed(spec)}
    side = _view(memory, column.lengths[at], "int64", (side_count(spec.kind, rows),))
    if spec.kind is Kind.PADDED:
        return {name: _view(memory, start, spec.dtype, (rows, width)), f"{name}.length": side}
    values = _view(memory, start, spec.dtype, (width,))
    ends = side.tolist()
    return {name: [values[a:b] for a, b in itertools.pairwise(ends)]}


def _view(memory: Bytes, start: int, dtype: str, shape: tuple[int, ...]) -> _Array:
    return (
        np.ndarray(shape, np.dtype(dtype), memory, start)
        if 0 not in shape
        else np.empty(shape, dtype)
    )


# -- what it returns ---------------------------------------------------------------------------


def _found(returned: Mapping[str, object], rows: int, code: str, at: CalledAt) -> _Array:
    """Return the description of the first batch's columns, as JSON."""
    arrays = {name: _array(given, name, at) for name, given in returned.items()}
    specs = tuple(
        ColumnSpec(name, Kind.ARRAY, array.dtype.name, (0,) * array.ndim)
        for name, array in arrays.items()
    )
    size = sum(aligned(array.nbytes) for array in arrays.values())
    told = msgspec.json.encode(CollatedColumns(specs, size // max(rows, 1) + 1, code))
    return np.frombuffer(told, np.uint8)


def _as_before(
    returned: Mapping[str, object], wanted: Sequence[ColumnSpec], at: CalledAt
) -> list[_Array]:
    names = [spec.name for spec in wanted]
    if set(returned) != set(names):
        raise at.fault(
            f"returned the columns {', '.join(returned)}, and {', '.join(names)} for the first "
            "batch of the dataset: it must return the same columns for each batch"
        )
    return [_typed(returned[spec.name], spec, at) for spec in wanted]


def _typed(given: object, spec: ColumnSpec, at: CalledAt) -> _Array:
    """Convert an array to the type and the number of dimensions of the first batch."""
    array, dtype = _array(given, spec.name, at), np.dtype(spec.dtype)
    if array.dtype != dtype and not hasattr(given, "dtype"):
        # Python's numbers have no fixed type: convert them if that changes no value. Compare in
        # both directions, since a comparison with floats makes floats of whole numbers, too.
        with np.errstate(over="ignore", invalid="ignore"):
            changed = array.astype(dtype)
            is_same = np.array_equal(changed, array)
            is_same = is_same and np.array_equal(changed.astype(array.dtype), array)
        if is_same:
            array = changed
    if array.dtype != dtype or array.ndim != len(spec.shape):
        raise at.fault(
            f"returned {array.dtype.name} of {array.ndim} dimensions in column {spec.name!r}, and "
            f"{spec.dtype} of {len(spec.shape)} for the first batch of the dataset: return numpy "
            "arrays of the same types for each batch"
        )
    return array


def _array(given: object, name: str, at: CalledAt) -> _Array:
    """Convert the result to an array of numbers, in C order."""
    if type(given) is np.ndarray and given.dtype in _DTYPES and given.flags.c_contiguous:
        return given
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not (hasattr(given, "__array__") or is_list or isinstance(given, numbers.Number)):
        raise at.fault(
            f"returned {kind_of(given)} in column {name!r}: return a numpy array, or what numpy "
            "takes as one"
        )
    try:
        array = np.asarray(given)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        advice = ". Pad lists of different lengths" if is_list else ""
        raise at.fault(
            f"returned {kind_of(given)} in column {name!r}, of which numpy makes no array: "
            f"{text_of(error):.300}{advice}"
        ) from error
    native = array.dtype.newbyteorder("=")
    if native not in _DTYPES:
        raise at.fault(
            f"returned {kind_of(given)} in column {name!r}, of type {array.dtype}: tensors have "
            "numbers or bools. Leave it out, or return numbers that stand for it"
        )
    return array.astype(native, order="C", copy=False)


# -- where it goes -----------------------------------------------------------------------------


class _Place(msgspec.Struct, frozen=True):
    """The place of one batch's array: values and shape, in bytes from the slab's start, and the
    number of values.
    """

    values: int
    shape: int
    count: int

    def write(self, memory: Bytes, array: _Array) -> None:
        """Copy the array to this place."""
        shape = np.array(array.shape, np.int64).view(np.uint8)
        memory[self.shape : self.shape + len(shape)] = shape
        if self.count:
            np.ndarray(array.shape, array.dtype, memory, self.values)[...] = array


def _places(arrays: Sequence[_Array], end: int) -> tuple[list[_Place], int]:
    """Return the places of a batch's arrays from `end` on, and where the batch ends."""
    places = []
    for array in arrays:
        values = aligned(end)
        shape = values + aligned(array.nbytes)
        places.append(_Place(values, shape, array.size))
        end = shape + array.ndim * SIDE_BYTES
    return places, end
