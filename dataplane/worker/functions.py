"""Calls a user's functions in a worker, and checks what they return.

Invariants:
1. Each worker imports a module, and instantiates a class, only once: at first use.
2. Whatever a function raises becomes one FunctionError, with its traceback as text. Only
   out-of-memory errors are passed on unchanged.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct

from dataplane.base.units import IMPORT_PATH_VARIABLE
from dataplane.formats.conform import check_values
from dataplane.formats.faults import is_out_of_memory, text_of
from dataplane.formats.unsupported import unsupported_type
from dataplane.model.errors import ConfigError, DataplaneError, FunctionError
from dataplane.plan.permute import Domain, key
from dataplane.transforms.functions import GENERATOR, importing
from dataplane.transforms.plain import is_any_list

_TRACEBACK_MAX = 6000
# A call of sys.exit counts as a failure. KeyboardInterrupt does not occur: workers ignore SIGINT.
_FAILURES = (Exception, SystemExit)
_NUMBER = re.compile(r"\b(u?int\d+|halffloat|float|double)\b")


class UserFunction(Struct, frozen=True):
    """An imported function, or an instance of an imported class. `reads` names the stored columns
    that the function takes; None means all. `code` is a hash of the file that defines the function
    and of its attribute `version`.
    """

    name: str
    call: Callable[..., Any]
    takes_generator: bool
    reads: tuple[str, ...] | None
    code: str = ""


class CalledAt(Struct, frozen=True):
    """Where a function is called, for errors: at a block, or at the batch of a step."""

    argument: str
    function: str
    shard: str | None = None
    block: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        block = "" if self.block is None else f", block {self.block}"
        place = f"{self.shard}{block}" if self.step is None else f"the batch of step {self.step}"
        return f"{place}: {self.argument}={self.function!r}"

    def fault(self, why: str) -> FunctionError:
        """Return the error that says `why` about this call."""
        nouns = {"shard": self.shard, "block": self.block, "step": self.step}
        given = {name: noun for name, noun in nouns.items() if noun is not None}
        return FunctionError(_sendable(f"{self} {why}"), function=self.function, **given)


# -- import ------------------------------------------------------------------------------------


@functools.cache
def loaded(argument: str, name: str) -> UserFunction:
    """Import the function of this name, which its module must define.

    Raises:  ConfigError: the function cannot be imported, or is defined elsewhere.
    """
    _use_import_path()
    module, _, path = name.partition(":")
    try:
        with importing(argument, name):
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if f"{module}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{argument}={name!r}: workers find no module {missing!r}. They look where the "
                "trainer that started the node does (its sys.path and working directory), and "
                "those of `dataplane serve` in the environment of that command: install the "
                f"package there, or add its folder to PYTHONPATH. They looked in {sys.path}",
                field=argument,
            ) from error
        raise _not_imported(argument, name, error) from error
    except _FAILURES as error:
        raise _not_imported(argument, name, error) from error
    content = _content_of(module)
    found = _defined(argument, name, module, path)
    try:
        call = found() if isinstance(found, type) else found
        if not callable(call):
            raise ConfigError(
                f"{argument}={name!r} cannot be called: it is {_shown(call)}", field=argument
            )
        reads, takes_generator = _reads(call, argument, name), _takes_generator(call)
        _check_arguments(call, argument, name, takes_generator=takes_generator)
        return UserFunction(name, call, takes_generator, reads, _code(content, call))
    except ConfigError:
        raise
    except _FAILURES as error:
        raise _not_imported(argument, name, error) from error


def _defined(argument: str, name: str, module: str, path: str) -> Any:
    """Return the function, class or object that an imported module itself defines under this name.
    Names that the module only imports are rejected: permission to call the functions of a module
    must not extend to everything that the module imports. For the same reason, neither attributes
    of an object nor names made by the module's `__getattr__` are looked up.

    Raises:  ConfigError: there is no such name, or it is defined elsewhere.
    """
    own = vars(sys.modules[module])
    where = f"{argument}={name!r}: module {module!r} ({own.get('__file__', '')})"
    if path not in own:
        raise ConfigError(f"{where} has no {path!r}", field=argument)
    found = own[path]
    # An instance has no `__qualname__`: check where its class is defined.
    is_named = hasattr(found, "__qualname__")
    kind = found if is_named else type(found)
    home, label = str(kind.__module__), str(kind.__qualname__)
    if isinstance(found, ModuleType):
        home, label = found.__name__, "a module"
    if home != module or (is_named and label != path) or path.startswith("__"):
        raise ConfigError(
            f"{where} does not define {path!r}: it is {label} of {home!r}. Workers call only what "
            f"the named module itself defines by def or class, under its own name: write such a "
            "function there, or name the module that does",
            field=argument,
        )
    return found


def _use_import_path() -> None:
    """Search for modules in the same folders, and in the same order, as the trainer that started
    this node.
    """
    given = os.environ.get(IMPORT_PATH_VARIABLE)
    if given:
        sys.path[:] = json.loads(given)


def _not_imported(argument: str, name: str, error: BaseException) -> BaseException:
    if is_out_of_memory(error):
        return error
    words = f"{argument}={name!r} could not be imported: {_told(error)}"
    return FunctionError(_sendable(words), function=name)


def _takes_generator(call: Callable[..., Any]) -> bool:
    try:
        return GENERATOR in inspect.signature(call).parameters
    except (TypeError, ValueError):  # a function in C without a signature
        return False


def _check_arguments(
    call: Callable[..., Any], argument: str, name: str, *, takes_generator: bool
) -> None:
    """Check that a function can be called with the arguments that functions get.

    Raises:  ConfigError: it needs others.
    """
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    try:
        signature.bind({}, **({GENERATOR: None} if takes_generator else {}))
    except TypeError as error:
        raise ConfigError(
            f"{argument}={name!r} takes other arguments than a function gets ({error}): columns, "
            f"and, if it wants random numbers, a second argument with the name {GENERATOR!r}",
            field=argument,
        ) from error


@functools.cache
def _content_of(module: str) -> bytes:
    """Return the content of the file of an imported module. The file is read only once, right after
    the import: all functions of the module then get the same hash, even if the file changes later.
    """
    file = getattr(sys.modules[module], "__file__", None)
    try:
        return b"" if file is None else Path(file).read_bytes()
    except OSError:  # the module is in an archive
        return b""


def _code(content: bytes, call: Callable[..., Any]) -> str:
    """Return 16 hex digits: a hash of a module's file, and of the function's version if it
    has one.
    """
    version = repr(getattr(call, "version", None)).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(content + version, digest_size=8).hexdigest()


def check_code(function: UserFunction, before: str, at: CalledAt) -> None:
    """Check that a function has the version with which the job was opened. A worker that replaces
    another imports the module again, and the file may have been edited meanwhile.

    Raises:  FunctionError: the version differs.
    """
    if before != function.code:
        raise at.fault(
            "is not the function with which this job was opened: the file of its module, or its "
            "`version`, has changed since, and a job has one version of its functions. Start the "
            "run again, and if it uses a node of `dataplane serve`, that node before it"
        )


def _reads(call: Callable[..., Any], argument: str, name: str) -> tuple[str, ...] | None:
    given = getattr(call, "reads", None)
    if given is None:
        return None
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    names = tuple(given) if is_list else (None,)
    if not all(isinstance(one, str) for one in names):
        raise ConfigError(
            f"{argument}={name!r}: its attribute `reads` names the columns that it takes, as a "
            f"list of str, and not {_shown(given)}",
            field=argument,
        )
    return names


def _shown(given: object) -> str:
    """Return a short form of a user's object."""
    try:
        return f"{given!r:.80}"
    except _FAILURES:
        return kind_of(given)


