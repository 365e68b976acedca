"""A file made of pieces of a shard at their offsets, which pyarrow reads without copying."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa


class SpliceFile:
    """A read-only file of `size_bytes` bytes that has only some pieces of its content.

    `read` returns views of the pieces, which pyarrow keeps alive as long as an array needs them. A
    read outside of the pieces is an error, never zeros.
    """

    closed = False

    def __init__(self, size_bytes: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self._size_bytes = size_bytes
        self._pieces = tuple(piece for piece in pieces if len(piece[1]))
        self._at = 0

    def read(self, length: int = -1) -> memoryview:
        """Read up to `length` bytes at the current place."""
        left = max(0, self._size_bytes - self._at)
        length = left if length < 0 else min(length, left)
        view = self._view(self._at, length)
        self._at += len(view)
        return view

    def _view(self, at: int, length: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        for offset, piece in self._pieces:
            if offset <= at < offset + len(piece):
                view = piece[at - offset : at - offset + length]
                if len(view) == length:
                    return view
                rest = self._view(at + len(view), length - len(view))
                return memoryview(b"".join((view, rest)))
        raise OSError(f"the shard's metadata points to byte {at}, outside of the block")

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another place; see io.IOBase.seek."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the current place."""
        return self._at

    def close(self) -> None:
        """Do nothing: the pieces belong to the caller."""

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def seekable(self) -> bool:
        """Always."""
        return True


def spliced(size_bytes: int, pieces: Sequence[tuple[int, memoryview]]) -> pa.PythonFile:
    """The pieces as a pyarrow file."""
    return pa.PythonFile(SpliceFile(size_bytes, pieces), mode="r")
