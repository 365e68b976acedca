"""Batches between processes: a pickle of their structure, and their bytes beside it.

A dataset and a collate function may return anything that can be pickled: nested dicts, named
tuples, strings, objects of the user's own classes. The bytes of long tensors and numpy arrays are
not in the pickle, but in extents of the worker's segments. Most tensors are collated there in the
first place.

Pickles are exchanged only among the trainer and the processes that it started.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dataplane_torch.local.segments import Bytes, Extent, MappedSegments, Segments
from dataplane_torch.tensors import tensor_over
from dataplane_torch.torch_private.memory import (
    collate_tensors_by,
    make_no_shared_storage,
    stack_tensors,
    tensor_reducers,
)

# Put shorter buffers into the pickle: copying them costs less than an extent, and a tensor that the
# user keeps then keeps no extent.
_BESIDE_BYTES = 32 << 10

_Shape = tuple[int, ...]
_Collated = tuple[Extent, weakref.ref[Bytes]]


class Parcel(NamedTuple):
    """A packed object: its pickle, or the extent of its pickle, and the extents of its buffers."""

    pickled: bytes | Extent
    beside: list[Extent]


class Packer:
    """The worker's side. With `everything`, for memory that devices read, short tensors are put
    into extents too.
    """

    def __init__(self, segments: Segments, *, everything: bool) -> None:
        self._segments = segments
        self._beside_bytes = 1 if everything else _BESIDE_BYTES
        self._thread = threading.get_ident()
        # Live buffers that were collated into an extent and are not packed yet, by address.
        self._collated: dict[int, _Collated] = {}
        self._taken: list[Extent] = []

    def collate_here(self) -> None:
        """Make torch's default_collate stack tensors straight into extents, in this process, unless
        the user has set another function. If a user's own table of collate functions uses torch's
        function, that makes no files in shared memory either.
        """
        collate_tensors_by(self._stack)
        make_no_shared_storage()

    def pack(self, batches: list[Any]) -> Parcel:
        """Pack the only object in the list `batches`, and remove the object from the list: no other
        reference to the object may exist.

        Raises:  whatever the pickling of the object raises.
        """
        self._taken = []
        try:
            return self._packed(batches)
        except BaseException:
            for extent in self._taken:
                self._segments.free(extent.segment, extent.offset)
            raise

    def take_back(self, parcel: Parcel) -> None:
        """Free the extents of a parcel that is not sent."""
        outer = [] if isinstance(parcel.pickled, bytes) else [parcel.pickled]
        for extent in [*dict.fromkeys(parcel.beside), *outer]:
            self._segments.free(extent.segment, extent.offset)

    def _stack(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Stack tensors like torch's own function, but into an extent if they are large enough."""
        del collate_fn_map
        first = batch[0]
        if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
            return stack_tensors(batch)
        length = first.numel() * first.element_size() * len(batch)
        if length < self._beside_bytes or type(first) is not torch.Tensor or first.requires_grad:
            return _stacked(batch)
        # Segments are not thread-safe: a thread of the dataset collates to ordinary memory.
        if threading.get_ident() != self._thread:
            return _stacked(batch)
        extent = self._segments.allocate(length)
        memory: Bytes = np.frombuffer(self._segments.memory(extent), np.uint8)
        address = _address(memory)
        self._collated[address] = extent, weakref.ref(memory)
        weakref.finalize(memory, self._unused, address).atexit = False
        out = tensor_over(memory, first.dtype, (len(batch), *first.shape))
        return torch.stack(tuple(batch), 0, out=out)

    def _unused(self, address: int) -> None:
        """Free the extent of a collated buffer that was dropped before it was packed."""
        collated = self._collated.pop(address, None)
        if collated is not None:
            self._segments.free_soon(collated[0].segment, collated[0].offset)

    def _packed(self, batches: list[Any]) -> Parcel:
        buffers: list[pickle.PickleBuffer] = []

        def is_short(buffer: pickle.PickleBuffer) -> bool:
            with buffer.raw() as raw:
                if raw.nbytes < self._beside_bytes:
                    return True
            buffers.append(buffer)
            return False

        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=is_short).dump(batches.pop())
        placed, collated = self._placed(buffers)
        buffers.clear()
        held = self._held(collated)
        handed = {
            place: self._copied(place) if place in held else place
            for place in dict.fromkeys(placed)
        }
        beside = [handed[place] for place in placed]
        if file.tell() <= 2 * _BESIDE_BYTES:
            return Parcel(file.getvalue(), beside)
        extent = self._take(file.tell())
        self._segments.memory(extent)[:] = file.getbuffer()
        return Parcel(extent, beside)

    def _placed(
        self, buffers: list[pickle.PickleBuffer]
    ) -> tuple[list[Extent], dict[Extent, _Collated]]:
        """Return the extents of the buffers' bytes, and which of them were collated there. Two
        buffers of the same bytes, such as a batch and a view of it, have one extent.
        """
        extents: dict[tuple[int, int], Extent] = {}
        collated: dict[Extent, _Collated] = {}
        placed = []
        for buffer in buffers:
            source = np.frombuffer(buffer.raw(), np.uint8)
            address, length = _address(source), source.nbytes
            if (address, length) not in extents:
                known = self._collated.get(address)
                if known is not None and known[0].length == length:
                    extents[address, length] = extent = known[0]
                    collated[extent] = known
                else:
                    extents[address, length] = extent = self._take(length)
                    np.frombuffer(self._segments.memory(extent), np.uint8)[:] = source
            placed.append(extents[address, length])
        for (address, _), extent in extents.items():
            if extent in collated:
                del self._collated[address]
        return placed, collated

    def _held(self, collated: dict[Extent, _Collated]) -> set[Extent]:
        """Return the extents whose tensors the dataset or its collate function still references.
        These extents are copied, since they may still change. The other extents are handed over.
        """
        held = set()
        for extent, known in collated.items():
            memory = known[1]()
            if memory is None:
                self._taken.append(extent)
            else:
                self._collated[_address(memory)] = known
                held.add(extent)
        return held

    def _copied(self, extent: Extent) -> Extent:
        copied = self._take(extent.length)
        self._segments.memory(copied)[:] = self._segments.memory(extent)
        return copied

    def _take(self, length: int) -> Extent:
        extent = self._segments.allocate(length)
        self._taken.append(extent)
        return extent


