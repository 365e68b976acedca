"""Receive the bytes of an answer without the interpreter lock: Python bindings of receive.c."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from pathlib import Path

from msgspec import Struct

from dataplane.base import compiled
from dataplane.store.faults import SilentError
from dataplane.store.reads import Sink

SOURCE = Path(__file__).with_name("receive.c")
LIBRARY = Path(__file__).with_name("libreceive.so")

_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_SIGNATURES: dict[str, compiled.Signature] = {
    # sock, file, offset, length, deadline_ms, silence_ms, end: int32[2] -> bytes
    "receive_into_file": (_I64, (_I32, _I32, *(_I64,) * 4, _POINTER)),
    # sock, into, length, deadline_ms, silence_ms, end: int32[2] -> bytes
    "receive_into_memory": (_I64, (_I32, _POINTER, *(_I64,) * 3, _POINTER)),
}
_MS_MAX = 1 << 62
# The reasons why fewer bytes came than requested, with the numbers of receive.c.
_LATE, _SILENT, _BROKEN, _NOT_STORED = 1, 2, 3, 4


class Patience(Struct):
    """The limits of a wait for an answer: its deadline, and `silence_s` until its next bytes."""

    deadline: float = float("inf")
    silence_s: float = float("inf")

    @property
    def ms(self) -> tuple[int, int]:
        """The deadline, on the same clock, and `silence_s`, both in milliseconds."""
        return _ms(self.deadline), _ms(self.silence_s)


@functools.cache
def _library() -> ctypes.CDLL:
    return compiled.load(LIBRARY, SOURCE, "receive_source_crc", _SIGNATURES)


def receive_into_file(sock: socket.socket, sink: Sink, length: int, patience: Patience) -> int:
    """Move up to this many bytes into a sink, with a single copy, made by the kernel. Return how
    many; fewer if no more come, or if this kernel or this file is not suitable.

    Raises:  TimeoutError, SilentError.  OSError: the connection broke.  Errors of `sink`.
    """
    end = (_I32 * 2)()
    count = _library().receive_into_file(
        sock.fileno(), sink.fd, sink.offset, length, *patience.ms, end
    )
    sink.moved(count, end[1] if end[0] == _NOT_STORED else 0)
    _check(*end)
    return int(count)


def receive_into_memory(sock: socket.socket, into: memoryview, patience: Patience) -> int:
    """Receive as many bytes as the buffer holds; fewer only if no more come. Return how many.

    Raises:  TimeoutError, SilentError.  OSError: the connection broke.
    """
    end = (_I32 * 2)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(into)) if into else 0
    count = _library().receive_into_memory(sock.fileno(), address, len(into), *patience.ms, end)
    _check(*end)
    return int(count)


def _check(end: int, error: int) -> None:
    if end == _LATE:
        raise TimeoutError
    if end == _SILENT:
        raise SilentError
    if end == _BROKEN:
        raise OSError(error, os.strerror(error))


def _ms(seconds: float) -> int:
    return int(min(seconds * 1000, _MS_MAX))
