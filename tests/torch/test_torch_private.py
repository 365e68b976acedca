"""Private names of torch are used in one place, and this torch has them as we rely on."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import dataplane_torch
import pytest
import torch
from dataplane_torch.local.local_pass import LocalPass
from dataplane_torch.local.worker_pass import WorkerPass
from dataplane_torch.torch_private import distributed, iteration, memory, workers
from torch.utils.data import DataLoader, TensorDataset, dataloader
from warm import WarmPython

from dataplane.model.errors import VersionMismatch

ADAPTER = Path(iteration.__file__).parent
ROOMS = (Path(dataplane_torch.__file__).parent, ADAPTER.parents[2] / "benchmarks")
OURS = (dataplane_torch.DataLoader, LocalPass, WorkerPass)
# Accelerate's loader has an attribute of the name that torch's iterators have.
OF_OTHERS = {("accelerate.py", "_drop_last")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def names_of(kind: type) -> frozenset[str]:
    """The private names that a class of torch's defines, or sets on its objects."""
    found = {*vars(kind), *getattr(kind, "__annotations__", {})}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                found.add(name)
    return frozenset(filter(is_private, found))


def names_of_torch(*kinds: type) -> set[str]:
    each = {base for kind in kinds for base in kind.__mro__ if base.__module__[:5] == "torch"}
    return {name for base in each for name in names_of(base)}


def bound(tree: ast.Module) -> dict[str, str]:
    """Names that imports bind to torch, its modules and what these have: name -> path."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                of_torch = [each for each in names if each.name.split(".")[0] == "torch"]
                found |= {each.asname or "torch": each.name for each in of_torch}
            case ast.ImportFrom(module=str(path), names=names, level=0):
                if path.split(".")[0] == "torch":
                    found |= {each.asname or each.name: f"{path}.{each.name}" for each in names}
    return found


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def private_uses(source: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a private name of torch: imports, attributes of torch's modules,
    and any of `names` as a string or as an attribute of an object other than `self`.
    """
    tree = ast.parse(source)
    imports = bound(tree)
    for name, path in imports.items():
        if any(map(is_private, path.split("."))):
            yield 1, f"import of {path} as {name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=owner) if is_private(name):
                if root_of(owner) in imports or (name in names and not is_self(owner)):
                    yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(name)) if name in names:
                yield node.lineno, repr(name)


def own_uses(kind: type) -> Iterator[tuple[int, str]]:
    """Where a class that derives from one of torch's defines or reads a private name of it."""
    names = names_of_torch(kind)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self")) if name in names:
                yield node.lineno, f"self.{name}"
            case ast.FunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()) if name in names:
                yield node.lineno, name


def test_private_names_of_torch_stand_in_one_room() -> None:
    names = names_of_torch(*OURS, dataloader._MultiProcessingDataLoaderIter)
    assert names >= {"_dataset_kind", "_iterator", "_next_data", "_sampler_iter", "_workers"}
    offences = [
        f"{path}:{line}: {what}"
        for room in ROOMS
        for path in sorted(room.rglob("*.py"))
        if ADAPTER not in path.parents and "peers" not in path.parts
        for line, what in private_uses(path.read_text(), names)
        if (path.name, what.strip("'")) not in OF_OTHERS
    ]
    for kind in OURS:
        offences += [f"{kind.__name__}: {line}: {what}" for line, what in own_uses(kind)]
    assert not offences, "use dataplane_torch.torch_private:\n" + "\n".join(offences)


def test_no_name_of_ours_is_one_that_torch_uses_in_the_same_object() -> None:
    class Clash(iteration.WorkerPassBase):
        def _next_index(self) -> Any:
            return self._dataset

    assert {what for _, what in own_uses(Clash)} == {"_next_index", "self._dataset"}
    for kind in OURS:
        assert not list(own_uses(kind))


def reloaded(module: ModuleType) -> None:
    """Run a module of the adapter again, without replacing the imported one."""
    spec = importlib.util.spec_from_file_location("adapter_again", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(("module", "owner", "name"), [
    (iteration, dataloader, "_BaseDataLoaderIter"),
    (iteration, dataloader._DatasetKind, "create_fetcher"),
    (iteration, dataloader._BaseDataLoaderIter, "_next_data"),
    (iteration, DataLoader, "_index_sampler"),
    (workers, torch.utils.data._utils.signal_handling, "_set_worker_pids"),
    (workers, torch.utils.data._utils.worker, "_worker_info"),
    (workers, torch._utils, "ExceptionWrapper"),
    (memory, torch.utils.data._utils.collate, "default_collate_fn_map"),
    (memory, torch.utils.data._utils, "pin_memory"),
    (memory, torch.storage._StorageBase, "_new_shared"),
])  # fmt: skip
def test_a_torch_that_lacks_a_name_is_an_error_at_import(monkeypatch, module, owner, name) -> None:
    reloaded(module)
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        VersionMismatch, match=rf"this torch \(.*\) has no torch\..*{name}, "
    ) as told:
        reloaded(module)
    assert "install torch 2.6 to " in str(told.value)
    assert told.value.found == f"torch {torch.__version__}"


@pytest.mark.parametrize(("base", "worker_count"), [
    (dataloader._SingleProcessDataLoaderIter, 0),
    (dataloader._BaseDataLoaderIter, 1),
])  # fmt: skip
def test_an_iterator_that_lacks_an_attribute_is_an_error_when_a_pass_begins(
    monkeypatch, base, worker_count
) -> None:
    constructor = base.__init__

    def without(torch_pass: Any, loader: Any) -> None:
        constructor(torch_pass, loader)
        del torch_pass._num_yielded

    monkeypatch.setattr(base, "__init__", without)
    loader = dataplane_torch.DataLoader([1, 2], num_workers=worker_count)
    with pytest.raises(VersionMismatch, match=r"has no torch.*DataLoaderIter\._num_yielded, "):
        iter(loader)


