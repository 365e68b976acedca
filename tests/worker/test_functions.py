"""Calling users' functions over blocks: what they may return, and the errors for all else."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import user_functions
from plan import golden

from dataplane.model.errors import ConfigError, FunctionError
from dataplane.transforms.functions import function_name
from dataplane.transforms.made_columns import MappedColumns, mapped_in, with_mapped
from dataplane.worker.functions import (
    CalledAt,
    UserFunction,
    batch_generator,
    block_generator,
    check_code,
    loaded,
    mapped,
    untyped,
)

AT = CalledAt("map", "mine:f", "file:///a.parquet", 3)
BLOCK = pa.record_batch({"row": pa.array([0, 1, 2])})


def returned(columns: Any, schema: pa.Schema | None = None) -> pa.RecordBatch:
    function = UserFunction("mine:f", lambda _: columns, takes_generator=False, reads=None)
    return mapped(function, BLOCK, None, AT, schema)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.array([1, 2, 3], pa.int8()), pa.int8()),
        (pa.chunked_array([[1.5], [2.5, 3.5]]), pa.float64()),
        (np.array([1, 2, 3], np.uint16), pa.uint16()),
        (np.zeros((3, 2, 4), np.float32), pa.list_(pa.list_(pa.float32(), 4), 2)),
        (np.asfortranarray(np.arange(6).reshape(3, 2)), pa.list_(pa.int64(), 2)),
        (np.array(["a", "bc", ""]), pa.string()),
        (np.array([b"a", None, b""], object), pa.binary()),
        ([[1], [], [2, 3]], pa.list_(pa.int64())),
        ([np.zeros((2, 2), np.int8)] * 3, pa.list_(pa.list_(pa.int8(), 2), 2)),
        (("a", None, "b"), pa.string()),
        (torch.arange(3, dtype=torch.int32), pa.int32()),
        ([{"a": 1}, {"a": 2}, None], pa.struct({"a": pa.int64()})),
        ([dt.date(2020, 1, 1)] * 3, pa.date32()),
    ],
)
def test_arrays_of_arrow_and_numpy_and_lists_are_columns(given: Any, kind: pa.DataType) -> None:
    found = returned({"x": given})
    assert found.schema.field("x").type == kind
    if not isinstance(given, torch.Tensor | np.ndarray):
        return
    assert np.array_equal(np.array(found.column("x").to_pylist()), np.asarray(given))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"x": [1, 2]}, "2 rows in column 'x', and got 3"),
        ({}, "no column"),
        (None, "returned None"),
        ([1, 2, 3], "returned a list"),
        ({1: [1, 2, 3]}, "not a dict of columns by name"),
        ({"x": "abc"}, "a str in column 'x'"),
        ({"x": 7}, "an int in column 'x'"),
        ({"x": np.float32(7)}, "it has no rows"),
        ({"x": [1, "a", 2]}, "no form in Arrow"),
        ({"x": [object(), None, None]}, "no form in Arrow"),
        ({"x": {"y": [1, 2, 3]}}, "a dict in column 'x'"),
        ({"x": pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval())}, ""),
    ],
)
def test_other_results_are_refused_by_name(columns: Any, why: str) -> None:
    if not why:
        returned(columns)  # what a batch can have as an object
        return
    with pytest.raises(FunctionError) as caught:
        returned(columns)
    assert why in str(caught.value)
    assert "file:///a.parquet, block 3: map='mine:f' returned" in str(caught.value)
    assert (caught.value.function, caught.value.shard, caught.value.block) == (
        *("mine:f", "file:///a.parquet", 3),
    )


class Odd(dict[Any, Any]):
    """A dict that is none when its columns are taken."""

    def __getitem__(self, name: Any) -> Any:
        raise RuntimeError(f"no {name}")


class OddKeys(Odd):
    """A dict whose names cannot be read."""

    def __iter__(self) -> Any:
        raise RuntimeError("no names")


class OddArray:
    """A value that raises when numpy looks at it."""

    @property
    def __array__(self) -> Any:
        raise RuntimeError("no array")


class OddList(list[Any]):
    """A list without items."""

    def __getitem__(self, at: Any) -> Any:
        raise RuntimeError("no item")


class UntoldError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"x": torch.ones(3, requires_grad=True)}, "a torch.Tensor in column 'x'.*detach()"),
        (Odd(x=[1, 2, 3]), "what cannot be used: RuntimeError: no x"),
        (OddKeys(x=[1, 2, 3]), "what cannot be used: RuntimeError: no names"),
        ({"x": OddArray()}, "OddArray in column 'x'.*: no array"),
        ({"x": OddList([1, 2, 3])}, "OddList in column 'x'.*: no item"),
        ({"x": np.array([1, 2, 3], object) * 2**70}, "no form in Arrow"),
        ({"\ud800": [1, 2, 3]}, r"the key '\\ud800'"),
        ({("a",): [1, 2, 3]}, r"the key \('a',\)"),
        (
            pa.Table.from_arrays([pa.array([1, 2, 3])] * 2, names=["x", "x"]),
            "two columns of one name: x, x",
        ),
    ],
)
def test_odd_results_are_blamed_on_the_function(columns: Any, why: str) -> None:
    with pytest.raises(
        FunctionError, match=f"(?s)block 3: map='mine:f' returned .*{why}"
    ) as caught:
        returned(columns)
    assert caught.value.function == "mine:f"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (UntoldError(), r"failed: UntoldError: \(its __str__ fails with ValueError\)"),
        (ValueError("half \ud800"), r"failed: ValueError: half \\ud800"),
    ],
)
def test_odd_errors_are_blamed_on_the_function(error: BaseException, why: str) -> None:
    def fails(_: Any) -> None:
        raise error

    function = UserFunction("mine:f", fails, takes_generator=False, reads=None)
    with pytest.raises(FunctionError, match=f"map='mine:f' {why}"):
        mapped(function, BLOCK, None, AT)


ODD_MODULE = """
class Reads:
    reads = {reads}
    def __call__(self, columns):
        return columns

