"""Batches on their way to a device: one is copied while the step before computes.

Copies have a stream of their own, so that they wait for no step and no step waits for them but the
one that needs them. Nothing here makes this thread wait for a device.

Invariants:
1. A batch is handed over only after the stream that its taker computes in was told to wait for its
   copies, and after its memory was recorded as in use there.
2. What was begun and is not handed over is not consumed: nobody is told of it, and what goes wrong
   with it is raised when it is due.
3. The memory that a copy reads is dead when the copy was only begun. Whoever has it waits for the
   copy stream, or for more, before it is written (dataplane_torch.pinning).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Copy = Callable[[Any], Any]

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class CopyStream(Protocol):
    """What is asked of a device, and of its stream for copies."""

    device: torch.device

    def copying(self) -> AbstractContextManager[Copy]:
        """A function that begins to copy a tensor, or what has a `to()` and a `record_stream()`:
        in the copy stream, into memory of that stream.
        """
        ...

    def mark(self) -> Any:
        """The end of what was copied so far."""
        ...

    def wait_for(self, mark: Any) -> Any:
        """Let the stream that the caller computes in wait for a mark; that stream."""
        ...

    def record(self, copied: Any, stream: Any) -> None:
        """The memory of what was copied is in use in a stream, up to where that stream will be when
        it dies.
        """
        ...


class Sending:
    """What `make` gives, on a device. It may be begun before it is due; calling it hands it over.
    Where something went wrong, it is tried again.
    """

    def __init__(self, copy_stream: CopyStream, make: Callable[[], Any]) -> None:
        self._copy_stream = copy_stream
        self._make: Callable[[], Any] | None = make
        self._batch: Any = None
        self._copied: list[Any] | None = None
        self._mark: Any = None
        self._has_late = False

    def begin(self) -> None:
        """Begin to copy. What goes wrong is raised when it is due."""
        with contextlib.suppress(Exception):
            self._begin()

    def __call__(self) -> Any:
        """The batch, ready for the stream that the caller computes in.

        Raises:  whatever `make` raises.  RuntimeError: of the device.
        """
        copied = self._begin()
        stream = self._copy_stream.wait_for(self._mark)
        for one in copied:
            self._copy_stream.record(one, stream)
        return _mapped(self._batch, self._late) if self._has_late else self._batch

    def _begin(self) -> list[Any]:
        if self._copied is None:
            if self._make is not None:
                self._batch, self._make = self._make(), None
            copied: list[Any] = []
            with self._copy_stream.copying() as begin_copy:

                def early(leaf: Any) -> Any:
                    if not _is_early(leaf):
                        self._has_late = True
                        return leaf
                    copied.append(begin_copy(leaf))
                    return copied[-1]

                batch = _mapped(self._batch, early)
            self._mark = self._copy_stream.mark()
            # Here the source dies, unless somebody else has it.
            self._batch, self._copied = batch, copied
        return self._copied

    def _late(self, leaf: Any) -> Any:
        return leaf if _is_early(leaf) else moved(leaf, self._copy_stream.device)


def moved(given: Any, device: torch.device) -> Any:
    """`given.to(device)` in the stream of the caller, without waiting where it can do that."""
    try:
        found = given.to(device, non_blocking=True)
    except TypeError:
        found = given.to(device)
    return given if found is None else found


def _is_early(leaf: Any) -> bool:
    """Whether a leaf can be copied in another stream than it will be used in: the allocator must
    know of it. Anything else with a `to()` is moved when it is due, in the taker's own stream.
    """
    if not isinstance(leaf, torch.Tensor):
        return callable(getattr(leaf, "record_stream", None))
    return (
        leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_nested
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _is_leaf(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return True
    if isinstance(given, type) or not callable(getattr(given, "to", None)):
        return False
    # A mapping that cannot be copied ahead as a whole is one of values that can.
    return not isinstance(given, Mapping) or callable(getattr(given, "record_stream", None))


def _mapped(given: Any, of_leaf: Copy) -> Any:
    """The same structure with other leaves: whatever has a `to()`. What has no leaf stays the very
    object that it is.

    Source:  torch.utils.data._utils.pin_memory.pin_memory, for what counts as structure.
    """
    if _is_leaf(given):
        return of_leaf(given)
    if isinstance(given, str | bytes):
        return given
    if isinstance(given, Mapping):
        values = {key: _mapped(value, of_leaf) for key, value in given.items()}
        is_same = all(values[key] is value for key, value in given.items())
        return given if is_same else _mapping_like(given, values)
    if isinstance(given, Sequence):
        if isinstance(given, list) and _PLAIN.issuperset(map(type, given)):
            return given
        each = [_mapped(one, of_leaf) for one in given]
        is_same = all(new is old for new, old in zip(each, given, strict=True))
        return given if is_same else _sequence_like(given, each)
    return given


def _mapping_like(given: Any, values: dict[Any, Any]) -> Any:
    if type(given) is dict:
        return values
    try:
        if not isinstance(given, MutableMapping):
            return type(given)(values)
        clone = copy.copy(given)
        clone.update(values)
    except TypeError:
        return values
    return clone


def _sequence_like(given: Any, each: list[Any]) -> Any:
    if hasattr(given, "_fields"):  # a named tuple
        return type(given)(*each)
    try:
        if not isinstance(given, MutableSequence):
            return type(given)(each)
        clone = copy.copy(given)
        for i, one in enumerate(each):
            clone[i] = one
    except TypeError:
        return each
    return clone