def _sendable(text: str) -> str:
    """Escape lone surrogates in a text: a message cannot contain them."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- call --------------------------------------------------------------------------------------


def block_generator(
    seed: int, shard: int, block: int, epoch: int | None = None
) -> np.random.Generator:
    """Return the random generator of a map for one block: the same on every node, and in every
    epoch, unless one is given.
    """
    drawn = (shard, block) if epoch is None else (shard, block, epoch)
    return _generator(key(seed, Domain.MAP, *drawn))


def batch_generator(seed: int, epoch: int, position: int, dp_rank: int) -> np.random.Generator:
    """Return the random generator of a collate function for one batch: that of a rank, for the step
    that begins at this position of the epoch.
    """
    return _generator(key(seed, Domain.COLLATE, epoch, position, dp_rank))


def _generator(drawn: int) -> np.random.Generator:
    # `np.random` is imported at first use, which fails if several threads come first.
    from numpy.random import Generator, Philox

    return Generator(Philox(key=drawn))


@contextmanager
def user_code(at: CalledAt) -> Iterator[None]:
    """Convert errors of a user's code.

    Raises:  FunctionError: the user's code has failed; with its traceback.
    """
    try:
        yield
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise at.fault(f"failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Format the error, with its traceback from the user's first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    try:
        lines = "".join(traceback.format_exception(type(error), error, frames)).strip()
    except _FAILURES:  # formatting the error calls code of the user, which may fail, too
        lines = "".join(traceback.format_tb(frames)).strip()
    if len(lines) > _TRACEBACK_MAX:
        lines = f"{lines[: _TRACEBACK_MAX // 2]}\n  …\n{lines[-_TRACEBACK_MAX // 2 :]}"
    return f"{type(error).__name__}: {text_of(error):.500}\n{lines}"


_OWN_FILES = frozenset({__file__, importlib.__file__, "<frozen importlib._bootstrap>"})


def called(
    function: UserFunction,
    columns: Mapping[str, object],
    generator: np.random.Generator | None,
    at: CalledAt,
) -> Mapping[str, object]:
    """Call the function, and return its columns, at least one.

    Raises:  FunctionError: the function fails, or does not return columns.
    """
    with user_code(at):
        if function.takes_generator:
            returned = function.call(columns, generator=generator)
        else:
            returned = function.call(columns)
    with results_of(at):
        return _columns_by_name(returned, at)


@contextmanager
def results_of(at: CalledAt) -> Iterator[None]:
    """Convert errors of a user's code while its results are examined.

    Raises:  FunctionError: the user's code has failed.
    """
    try:
        yield
    except DataplaneError:
        raise
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        raise at.fault(f"returned what cannot be used: {_told(error)}") from error


def _columns_by_name(returned: object, at: CalledAt) -> dict[str, object]:
    if isinstance(returned, pa.RecordBatch | pa.Table):
        names = returned.schema.names
        if len(set(names)) < len(names):
            raise at.fault(f"returned two columns of one name: {', '.join(names)}")
        returned = dict(zip(names, returned.columns, strict=True))
    if not isinstance(returned, Mapping):
        raise at.fault(f"returned {kind_of(returned)}, and not a dict of columns by name")
    # Read the mapping only once: a user's mapping may return other values the next time.
    columns = {name: returned[name] for name in returned}
    for name in columns:
        if not isinstance(name, str) or name != _sendable(name):
            raise at.fault(
                f"returned a dict with the key {_shown(name)}, and not a dict of columns by name"
            )
    if not columns:
        raise at.fault("returned no column")
    return columns


# -- columns -----------------------------------------------------------------------------------


def mapped(
    function: UserFunction,
    batch: pa.RecordBatch,
    generator: np.random.Generator | None,
    at: CalledAt,
    schema: pa.Schema | None = None,
    *,
    resizes: bool = False,
) -> pa.RecordBatch:
    """Apply the function to a block, and check the result against this schema, or against its own.

    Raises:  FunctionError: the function fails, or returns other columns, types or, unless it
    `resizes`, another number of rows.
    """
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    returned = called(function, columns, generator, at)
    with results_of(at):
        return _as_block(returned, None if resizes else batch.num_rows, at, schema)


def _as_block(
    returned: Mapping[str, object], row_count: int | None, at: CalledAt, schema: pa.Schema | None
) -> pa.RecordBatch:
    if schema is not None and set(returned) != set(schema.names):
        raise at.fault(
            f"returned the columns {', '.join(returned)}, and {', '.join(schema.names)} for the "
            "first rows of the dataset: it must return the same columns for each block"
        )
    names = list(returned) if schema is None else schema.names
    arrays = [
        _array(returned[name], None if schema is None else schema.field(name).type, name, at)
        for name in names
    ]
    expected = len(arrays[0]) if row_count is None else row_count
    for name, array in zip(names, arrays, strict=True):
        if len(array) != expected and row_count is None:
            raise at.fault(
                f"returned {expected} rows in column {names[0]!r}, and {len(array)} in {name!r}: "
                "all columns must have the same number"
            )
        if len(array) != expected:
            raise at.fault(
                f"returned {len(array)} rows in column {name!r}, and got {row_count}: a map "
                "returns one row for each, unless the loader has resizes=True (where= leaves rows "
                "out before it)"
            )
    return pa.RecordBatch.from_arrays(arrays, names=names)


def mapped_block(
    function: UserFunction,
    batch: pa.RecordBatch,
    seed: int,
    shard: int,
    at: CalledAt,
    schema: pa.Schema | None = None,
    *,
    resizes: bool = False,
    epoch: int | None = None,
) -> pa.RecordBatch:
    """Apply the function to a block, with the generator of a job with this seed if the function
    takes one. `shard` is the number of the block's shard, and `at` names the block.
    """
    assert at.block is not None
    generator = block_generator(seed, shard, at.block, epoch) if function.takes_generator else None
    return mapped(function, batch, generator, at, schema, resizes=resizes)


def _array(given: object, wanted: pa.DataType | None, name: str, at: CalledAt) -> pa.Array:
    where = f"column {name!r}"
    try:
        array = _arrow(given)
    except _FAILURES as error:
        if is_out_of_memory(error):
            raise
        more = "" if wanted is None else f", which is {wanted} in the first rows of the dataset"
        raise at.fault(
            f"returned {kind_of(given)} in {where}{more}, and that has no form in Arrow: "
            f"{text_of(error):.300}"
        ) from error
    if array is None:
        raise at.fault(
            f"returned {kind_of(given)} in {where}: return an Arrow or numpy array, or a list"
        )
    if wanted is not None and array.type != wanted:
        is_typed = hasattr(given, "dtype") or isinstance(given, pa.Array | pa.ChunkedArray)
        form = _bare if is_typed else _loose  # Python's numbers have no type: compare loosely
        if form(array.type) != form(wanted) and not _has_null_type(array.type):
            raise at.fault(
                f"returned {array.type} in {where}, and {wanted} for the first rows of the "
                "dataset: it must return the same types for each block"
            )
        try:
            array = _exactly_cast(array, wanted)
        except pa.ArrowException as error:
            raise at.fault(
                f"returned {array.type} in {where}, which cannot become {wanted}, its type in the "
                f"first rows of the dataset: {error!s:.300}"
            ) from error
    fault = unsupported_type(array.type)
    if fault:
        raise at.fault(f"returned {where}, which {fault}: a batch cannot have that")
    try:
        check_values(array)
    except pa.ArrowException as error:
        raise at.fault(f"returned an invalid array in {where}: {error!s:.300}") from error
    return array


def _exactly_cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast without loss; Arrow's cast makes large floats infinite.   Raises:  ArrowInvalid."""
    made = array.cast(wanted)
    if _infinities(made) != _infinities(array):
        raise pa.ArrowInvalid("a finite number would become infinite")
    return made


