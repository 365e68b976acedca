"""Batches between processes: a pickle of their structure, and their bytes beside it.

Whatever a dataset and a collate function return may travel: nested dicts, named tuples, strings,
objects of the user's own. What is dense and long (tensors, numpy arrays) is not in the pickle but
in extents of the worker's segments, most of it collated there in the first place.

A pickle never leaves the family of processes that the trainer started.
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

# Shorter buffers travel in the pickle: copying is cheaper than an extent, and pins no memory.
_BESIDE_BYTES = 32 << 10

_Shape = tuple[int, ...]
_Collated = tuple[Extent, weakref.ref[Bytes]]


class Parcel(NamedTuple):
    """A packed object: its pickle, or the extent where that lies, and the extents beside it."""

    pickled: bytes | Extent
    beside: list[Extent]


class Packer:
    """The worker's side. With `everything`, as for memory that devices read, short tensors lie
    beside the pickle too.
    """

    def __init__(self, segments: Segments, *, everything: bool) -> None:
        self._segments = segments
        self._beside_bytes = 1 if everything else _BESIDE_BYTES
        self._thread = threading.get_ident()
        # Live buffers that were collated into an extent, by address, until they are packed.
        self._collated: dict[int, _Collated] = {}
        self._taken: list[Extent] = []

    def collate_here(self) -> None:
        """Let torch's default_collate stack tensors straight into extents, in this process, unless
        the user has told it how else. Where a user's own table of collate functions has torch's,
        that makes no files in shared memory.
        """
        collate_tensors_by(self._stack)
        make_no_shared_storage()

    def pack(self, batches: list[Any]) -> Parcel:
        """Pack the only object in `batches`, and remove it there: nobody else may hold it.

        Raises:  whatever its pickling raises.
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
        """Stack tensors like torch's own function, into an extent where that is worth it."""
        del collate_fn_map
        first = batch[0]
        if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
            return stack_tensors(batch)
        length = first.numel() * first.element_size() * len(batch)
        if length < self._beside_bytes or type(first) is not torch.Tensor or first.requires_grad:
            return _stacked(batch)
        if threading.get_ident() != self._thread:  # a dataset's thread; segments allow only one
            return _stacked(batch)
        extent = self._segments.allocate(length)
        memory: Bytes = np.frombuffer(self._segments.memory(extent), np.uint8)
        address = _address(memory)
        self._collated[address] = extent, weakref.ref(memory)
        weakref.finalize(memory, self._unused, address).atexit = False
        out = tensor_over(memory, first.dtype, (len(batch), *first.shape))
        return torch.stack(tuple(batch), 0, out=out)

    def _unused(self, address: int) -> None:
        """Free the extent of a collated buffer that died before it was packed."""
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
        """Return the tensors that the dataset or its collate function still holds: they must not
        change while in use. The others are dead now, and are handed over.
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
    """Stack tensors in the first one's type, contiguous, like torch's workers."""
    out = torch.stack(tuple(batch), 0)
    if out.dtype is batch[0].dtype and out.is_contiguous():
        return out
    out = batch[0].new_empty((len(batch), *batch[0].shape))
    return torch.stack(tuple(batch), 0, out=out)


def pickled_whole(given: object) -> bytes:
    """Pickle an object as for a parcel, but with all bytes in the pickle.

    Raises:  whatever its pickling raises.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(given)
    return file.getvalue()


class Arrived:
    """A parcel in the trainer, which has taken its memory: tensors and arrays are views of it."""

    def __init__(self, parcel: Parcel, mapped: MappedSegments) -> None:
        taken = {extent: mapped.take(extent) for extent in dict.fromkeys(parcel.beside)}
        self._buffers: list[Bytes] | None = [taken[extent] for extent in parcel.beside]
        self._pickled: Any = parcel.pickled
        if not isinstance(parcel.pickled, bytes):
            self._pickled = mapped.take(parcel.pickled)

    def unpack(self) -> Any:
        """Return the object, once. If unpickling raises, the call may be repeated.

        Raises:  whatever its unpickling raises.
        """
        if self._buffers is None:
            raise RuntimeError("an interrupt destroyed this batch")
        unpacked = pickle.loads(self._pickled, buffers=self._buffers)
        self._pickled = self._buffers = None  # a tensor that is kept keeps its memory
        return unpacked


def discard(parcel: Parcel, mapped: MappedSegments) -> None:
    """Give the memory of a parcel back unread."""
    for extent in dict.fromkeys(parcel.beside):
        mapped.give_back(extent)
    if not isinstance(parcel.pickled, bytes):
        mapped.give_back(parcel.pickled)


class _Pickler(pickle.Pickler):
    """Pickles as torch.multiprocessing does, but puts dense tensors' bytes beside the pickle."""

    dispatch_table: Any = collections.ChainMap(  # noqa: RUF012 - nobody writes it
        tensor_reducers,
        cast("dict[type, Any]", copyreg.dispatch_table),
    )

    def reducer_override(self, given: object) -> Any:
        """Return how to pickle a tensor or an array; other objects have the default."""
        if isinstance(given, torch.Tensor):
            return _reduced(given)
        if isinstance(given, torch.UntypedStorage) and given.device.type == "cpu":
            # By value: torch.multiprocessing would name a file that lives as long as the worker.
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
        return whole.__reduce_ex__(5)  # its parts come by here
    plain = tensor.detach()
    if kind is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    plain = plain.resolve_conj().resolve_neg()
    # A span longer than all elements has other bytes between them. Any other tensor may have
    # another memory format, or be expanded.
    if _span(plain.shape, plain.stride()) > plain.numel():
        plain = plain.contiguous()
    # Dimensions of one element may have any stride.
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
    """Make a tensor that has a memory format, a gradient or a subclass, or is expanded."""
    if stride is None:
        tensor = tensor_over(buffer, dtype, shape)
    else:
        tensor = tensor_over(buffer, dtype, (_span(shape, stride),)).as_strided(shape, stride)
    if kind is not torch.Tensor:
        tensor = tensor.as_subclass(kind)
        tensor.__dict__.update(attributes)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _is_plain_subclass(kind: type[torch.Tensor]) -> bool:
    """Whether a tensor of this class is a dense tensor with a name and attributes, no more."""
    return (
        kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and not issubclass(kind, torch.nn.Parameter)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements fit from a tensor's first one to its last."""
    if 0 in shape:
        return 0
    return 1 + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True))


def _row_major(shape: Sequence[int]) -> _Shape:
    """The strides of a tensor that was made contiguous."""
    strides, expected = [], 1
    for size in reversed(shape):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