def _stacked(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors to a contiguous tensor with the dtype of the first, like torch's workers."""
    out = torch.stack(tuple(batch), 0)
    if out.dtype is batch[0].dtype and out.is_contiguous():
        return out
    out = batch[0].new_empty((len(batch), *batch[0].shape))
    return torch.stack(tuple(batch), 0, out=out)


def pickled_whole(given: object) -> bytes:
    """Pickle an object as for a parcel, but with all bytes in the pickle.

    Raises:  whatever the pickling of the object raises.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(given)
    return file.getvalue()


class Arrived:
    """A parcel in the trainer. Its memory is taken, and its tensors and arrays are views of it."""

    def __init__(self, parcel: Parcel, mapped: MappedSegments) -> None:
        taken = {extent: mapped.take(extent) for extent in dict.fromkeys(parcel.beside)}
        self._buffers: list[Bytes] | None = [taken[extent] for extent in parcel.beside]
        self._pickled: Any = parcel.pickled
        if not isinstance(parcel.pickled, bytes):
            self._pickled = mapped.take(parcel.pickled)

    def unpack(self) -> Any:
        """Return the object. Call this once; only if unpickling raises, the call may be repeated.

        Raises:  whatever the unpickling of the object raises.
        """
        if self._buffers is None:
            raise RuntimeError("an interrupt destroyed this batch")
        unpacked = pickle.loads(self._pickled, buffers=self._buffers)
        self._pickled = self._buffers = None  # from now on, only tensors refer to the memory
        return unpacked


def discard(parcel: Parcel, mapped: MappedSegments) -> None:
    """Give the memory of a parcel back without unpacking the parcel."""
    for extent in dict.fromkeys(parcel.beside):
        mapped.give_back(extent)
    if not isinstance(parcel.pickled, bytes):
        mapped.give_back(parcel.pickled)


class _Pickler(pickle.Pickler):
    """Pickles like torch.multiprocessing, but puts the bytes of dense tensors elsewhere."""

    dispatch_table: Any = collections.ChainMap(  # noqa: RUF012 - never changed
        tensor_reducers,
        cast("dict[type, Any]", copyreg.dispatch_table),
    )

    def reducer_override(self, given: object) -> Any:
        """Return how to pickle a tensor or an array; NotImplemented for other objects."""
        if isinstance(given, torch.Tensor):
            return _reduced(given)
        if isinstance(given, torch.UntypedStorage) and given.device.type == "cpu":
            # Pickle the bytes: torch.multiprocessing would send the name of a file, which is
            # removed when the worker ends.
            empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
            raw = empty.set_(given).numpy()
            return _storage, (pickle.PickleBuffer(raw),)
        if type(given) is np.ndarray and not given.flags.writeable:
            return given.copy(order="A").__reduce_ex__(5)  # the unpickled copy is writable
        return NotImplemented


def _reduced(tensor: torch.Tensor) -> Any:
    kind = type(tensor)
    if tensor.device.type != "cpu" or (tensor.requires_grad and not tensor.is_leaf):
        return NotImplemented
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or (kind is not torch.Tensor and not _is_plain_subclass(kind))
    ):
        whole: Any = tensor
        return whole.__reduce_ex__(5)  # this pickler also pickles the parts of such a tensor
    plain = tensor.detach()
    if kind is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    plain = plain.resolve_conj().resolve_neg()
    # Make a tensor contiguous if its memory has gaps, so that other bytes are not sent. A tensor
    # without gaps keeps its strides: it may have another memory format, or be expanded.
    if _span(plain.shape, plain.stride()) > plain.numel():
        plain = plain.contiguous()
    # Compare the strides instead of calling is_contiguous(), which ignores the strides of
    # dimensions with one element.
    stride = None if plain.stride() == _row_major(plain.shape) else plain.stride()
    flat = plain.as_strided((_span(plain.shape, plain.stride()),), (1,))
    raw: Any = flat.view(torch.uint8).numpy()
    bytes_of = pickle.PickleBuffer(raw)
    if kind is torch.Tensor and stride is None and not tensor.requires_grad:
        return tensor_over, (bytes_of, tensor.dtype, tuple(tensor.shape))
    attributes = dict(tensor.__dict__) if kind is not torch.Tensor else {}
    return _special_tensor, (
        *(bytes_of, tensor.dtype, tuple(tensor.shape), stride),
        *(tensor.requires_grad, kind, attributes),
    )


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.from_numpy(np.frombuffer(buffer, np.uint8)).untyped_storage()


def _special_tensor(
    buffer: Any,
    dtype: torch.dtype,
    shape: _Shape,
    stride: _Shape | None,
    requires_grad: bool,
    kind: type[torch.Tensor],
    attributes: dict[str, Any],
) -> torch.Tensor:
    """Make a tensor that has other strides, requires a gradient, or is of a subclass."""
    if stride is None:
        tensor = tensor_over(buffer, dtype, shape)
    else:
        tensor = tensor_over(buffer, dtype, (_span(shape, stride),)).as_strided(shape, stride)
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
        tensor.__dict__.update(attributes)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _is_plain_subclass(kind: type[torch.Tensor]) -> bool:
    """Return whether this class is a dense tensor that only has another name and attributes."""
    return (
        kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and not issubclass(kind, torch.nn.Parameter)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last, including gaps."""
    if 0 in shape:
        return 0
    return 1 + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True))


def _row_major(shape: Sequence[int]) -> _Shape:
    """Return the strides of a contiguous tensor."""
    strides, expected = [], 1
    for size in reversed(shape):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
