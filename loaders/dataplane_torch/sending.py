"""Copy batches to a device: the next batch is copied while the current step computes.

Copies run in a stream of their own, which does not wait for training steps. Only the step that
needs a batch waits for the batch's copy. This thread never waits for a device.

Invariants:
1. Before a batch is handed over, the caller's stream is made to wait for the copies, and the
   batch's memory is recorded as used by that stream.
2. A batch whose copy has begun is not consumed until it is handed over: no position counts it, and
   its errors are raised when it is due.
3. The host memory that a copy reads may be released while the copy is still running. Its owner
   waits at least for the copy stream before it writes there again (dataplane_torch.pinning).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dataplane_torch.torch_private.profiling import in_profile

Copy = Callable[[Any], Any]

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class CopyStream(Protocol):
    """A device and its stream for copies."""

    device: torch.device

    def copying(self) -> AbstractContextManager[Copy]:
        """Provide a function that begins to copy a tensor, or another object that has `to()` and
        `record_stream()`, in the copy stream and into that stream's memory.
        """
        ...

    def mark(self) -> Any:
        """Return a mark in the copy stream, after all copies begun so far."""
        ...

    def wait_for(self, mark: Any) -> Any:
        """Make the caller's current stream wait for a mark; return that stream."""
        ...

    def record(self, copied: Any, stream: Any) -> None:
        """Record that a stream uses the memory of a copy. After the copy is dropped, the allocator
        reuses the memory only when the stream has finished the work submitted until then.
        """
        ...


class Sending:
    """The batch that `make` returns, on a device. `begin` may start its copy early; calling the
    object hands the batch over. If the early start failed, the call tries again.
    """

    def __init__(self, copy_stream: CopyStream, make: Callable[[], Any]) -> None:
        self._copy_stream = copy_stream
        self._make: Callable[[], Any] | None = make
        self._batch: Any = None
        self._copied: list[Any] | None = None
        self._mark: Any = None
        self._has_late = False

    def begin(self) -> None:
        """Begin to copy. Errors are raised when the batch is due."""
        with contextlib.suppress(Exception):
            self._begin()

    def __call__(self) -> Any:
        """Return the batch, ready for the caller's current stream.

        Raises:  whatever `make` raises.  RuntimeError: the device reports an error.
        """
        copied = self._begin()
        stream = self._copy_stream.wait_for(self._mark)
        for tensor in copied:
            self._copy_stream.record(tensor, stream)
        return _mapped(self._batch, self._late) if self._has_late else self._batch

    def _begin(self) -> list[Any]:
        if self._copied is None:
            if self._make is not None:
                self._batch, self._make = self._make(), None
            copied: list[Any] = []
            with in_profile("dataplane.copy"), self._copy_stream.copying() as begin_copy:

                def early(leaf: Any) -> Any:
                    if not _is_early(leaf):
                        self._has_late = True
                        return leaf
                    copied.append(begin_copy(leaf))
                    return copied[-1]

                batch = _mapped(self._batch, early)
            self._mark = self._copy_stream.mark()
            # Replace the source batch by its copy. This frees the source, unless the user keeps it.
            self._batch, self._copied = batch, copied
        return self._copied

    def _late(self, leaf: Any) -> Any:
        return leaf if _is_early(leaf) else moved(leaf, self._copy_stream.device)


def moved(given: Any, device: torch.device) -> Any:
    """Call `given.to(device)` in the caller's stream, without waiting if its `to` supports that."""
    try:
        copied = given.to(device, non_blocking=True)
    except TypeError:
        copied = given.to(device)
    return given if copied is None else copied


def _is_early(leaf: Any) -> bool:
    """Return whether a leaf can be copied in another stream than the stream that uses it, which
    requires memory of the caching allocator. All other leaves are moved when the batch is due, in
    the caller's stream.
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
    # Treat a mapping as structure, whose values may be leaves, unless it can be copied as a whole.
    return not isinstance(given, Mapping) or callable(getattr(given, "record_stream", None))


def _mapped(given: Any, of_leaf: Copy) -> Any:
    """Return the same structure with its leaves replaced; a leaf is an object that has a `to()`.
    Parts without a leaf stay the same objects.

    Source:  torch.utils.data._utils.pin_memory.pin_memory decides which types are structure.
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
        copies = [_mapped(entry, of_leaf) for entry in given]
        is_same = all(new is old for new, old in zip(copies, given, strict=True))
        return given if is_same else _sequence_like(given, copies)
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


def _sequence_like(given: Any, entries: list[Any]) -> Any:
    if hasattr(given, "_fields"):  # a named tuple
        return type(given)(*entries)
    try:
        if not isinstance(given, MutableSequence):
            return type(given)(entries)
        clone = copy.copy(given)
        for i, entry in enumerate(entries):
            clone[i] = entry
    except TypeError:
        return entries
    return clone
