"""Errors about damaged bytes, with the same message form and nouns in all formats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pyarrow as pa

from dataplane.base.units import clipped
from dataplane.model.errors import CorruptShard, DataplaneError

# The errors of pyarrow and Python for damaged bytes. Errors for lack of memory are left out, since
# these are not the shard's fault.
FOREIGN = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowKeyError,
    pa.ArrowIndexError,
    pa.ArrowNotImplementedError,
    pa.ArrowSerializationError,
    OSError,
    ValueError,
    EOFError,
    LookupError,
    OverflowError,
)

# Messages of errors that mean lack of memory, although they are not MemoryErrors.
_MEMORY_WORDS = (
    "bad_alloc",
    "out of memory",
    "malloc of size",
    "realloc of size",
    "cannot allocate memory",
    "can't start new thread",
    # Messages of the dynamic linker, and of the interpreter if it loses a MemoryError.
    "cannot map zero-fill pages",
    "failed to map segment",
    "without setting an exception",
    "without exception set",
)

_SIGNATURES = (
    (b"PAR1", "a Parquet file"),
    (b"PARE", "an encrypted Parquet file"),
    (b"ARROW1", "an Arrow IPC file"),
    (b"\xff\xff\xff\xff", "an Arrow IPC stream"),
    (b"FEA1", "a Feather V1 file (rewrite it as Feather V2)"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstandard data"),
    (b"PK\x03\x04", "a zip file"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG", "a PNG image"),
    (b"%PDF", "a PDF file"),
    (b"version https://git-lfs", "a Git LFS pointer (fetch the real object: git lfs pull)"),
)


def describe(head: bytes) -> str:
    """Describe the first bytes of a shard, for an error message."""
    if not head:
        return "nothing"
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return f"an HTML page ({_quoted(head)})"
    if text.startswith(b"<"):
        return f"an XML document, perhaps a store's error page ({_quoted(head)})"
    if text.startswith((b"{", b"[")):
        return f"JSON text ({_quoted(head)})"
    if head[257:262] == b"ustar":
        return "a tar archive"
    return f"bytes {head[:16].hex(' ')}"


def _quoted(head: bytes) -> str:
    return repr(head[:80].decode("utf-8", "replace"))


def text_of(fault: BaseException) -> str:
    """Return an error's message, even if its __str__ raises."""
    try:
        return str(fault)
    except Exception as error:  # noqa: BLE001 - another library's __str__ may raise anything
        return f"(its __str__ fails with {type(error).__name__})"


def is_out_of_memory(fault: BaseException) -> bool:
    """Return whether this error means that memory ran out, in any library."""
    if isinstance(fault, MemoryError | DataplaneError):
        return isinstance(fault, MemoryError)
    text = text_of(fault).lower()
    return any(words in text for words in _MEMORY_WORDS)


def corrupt(url: str, offset: int, what: str, **nouns: str | int) -> CorruptShard:
    """Return the error for bytes of `url` at `offset` that violate the format. `nouns` are
    `expected` and `found`, where they are known.
    """
    known = {"expected": "", "found": ""} | nouns
    shown = ", ".join(f"{name} {value}" for name, value in known.items() if value != "")
    detail = f": {shown}" if shown else ""
    return CorruptShard(f"{url}: byte {offset}: {what}{detail}", shard=url, offset=offset, **known)


@contextlib.contextmanager
def foreign_faults(url: str, offset: int, what: str) -> Iterator[None]:
    """Convert the exceptions of a library's decoder on damaged bytes to CorruptShard.

    Raises:  CorruptShard.  MemoryError: the decoder ran out of memory, whatever it raised.
    """
    try:
        yield
    except FOREIGN as fault:
        if is_out_of_memory(fault):
            raise MemoryError(f"{what}: {fault}") from fault
        first = str(fault).strip().splitlines() or [type(fault).__name__]
        raise corrupt(url, offset, f"{what} ({first[0][:300]})") from fault


def reason_of(error: DataplaneError, url: object) -> str:
    """Return the first line of an error, without the url of the shard."""
    return str(error).removeprefix(f"{url}: ").partition("\n")[0]


MANY_MIN, MANY_SHARE = 16, 2
REASON_MAX = 300


def bad_rows(
    read: Callable[[int, int], object],
    count: int,
    fault: DataplaneError,
    kinds: tuple[type[DataplaneError], ...] = (CorruptShard,),
    *,
    is_block: bool = True,
) -> dict[int, str]:
    """Find the bad rows after reading all rows together has failed with `fault`, by reading halves.
    Return the rows at which reading fails with errors of these kinds, and why.

    Raises:  `fault`: none of the rows is bad; or, of a block, more than half and more than 16, or
    all.
    """
    bad: dict[int, str] = {}
    todo = [(0, count)]
    while todo:
        first, stop = todo.pop()
        error = fault
        if stop - first < count:
            try:
                read(first, stop)
                continue
            except kinds as own:
                error = own
        if stop - first > 1:
            middle = (first + stop) // 2
            todo += [(middle, stop), (first, middle)]
            continue
        bad[first] = clipped(reason_of(error, error.nouns.get("shard")), REASON_MAX)
        is_most = len(bad) > max(MANY_MIN, count // MANY_SHARE) or len(bad) == count
        if is_block and is_most:
            raise fault
    if not bad:  # reading fails only for all rows together
        raise fault
    return bad


def require_bytes(url: str, size_bytes: int, name: str) -> None:
    """Refuse an empty shard.

    Raises:  CorruptShard: no supported format writes zero bytes for zero samples; an empty object
    is nearly always a failed upload.
    """
    if size_bytes == 0:
        raise corrupt(
            url,
            0,
            "the shard is empty; write it again or leave it out of the dataset",
            expected=f"a {name} shard",
            found="0 bytes",
        )
