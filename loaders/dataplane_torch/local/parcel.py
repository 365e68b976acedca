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
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from dataplane_torch.local.segments import Bytes, Extent, Mapped, Segments
from dataplane_torch.tensors import tensor_over

# Shorter ones are copied with the pickle: cheaper than a lease of memory, and they hold nothing.
_BESIDE_BYTES = 32 << 10

_Shape = tuple[int, ...]


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
        # Tensors that were collated into an extent, by address, until they are packed.
        self._collated: dict[int, tuple[Extent, weakref.ref[Bytes]]] = {}

    def collate_here(self) -> None:
        """Let torch's default_collate stack tensors straight into extents, in this process. Where a
        user's own table of collate functions has torch's, that makes no files in shared memory.
        """
        default_collate_fn_map[torch.Tensor] = self._stack
        storage: Any = torch.UntypedStorage
        storage._new_shared = _new_private

    def pack(self, batches: list[Any]) -> Parcel:
        """The one object in `batches`, which is taken out of it: nobody else may hold it.

        Raises:  whatever its pickling raises.
        """
        buffers: list[pickle.PickleBuffer] = []

        def is_short(buffer: pickle.PickleBuffer) -> bool:
            with buffer.raw() as raw:
                if raw.nbytes < self._beside_bytes:
                    return True
            buffers.append(buffer)
            return False

        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=is_short).dump(batches.pop())
        placed = self._placed(buffers)
        buffers.clear()
        handed = {one: self._handed_over(*one) for one in dict.fromkeys(placed)}
        beside = [handed[one] for one in placed]
        self.drop_unused()
        if file.tell() <= 2 * _BESIDE_BYTES:
            return Parcel(file.getvalue(), beside)
        extent = self._segments.allocate(file.tell())
        self._segments.memory(extent)[:] = file.getbuffer()
        return Parcel(extent, beside)

    def take_back(self, parcel: Parcel) -> None:
        """It will not be sent."""
        outer = [] if isinstance(parcel.pickled, bytes) else [parcel.pickled]
        for extent in [*dict.fromkeys(parcel.beside), *outer]:
            self._segments.free(extent.segment, extent.offset)

    def drop_unused(self) -> None:
        """Give up what was collated and not packed."""
        while self._collated:
            _, (extent, reference) = self._collated.popitem()
            self._free_when_dead(extent, reference)

    def _stack(
        self, batch: Sequence[torch.Tensor], *, collate_fn_map: object = None
    ) -> torch.Tensor:
        """Torch's collate_tensor_fn, into an extent where that is worth it."""
        del collate_fn_map
        first = batch[0]
        if first.layout is not torch.strided or first.is_nested or first.device.type != "cpu":
            return cast("torch.Tensor", collate_tensor_fn(batch))
        length = first.numel() * first.element_size() * len(batch)
        if length < self._beside_bytes or type(first) is not torch.Tensor or first.requires_grad:
            return _stacked(batch)
        if threading.get_ident() != self._thread:  # of the dataset's own; segments know but one
            return _stacked(batch)
        extent = self._segments.allocate(length)
        memory: Bytes = np.frombuffer(self._segments.memory(extent), np.uint8)
        self._collated[_address(memory)] = extent, weakref.ref(memory)
        out = tensor_over(memory, first.dtype, (len(batch), *first.shape))
        return torch.stack(tuple(batch), 0, out=out)

    def _placed(self, buffers: list[pickle.PickleBuffer]) -> list[tuple[Extent, int | None]]:
        """The extents of buffers' bytes, and where they were collated, if they were. Two buffers of
        the same bytes, such as a batch and a view of it, have one extent.
        """
        found: dict[tuple[int, int], tuple[Extent, int | None]] = {}
        placed = []
        for buffer in buffers:
            source = np.frombuffer(buffer.raw(), np.uint8)
            address, length = _address(source), source.nbytes
            if (address, length) not in found:
                known = self._collated.get(address)
                if known is not None and known[0].length == length:
                    found[address, length] = known[0], address
                else:
                    extent = self._segments.allocate(length)
                    np.frombuffer(self._segments.memory(extent), np.uint8)[:] = source
                    found[address, length] = extent, None
            placed.append(found[address, length])
        return placed

    def _handed_over(self, extent: Extent, address: int | None) -> Extent:
        """The same, or a copy where the dataset or its collate function still holds the tensor:
        it must not change below their hands.
        """
        known = self._collated.pop(address, None) if address is not None else None
        if known is None or known[1]() is None:
            return extent
        copied = self._segments.allocate(extent.length)
        self._segments.memory(copied)[:] = self._segments.memory(extent)
        self._free_when_dead(*known)
        return copied

    def _free_when_dead(self, extent: Extent, reference: weakref.ref[Bytes]) -> None:
        memory = reference()
        if memory is None:
            self._segments.free(extent.segment, extent.offset)
        else:
            weakref.finalize(memory, self._segments.free_soon, extent.segment, extent.offset)