def _infinities(array: pa.Array) -> int:
    """Count the infinite numbers in a column, nested or not."""
    if pa.types.is_map(array.type):
        return _infinities(array.keys) + _infinities(array.items)
    if pa.types.is_struct(array.type):
        return sum(map(_infinities, array.flatten()))
    if is_any_list(array.type) or pa.types.is_fixed_size_list(array.type):
        return _infinities(array.flatten())
    if not pa.types.is_floating(array.type):
        return 0
    return int(np.isinf(array.to_numpy(zero_copy_only=False)).sum())


def _arrow(given: object) -> pa.Array | None:
    """Convert the result to an Arrow array; None if its kind is not supported."""
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
        if isinstance(given, pa.ChunkedArray):
            return pa.concat_arrays(given.chunks)
    if isinstance(given, pa.Array):
        return given
    if isinstance(given, str | bytes | Mapping):
        return None
    if not isinstance(given, np.ndarray) and hasattr(given, "__array__"):
        given = np.asarray(given)
    if isinstance(given, np.ndarray):
        return _of_numpy(given)
    if not isinstance(given, Sequence):
        return None
    if given and isinstance(given[0], np.ndarray) and given[0].ndim > 1:
        return _of_numpy(np.stack(given))
    found = pa.array(given)
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _of_numpy(given: np.ndarray) -> pa.Array:
    if not given.ndim:
        raise ValueError("it has no rows")
    if given.ndim == 1:
        return pa.array(given.tolist() if given.dtype.kind in "OUS" else given)
    array = pa.array(np.ascontiguousarray(given).reshape(-1))
    for size in given.shape[:0:-1]:
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _bare(kind: pa.DataType) -> str:
    """Return the type without details that libraries choose: the width of offsets, and views."""
    text = str(kind)
    for word in ("large_", "_view"):
        text = text.replace(word, "")
    return text


def _loose(kind: pa.DataType) -> str:
    """Return the type with all number types treated as one."""
    return _NUMBER.sub("number", _bare(kind))


def _has_null_type(kind: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    return any(_has_null_type(kind.field(i).type) for i in range(kind.num_fields))


def untyped(schema: pa.Schema) -> list[str]:
    """Return the columns whose type is unknown: only nulls and empty lists were seen."""
    return [field.name for field in schema if _has_null_type(field.type)]


def kind_of(given: object) -> str:
    """Describe the type of a returned value, for errors."""
    kind = type(given)
    if given is None:
        return "None"
    is_own = kind.__module__ == "builtins"
    name = kind.__qualname__ if is_own else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