class Version(Reads):
    reads = None
    class version:
        def __repr__(self):
            raise RuntimeError("no version")
    version = version()

class NotCalled:
    def __repr__(self):
        raise RuntimeError("no words")
"""


@pytest.mark.parametrize("reads", ["5", "[5]", "'abc'", "{'a': 1, 2: 3}", "object()"])
def test_odd_attributes_are_blamed_on_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    name = f"odd_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ODD_MODULE.format(reads=reads))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"map='{name}:Reads': its attribute `reads`"):
        loaded("map", f"{name}:Reads")
    with pytest.raises(FunctionError, match=f"map='{name}:Version' .*RuntimeError: no version"):
        loaded("map", f"{name}:Version")
    with pytest.raises(ConfigError, match=f"map='{name}:NotCalled' cannot be called: it is a"):
        loaded("map", f"{name}:NotCalled")


def test_a_job_has_one_version_of_a_function() -> None:
    function = UserFunction("mine:f", len, takes_generator=False, reads=None, code="a")
    check_code(function, "a", AT)
    with pytest.raises(FunctionError, match="is not the function with which this job was opened"):
        check_code(function, "b", AT)


def test_an_invalid_arrow_array_is_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 3, 1, 3], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    with pytest.raises(FunctionError, match="invalid array in column 'x'"):
        returned({"x": broken})


@pytest.mark.parametrize(
    ("first", "later", "why"),
    [
        ([[1], [2], []], [[], [], []], ""),
        ([[1], [2], []], [None, None, None], ""),
        ([[1], [2], []], pa.array([None] * 3), ""),
        ([1.5, 2, 3], [1, 2, 3], ""),
        ([1, 2, 3], [1, 2.5, 3], "truncated"),
        (np.array([1, 2, 3], np.int8), [1, 2, 3], ""),
        (np.array([1, 2, 3], np.int8), [1, 2, 300], "not in range"),
        (np.array([1, 2, 3], np.float32), [1.5, 2.0, 1e39], "would become infinite"),
        (np.zeros(3, np.float16), [1, 2, 70_000], "would become infinite"),
        (np.zeros((3, 1), np.float32), [[1.0], [2.0], [float("inf")]], "fixed_size_list"),
        (np.array([1, 2, 3], np.float32), [1.5, float("nan"), float("inf")], ""),
        (np.array([1.0, 2, 3]), [1, 2, (1 << 53) + 1], "not in range"),
        ([1, 2, 3], ["1", "2", "3"], "returned string"),
        (["a", "b", "c"], pa.array(["d", "e", "f"], pa.large_string()), ""),
        (["a", "b", "c"], pa.array(["d", "e", "f"], pa.string_view()), ""),
        (np.array([1, 2, 3]), np.array([1, 2, 3], np.int32), "int32 in column 'x', and int64"),
        (np.zeros((3, 2)), np.zeros((3, 3)), "in column 'x', and fixed_size_list"),
        (["a", "b", "c"], [1, 2, 3], "and string for the first rows"),
    ],
)
def test_each_block_has_the_types_of_the_first_rows(first: Any, later: Any, why: str) -> None:
    schema = returned({"x": first}).schema
    assert not untyped(schema)
    if why:
        with pytest.raises(FunctionError, match=why):
            returned({"x": later}, schema)
        return
    assert returned({"x": later}, schema).schema == schema


def test_each_block_has_the_columns_of_the_first_rows_in_their_order() -> None:
    schema = returned({"x": [1, 2, 3], "y": [1, 2, 3]}).schema
    found = returned({"y": [1, 2, 3], "x": [4, 5, 6]}, schema)
    assert found.to_pydict() == {"x": [4, 5, 6], "y": [1, 2, 3]}
    with pytest.raises(FunctionError, match="returned the columns x, and x, y for the first"):
        returned({"x": [1, 2, 3]}, schema)


def test_only_nulls_have_no_type() -> None:
    schema = returned({"x": [None] * 3, "y": [[], [], []], "z": [[1], [], []]}).schema
    assert untyped(schema) == ["x", "y"]


def test_the_error_has_the_users_traceback_and_not_ours() -> None:
    def fails(_: Any) -> None:
        raise KeyError("nope")

    function = UserFunction("mine:f", fails, takes_generator=False, reads=None)
    with pytest.raises(FunctionError) as caught:
        mapped(function, BLOCK, None, AT)
    told = str(caught.value)
    assert "map='mine:f' failed: KeyError: 'nope'" in told
    assert 'raise KeyError("nope")' in told
    assert "dataplane/worker" not in told


def test_a_function_that_exits_has_failed() -> None:
    function = UserFunction("mine:f", sys.exit, takes_generator=False, reads=None)
    with pytest.raises(FunctionError, match="failed: SystemExit"):
        mapped(function, BLOCK, None, AT)


def test_a_lack_of_memory_stays_what_it_is() -> None:
    def fails(_: Any) -> None:
        raise MemoryError

    function = UserFunction("mine:f", fails, takes_generator=False, reads=None)
    with pytest.raises(MemoryError):
        mapped(function, BLOCK, None, AT)


def test_random_numbers_are_those_of_the_seed_the_shard_and_the_block() -> None:
    # Philox is the same in every version of numpy.
    def first(*place: int) -> tuple[int, ...]:
        return tuple(block_generator(*place).bit_generator.random_raw(2).tolist())

    ((_, golden_words),) = golden.MAP_GENERATORS.values()
    assert {place: first(*place) for place in golden.MAP_GENERATORS} == {(7, 2, 5): golden_words}
    assert all(first(*place) != golden_words for place in [(8, 2, 5), (7, 3, 5), (7, 2, 6)])


def test_threads_may_make_generators_while_another_imports_the_module(monkeypatch) -> None:
    monkeypatch.delattr(np, "random")  # the import adds this attribute last
    for made in (block_generator(7, 2, 5), batch_generator(7, 0, 0, 0)):
        assert made.random() < 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda columns: columns, "a lambda has no name"),
        (7, "pass a function of a module"),
        ("tokenise", 'write it as "package.module:function"'),
        ("a b:c", 'write it as "package.module:function"'),
        ("a:b(c)", 'write it as "package.module:function"'),
        ("__main__:f", "is part of the script itself"),
        (torch.nn.ReLU(), "an object of torch.nn"),
        ({}.get, "has no name by which"),
        (user_functions.Counted.__call__.__get__(7), "is a method of an object"),
    ],
)
def test_what_workers_cannot_find_by_name_is_refused(given: object, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        function_name(given, "map")
    assert why in str(caught.value)
    assert caught.value.field == "map"


def test_a_local_function_and_one_of_the_script_are_refused() -> None:
    def local(columns: Any) -> Any:
        return columns

    with pytest.raises(ConfigError, match="local is local to a function"):
        function_name(local, "map")
    local.__module__, local.__qualname__ = "__main__", "local"
    with pytest.raises(ConfigError, match="local is part of the script itself"):
        function_name(local, "map")


def test_a_script_whose_training_code_workers_would_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train_unguarded.py"
    script.write_text(
        "from dataplane_torch import DataLoader\n"
        "def tok(columns): return columns\n"
        "loader = DataLoader('none.parquet', map='train_unguarded:tok')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # A worker's import makes a loader: it starts no node, and is the function's error at once.
    with pytest.raises(FunctionError, match=r"(?s)made a loader when it imported.*__main__"):
        loaded("map", "train_unguarded:tok")
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert function_name("train_unguarded:tok", "map")
    main.__file__ = str(script)
    with pytest.raises(ConfigError, match="is part of the script itself"):
        function_name("train_unguarded:tok", "map")
    script.write_text('def tok(columns): return columns\nif __name__ == "__main__":\n    pass\n')
    assert function_name("train_unguarded:tok", "map")


def test_functions_and_classes_of_a_module_have_a_name() -> None:
    assert function_name(user_functions.letters, "map") == "user_functions:letters"
    assert function_name(user_functions.Counted, "map") == "user_functions:Counted"
    assert function_name("a.b:c", "map") == "a.b:c"
    assert function_name(None, "map") == ""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module_here:f", "workers find no module 'no_such_module_here'"),
        ("user_functions.more:f", "workers find no module 'user_functions.more'"),
        ("user_functions:nothing", "has no 'nothing'"),
        ("user_functions:__doc__", "does not define '__doc__'"),
    ],
)
def test_what_cannot_be_imported_is_told(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("map", name)
    assert why in str(caught.value)


def test_a_function_that_needs_other_arguments_is_told_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"needs_{tmp_path.name}".replace("-", "_")
    heads = {"other": "columns, rng", "more": "columns, generator, x", "fits": "c, generator, x=1"}
    lines = (f"def {path}({head}):\n    return columns\n" for path, head in heads.items())
    (tmp_path / f"{name}.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    for path, lacks in (("other", "rng"), ("more", "x")):
        why = f"argument: '{lacks}'.*: columns, and, .* with the name 'generator'"
        with pytest.raises(ConfigError, match=why):
            loaded("map", f"{name}:{path}")
    assert loaded("map", f"{name}:fits").takes_generator


def test_what_a_map_makes_travels_in_the_schema_of_the_shards() -> None:
    made = MappedColumns(
        pa.schema([("x", pa.list_(pa.int64()))]), ("row",), 40, takes_generator=True, code="ab"
    )
    schema = with_mapped(BLOCK.schema, made)
    assert schema == BLOCK.schema
    assert mapped_in(pa.ipc.read_schema(schema.serialize())) == made
    assert mapped_in(BLOCK.schema) is None