def _stacked(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of the first one's type and contiguous, as torch's workers make it."""
    out = torch.stack(tuple(batch), 0)
    if out.dtype is batch[0].dtype and out.is_contiguous():
        return out
    out = batch[0].new_empty((len(batch), *batch[0].shape))
    return torch.stack(tuple(batch), 0, out=out)


def pickled_whole(given: object) -> bytes:
    """A pickle in which everything is, as it would be in a parcel.

    Raises:  whatever its pickling raises.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(given)
    return file.getvalue()


def unpack(parcel: Parcel, mapped: Mapped) -> Any:
    """The object of a parcel; its tensors and arrays are views of the worker's segments.

    Raises:  whatever its unpickling raises.
    """
    taken = {extent: mapped.take(extent) for extent in dict.fromkeys(parcel.beside)}
    buffers = [taken[extent] for extent in parcel.beside]
    if isinstance(parcel.pickled, bytes):
        return pickle.loads(parcel.pickled, buffers=buffers)
    try:
        with mapped.peek(parcel.pickled) as pickled:
            return pickle.loads(pickled, buffers=buffers)
    finally:
        mapped.give_back(parcel.pickled)


def discard(parcel: Parcel, mapped: Mapped) -> None:
    """Give the memory of a parcel back unread."""
    for extent in dict.fromkeys(parcel.beside):
        mapped.give_back(extent)
    if not isinstance(parcel.pickled, bytes):
        mapped.give_back(parcel.pickled)


class _Pickler(pickle.Pickler):
    """As torch.multiprocessing pickles, but for dense tensors, whose bytes go beside the pickle."""

    dispatch_table: Any = collections.ChainMap(  # noqa: RUF012 - nobody writes it
        cast("dict[type, Any]", ForkingPickler._extra_reducers),  # type: ignore[attr-defined]
        cast("dict[type, Any]", copyreg.dispatch_table),
    )

    def reducer_override(self, given: object) -> Any:
        """How tensors and arrays are pickled; anything else as ever."""
        if isinstance(given, torch.Tensor):
            return _reduced(given)
        if isinstance(given, torch.UntypedStorage) and given.device.type == "cpu":
            # By value: torch.multiprocessing would name a file that lives as long as the worker.
            raw: Any = torch.empty(0, dtype=torch.uint8).set_(given).numpy()
            return _storage, (pickle.PickleBuffer(raw),)
        if type(given) is np.ndarray and not given.flags.writeable:
            return given.copy(order="A").__reduce_ex__(5)  # what was pickled can be written
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
    if not plain.is_contiguous() and not _is_dense(plain):
        plain = plain.contiguous()
    # Of another memory format, say; and dimensions of one element may have any stride.
    stride = None if plain.stride() == _row_major(plain.shape) else plain.stride()
    flat = plain.as_strided((plain.numel(),), (1,))
    raw: Any = flat.view(torch.uint8).numpy()
    bytes_of = pickle.PickleBuffer(raw)
    if kind is torch.Tensor and stride is None and not tensor.requires_grad:
        return tensor_over, (bytes_of, tensor.dtype, tuple(tensor.shape))
    attributes = dict(tensor.__dict__) if kind is not torch.Tensor else {}
    return _special_tensor, (
        *(bytes_of, tensor.dtype, tuple(tensor.shape), stride),
        *(tensor.requires_grad, kind, attributes),
    )


def _new_private(size_bytes: int, *, device: str = "cpu") -> Any:
    storage: Any = torch.UntypedStorage
    return storage(size_bytes, device=device)


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
    """The same with a memory format, a gradient, or of a subclass."""
    if stride is None:
        tensor = tensor_over(buffer, dtype, shape)
    else:
        length = int(np.prod(shape, dtype=np.int64))
        tensor = tensor_over(buffer, dtype, (length,)).as_strided(shape, stride)
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


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a piece of memory, in whatever order, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _row_major(shape: Sequence[int]) -> _Shape:
    """The strides of a tensor that was made contiguous."""
    strides, expected = [], 1
    for size in reversed(shape):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))


def _address(array: Bytes) -> int:
    return int(array.__array_interface__["data"][0])