def test_a_worker_has_the_seeds_name_and_worker_info_of_torchs(monkeypatch) -> None:
    assert workers.numpy_seed(1, 2) == [307626447, 1538850434, 3092219749, 3926071173]
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", None)
    workers.set_worker_info(1, 3, 5, "dataset")
    info = torch.utils.data.get_worker_info()
    assert (info.id, info.num_workers, info.seed, info.dataset) == (1, 3, 5, "dataset")
    before = Path("/proc/thread-self/comm").read_text().strip()
    workers.name_thread("a_name")
    assert Path("/proc/thread-self/comm").read_text() == "a_name\n"
    workers.name_thread(before)


def test_a_watched_process_that_died_is_reported_once() -> None:
    process = subprocess.Popen(["sleep", "100"])
    workers.watch(process.pid, [process.pid])
    try:
        workers.raise_for_dead()
        with pytest.raises(
            RuntimeError, match=rf"\(pid.* {process.pid}\) is killed by signal: Kill"
        ):
            killed(process)
        workers.raise_for_dead()
    finally:
        workers.unwatch(process.pid)
        process.kill()
        process.wait()


def killed(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and look after it where torch's handler of SIGCHLD did not."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    workers.raise_for_dead()


def test_an_iterator_keeps_what_it_took_from_its_loader() -> None:
    dataset = TensorDataset(torch.arange(4))
    loader = DataLoader(dataset, 2, drop_last=True, timeout=3, generator=torch.Generator())
    made = iteration.WorkerPassBase(loader)
    loader.generator.manual_seed(loader.generator.initial_seed())
    assert made.dataset is dataset
    assert made.collate_fn is loader.collate_fn
    assert (made.auto_collation, made.drop_last, made.persists) == (True, True, False)
    assert (made.timeout_s, made.worker_count, made.yielded_count) == (3, 0, 0)
    assert (made.rank, made.world_size, made.shared_seed) == (0, 1, None)
    assert (made.is_pinning, made.pinned_for) == (False, None)
    assert made.base_seed == torch.empty((), dtype=torch.int64).random_(
        generator=loader.generator
    ).item()  # fmt: skip
    assert [made.next_index(), next(made.indices)] == [[0, 1], [2, 3]]
    made.yielded_count, made.indices, made.base_seed = 7, iter([[5]]), 9
    assert (made._num_yielded, made.next_index(), made._base_seed) == (7, [5], 9)
    made.begin_again(loader)
    assert (made.yielded_count, made.next_index()) == (0, [0, 1])


def test_torchs_own_calls_reach_the_names_of_ours() -> None:
    class Pass(iteration.WorkerPassBase):
        begun, closed = 0, False

        def next_batch(self) -> Any:
            return "batch"

        def begin_again(self, loader: Any, *, is_first: bool = False) -> None:
            self.begun += 1 + is_first

        def close(self) -> None:
            self.closed = True

    made = Pass(DataLoader([1]))
    assert (next(made), made.yielded_count) == ("batch", 1)
    made._reset(None)
    made._reset(None, first_iter=True)
    made._shutdown_workers()
    assert (made.begun, made.closed, made._workers) == (3, True, [])


def test_a_kept_pass_is_where_torch_keeps_it_and_is_not_pickled() -> None:
    loader = iteration.LoaderBase([1])
    loader._kept_pass = kept = object()
    assert loader._iterator is kept
    assert loader.__getstate__() == {**vars(loader), "_iterator": None}


def test_storage_is_shared_until_a_worker_wants_none(monkeypatch) -> None:
    assert memory.new_shared_storage(8).is_shared()
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", torch.UntypedStorage._new_shared)
    memory.make_no_shared_storage()
    private = memory.new_shared_storage(8)
    assert (private.nbytes(), private.is_shared()) == (8, False)


def test_torch_pickles_its_types_by_the_table_that_parcels_read() -> None:
    assert memory.tensor_reducers.keys() >= {torch.Tensor, torch.UntypedStorage}


def test_without_a_process_group_there_is_no_store() -> None:
    with pytest.raises(ValueError, match="process group"):
        distributed.default_store()


def test_a_build_without_cuda_has_no_contexts_to_ask_for(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext", raising=False)
    with pytest.raises(VersionMismatch, match=r"has no torch\._C\._cuda_hasPrimaryContext"):
        memory.has_cuda_context(0)


PICKLES_AT_ITS_END = """
import threading
from multiprocessing.reduction import ForkingPickler
import torch
from dataplane_torch.torch_private import workers

def pickle_tensors():
    for _ in range(5000):
        ForkingPickler.dumps(torch.zeros(4))

workers._FEEDER_S_MAX = 60.0
workers.end_queues_at_exit()
threading.Thread(target=pickle_tensors, name=workers._FEEDER, daemon=True).start()
"""


def test_a_process_ends_normally_while_a_queue_pickles_tensors(
    tmp_path: Path, warm_torch: WarmPython
) -> None:
    """Without `end_queues_at_exit`, three of four abort."""
    (tmp_path / "pickles.py").write_text(PICKLES_AT_ITS_END)
    process = warm_torch.run([str(tmp_path / "pickles.py")], os.environ, sys.stderr.fileno())
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) == 0


def test_a_queue_calls_its_thread_so() -> None:
    queue: Any = multiprocessing.get_context("spawn").Queue()
    queue.put(1)
    assert workers._FEEDER in {thread.name for thread in threading.enumerate()}
    queue.get()
    queue.close()
    queue.join_thread()
