"""Datasets, samplers and collate functions of many kinds, which worker processes can import, and
what it means that two batches are the same.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

LONG = 3 << 14  # bytes: more than is copied with a pickle


class Pair(NamedTuple):
    """A named tuple, such as many datasets return."""

    x: torch.Tensor
    y: int


class Thing:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and is_same(self.value, other.value)

    def __hash__(self) -> int:
        return 0


class Named(torch.Tensor):
    """A tensor with a name and attributes."""


def _full(i: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, i % 100, dtype=dtype)


def _drawn(i: int) -> list[float]:
    return [i, random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def _named(i: int) -> torch.Tensor:
    tensor = _full(i, 4).as_subclass(Named)
    tensor.note = f"of {i}"  # type: ignore[attr-defined]
    return tensor


def _aliased(i: int) -> dict[str, torch.Tensor]:
    tensor = _full(i, LONG)
    return {"x": tensor, "same": tensor, "view": tensor.view(2, -1)}


def _odd_strides(i: int) -> dict[str, torch.Tensor]:
    """Dense tensors with unusual strides, such as the annotations of one object."""
    row = _full(i, 1, 5)
    return {
        "one of a column": row[:, 4],
        "one of a row": _full(i, 2, 6)[:1, ::6],
        "row on end": _full(i, 2, 6)[:1].t(),
        "none of a column": row[:0, 4],
        "long": _full(i, LONG, 5)[:1, 4],
        "subclass": row[:, 4].as_subclass(Named),
        "parameter": torch.nn.Parameter(row[:, 4]),
        "gradient": row.clone()[:, 4].requires_grad_(),
        "bfloat16": row.to(torch.bfloat16)[:, 4],
        "float8": row.to(torch.float8_e5m2)[:, 4],
    }


# What torch's default_collate makes batches of.
COLLATED: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i,
    "float": lambda i: i / 2,
    "text": lambda i: f"{i}",
    "raw": lambda i: bytes([i % 256]),
    "tensor": lambda i: _full(i, 3),
    "0-d": torch.tensor,
    "nothing in it": lambda i: _full(i, 0, 2),
    "bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "bfloat16": lambda i: _full(i, 5, dtype=torch.bfloat16),
    "complex": lambda i: _full(i, 2, dtype=torch.complex64),
    "long": lambda i: _full(i, LONG, dtype=torch.uint8),
    "long bfloat16": lambda i: _full(i, LONG, dtype=torch.bfloat16),
    "channels last": lambda i: _full(i, 1, 3, 4, 5).to(memory_format=torch.channels_last),
    "long channels last": lambda i: _full(i, 2, 3, 64, 64).to(memory_format=torch.channels_last),
    "mixed types": lambda i: _full(i, 3, dtype=(torch.float32, torch.float64)[i % 2]),
    "array": lambda i: np.full((2, 3), i, np.int16),
    "long array": lambda i: np.full(LONG, i % 256, np.uint8),
    "number": np.float32,
    "pair": lambda i: Pair(_full(i, 2), i),
    "nested": lambda i: {"a": [i, {"b": (_full(i, 2), f"{i}")}], "c": np.float64(i)},
    "drawn": _drawn,
}
# What only a collate function of the user's own makes batches of, or none.
ANYTHING: dict[str, Callable[[int], Any]] = {
    **COLLATED,
    "none": lambda i: None if i % 2 else i,
    "thing": lambda i: Thing([i, _full(i, 2)]),
    "named": _named,
    "long text": lambda i: f"{i}" * (70 << 10),
    "gradient": lambda i: _full(i, 3).requires_grad_(),
    "parameter": lambda i: torch.nn.Parameter(_full(i, 3)),
    "sparse": lambda i: (torch.eye(4) * i).to_sparse(),
    "sparse rows": lambda i: (torch.eye(4) * (i + 1)).to_sparse_csr(),
    "aliased": _aliased,
    "odd strides": _odd_strides,
    "objects": lambda i: np.array([i, "x", None], object),
    "dates": lambda i: np.array([i], "M8[s]"),
    "fields": lambda i: np.array([(i, 1.0)], [("a", "i4"), ("b", "f8")]),
    "by columns": lambda i: np.asfortranarray(np.full((200, 200), i, np.float32)),
    "odd arrays": lambda i: [np.broadcast_to(np.full(3, i), (200, 3)), np.arange(LONG)[::-1] + i],
    "every other": lambda i: np.arange(LONG)[::2] + i,
    "queue": lambda i: collections.deque([i, _full(i, 2)]),
    "set": lambda i: {i, f"{i}"},
    "range": range,
}


class Samples(Dataset[Any]):
    """`count` samples of a kind."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return ANYTHING[self.kind](i)


class Together(Samples):
    """The same, fetched a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Flow(IterableDataset[Any]):
    """The same samples as an iterable dataset; each worker reads its share."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.count, step):
            yield ANYTHING[self.kind](i)


class Talks(IterableDataset[int]):
    """Its state is longer than a socket takes at once."""

    def __iter__(self) -> Talks:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, Any]:
        return {"long": b"x" * (10 << 20) if self.at else b""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def as_is(batch: Any) -> Any:
    """A collate function that does nothing."""
    return batch


def as_pair(batch: list[Any]) -> Any:
    """A collate function that returns its own structure."""
    return Pair(x=torch.tensor([len(batch)]), y=batch), {"all": [Thing(one) for one in batch]}


def is_same(a: Any, b: Any) -> bool:
    """Whether two batches have the same structure, types, values and layout in memory."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _are_same_tensors(a, b)
    if isinstance(a, np.ndarray):
        about = a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
        return about and a.flags.writeable == b.flags.writeable and a.tolist() == b.tolist()
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def _are_same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    about = [
        (one.dtype, one.shape, one.layout, one.requires_grad, one.is_leaf, vars(one))
        for one in (a, b)
    ]
    if about[0] != about[1]:
        return False
    if a.layout is not torch.strided:
        return torch.equal(a.detach().to_dense(), b.detach().to_dense())
    # Tensors that are not dense become dense; the others keep their strides.
    return a.stride() == b.stride() and torch.equal(a.detach(), b.detach())


class Growing(Dataset[int]):
    """A map-style dataset with a state: how often it was asked."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.asked += 1
        return i, self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class Backwards(Sampler[int]):
    """A sampler with a state, whose passes differ."""

    def __init__(self, count: int) -> None:
        self.count, self.pass_count, self.next = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        while self.next < self.count:
            self.next += 1
            yield (self.count - self.next + self.pass_count) % self.count
        self.next = 0
        self.pass_count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "pass": self.pass_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.pass_count = state["next"], state["pass"]
