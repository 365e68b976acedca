"""The frames of a data connection after its handshake. Pure: bytes in, values out.

One request at a time:

    asker   Request                  the bytes of a block that it wants
    lender  Answer                   GIVEN: `length` bytes of payload follow, with this CRC32C
                                     REFUSED, ONLY_DECODED: nothing follows
    asker   Receipt                  after GIVEN: the whole payload has arrived

Or for a run of blocks, which it wants whole and which the dataset has one after the other:

    asker   Request of code 3        `offset` is their number, `length` that of all together
    lender  Answer                   GIVEN: first a note follows, with 8 bytes for each block: 0 if
                                     it is given, all bits if it is refused, otherwise the length
                                     of the decoded block, if there is only that. Then `length`
                                     bytes of payload: the blocks that are given. The CRC32C is of
                                     both
                                     REFUSED: nothing follows
    asker   Receipt                  after GIVEN: the note and the whole payload have arrived

Or for a slab:

    asker   Request of form SLAB     `length` is the room that it has for the slab
            body                     `offset` bytes: an encoded MakeSlab
    lender  Answer                   GIVEN: first a note follows, `note_bytes` that are an encoded
                                     Assembled; then `length` bytes of payload, no more than there
                                     is room for, maybe none. The CRC32C is of both
                                     REFUSED: nothing follows
                                     UNKNOWN: nothing follows; the asker may send the request again,
                                     with a body that says how to open the job
    asker   Receipt                  after GIVEN: the note and the whole payload have arrived

The receipt ends the lender's claim on the memory that it sends from. `sendfile` does not copy: the
kernel refers to the pages of the arena until the bytes have left, and on one host (loopback, veth)
the receiving socket refers to the very same pages until its process has read them, long after TCP
has acknowledged them and SIOCOUTQ is 0. Only the receiver knows when they may change.

All numbers are little-endian. Anything else than these frames ends the connection.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dataplane.model.records import BlockForm

VERSION = 2
LENGTH_MAX = 1 << 40
"""The largest payload that can be requested, so that sums of lengths stay within 64 bits."""
BODY_BYTES_MAX = 1 << 20
NOTE_BYTES_MAX = 4 << 20
"""A note says where the columns lie, in 5 to 15 bytes each: 280,000 columns at least."""

RUN_BLOCKS_MAX = 128
"""Asked for at once."""
RUN_BYTES_MAX = 2 << 20
"""Asked for at once, of several blocks: they wait for each other."""
GIVEN_WHOLE, NOT_GIVEN = 0, (1 << 64) - 1
"""In the note about a run."""
NO_DATASET = bytes(16)
"""The dataset of a slab, and of a manifest, which is requested like the bytes of a raw block."""

_REQUEST = struct.Struct("<4sHHQ16sQQQ")
_ANSWER = struct.Struct("<4sHHQQII")
_RECEIPT = struct.Struct("<4sIQ")
_REQUEST_MAGIC, _ANSWER_MAGIC, _RECEIPT_MAGIC = b"DPnq", b"DPna", b"DPnr"
REQUEST_BYTES, ANSWER_BYTES, RECEIPT_BYTES = _REQUEST.size, _ANSWER.size, _RECEIPT.size
_FORMS = (BlockForm.RAW, BlockForm.DECODED, BlockForm.SLAB)
_RUN = len(_FORMS)


class WrongFrameError(Exception):
    """These bytes are not the expected frame; says why."""


class Outcome(enum.IntEnum):
    """The outcome of a request."""

    GIVEN = 1
    REFUSED = 2
    ONLY_DECODED = 3
    UNKNOWN = 4


class Request(Struct, frozen=True):
    """Bytes [offset, offset + length) of a block in this form. SLAB: a slab of at most `length`
    bytes, described in a body of `offset` bytes; `dataset` and `block` are 0. With a `count` of
    more than 1: so many whole blocks of form RAW, which have `length` bytes together, from `block`
    on; `offset` is 0.
    """

    number: int
    dataset: bytes
    block: int
    offset: int
    length: int
    form: BlockForm
    count: int = 1


class Answer(Struct, frozen=True):
    """GIVEN: `note_bytes`, which slabs and runs have, and `length` bytes with this CRC32C follow.
    ONLY_DECODED: `length` is that of the decoded block. REFUSED, UNKNOWN: 0.
    """

    number: int
    outcome: Outcome
    length: int = 0
    crc32c: int = 0
    note_bytes: int = 0


def pack_request(request: Request) -> bytes:
    """REQUEST_BYTES bytes."""
    is_run = request.count > 1
    return _REQUEST.pack(
        _REQUEST_MAGIC,
        VERSION,
        _RUN if is_run else _FORMS.index(request.form),
        request.number,
        request.dataset,
        request.block,
        request.count if is_run else request.offset,
        request.length,
    )


def unpack_request(frame: bytes | bytearray) -> Request:
    """Raises:  WrongFrameError."""
    magic, version, form, number, dataset, block, offset, length = _unpack(_REQUEST, frame)
    _check(magic, _REQUEST_MAGIC, "request")
    if version != VERSION:
        raise WrongFrameError(f"a request of version {version}, not {VERSION}")
    if form > _RUN:
        raise WrongFrameError(f"a request for form {form}")
    if not 0 < length <= LENGTH_MAX or offset > LENGTH_MAX:
        raise WrongFrameError(f"a request for {length} bytes at {offset}")
    if form == _RUN:
        if not 1 < offset <= RUN_BLOCKS_MAX or length > RUN_BYTES_MAX:
            raise WrongFrameError(f"a request for {length} bytes of {offset} blocks")
        return Request(number, dataset, block, 0, length, BlockForm.RAW, offset)
    if _FORMS[form] is BlockForm.SLAB and (
        not 0 < offset <= BODY_BYTES_MAX or (dataset, block) != (NO_DATASET, 0)
    ):
        raise WrongFrameError(f"a request for a slab, with {offset} bytes about it")
    return Request(number, dataset, block, offset, length, _FORMS[form])


def pack_answer(answer: Answer) -> bytes:
    """ANSWER_BYTES bytes."""
    return _ANSWER.pack(
        _ANSWER_MAGIC,
        answer.outcome,
        0,
        answer.number,
        answer.length,
        answer.crc32c,
        answer.note_bytes,
    )


def unpack_answer(frame: bytes | bytearray, request: Request) -> Answer:
    """The answer to this request.   Raises:  WrongFrameError."""
    magic, code, zero, number, length, crc32c, note_bytes = _unpack(_ANSWER, frame)
    _check(magic, _ANSWER_MAGIC, "answer")
    if number != request.number:
        raise WrongFrameError(f"an answer to request {number}, not {request.number}")
    try:
        outcome = Outcome(code)
    except ValueError:
        raise WrongFrameError(f"an answer with outcome {code}") from None
    if zero or not _fits(request, outcome, length, note_bytes):
        raise WrongFrameError(f"an answer {outcome.name} of {length} and {note_bytes} bytes")
    return Answer(number, outcome, length, crc32c, note_bytes)


def slab_request(number: int, room: int, body: bytes) -> Request:
    """Return the request that precedes this body."""
    return Request(number, NO_DATASET, 0, len(body), room, BlockForm.SLAB)


def _fits(request: Request, outcome: Outcome, length: int, note_bytes: int) -> bool:
    is_slab = request.form is BlockForm.SLAB
    is_run = request.count > 1
    if outcome is Outcome.GIVEN and is_run:
        return length <= request.length and note_bytes == run_note_bytes(request.count)
    if outcome is Outcome.GIVEN and is_slab:
        return length <= request.length and note_bytes <= NOTE_BYTES_MAX
    if outcome is Outcome.GIVEN:
        return length == request.length and not note_bytes
    if outcome is Outcome.ONLY_DECODED:
        is_one = request.form is BlockForm.RAW and not is_run
        return is_one and 0 < length <= LENGTH_MAX and not note_bytes
    return length == note_bytes == 0 and (outcome is Outcome.REFUSED or is_slab)


def run_note_bytes(count: int) -> int:
    """Return the length of the note about this many blocks."""
    return 8 * count


def pack_run_note(ends: Sequence[int]) -> bytes:
    """Encode the outcome of each block: GIVEN_WHOLE, NOT_GIVEN, or the length of the
    decoded one.
    """
    return struct.pack(f"<{len(ends)}Q", *ends)


def unpack_run_note(note: bytes, answer: Answer, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the outcomes of blocks of these lengths.   Raises:  WrongFrameError."""
    ends = struct.unpack(f"<{len(lengths)}Q", note)
    given = sum(n for n, end in zip(lengths, ends, strict=True) if end == GIVEN_WHOLE)
    if given != answer.length or any(LENGTH_MAX < end < NOT_GIVEN for end in ends):
        raise WrongFrameError(f"{answer.length} bytes for blocks of which {given} bytes are given")
    return ends


def pack_receipt(number: int) -> bytes:
    """RECEIPT_BYTES bytes."""
    return _RECEIPT.pack(_RECEIPT_MAGIC, 0, number)


def check_receipt(frame: bytes | bytearray, number: int) -> None:
    """Raises:  WrongFrameError: it is not the receipt of this request."""
    magic, zero, found = _unpack(_RECEIPT, frame)
    _check(magic, _RECEIPT_MAGIC, "receipt")
    if zero or found != number:
        raise WrongFrameError(f"a receipt of request {found}, not {number}")


def _unpack(form: struct.Struct, frame: bytes | bytearray) -> tuple[Any, ...]:
    if len(frame) != form.size:
        raise WrongFrameError(f"{len(frame)} bytes instead of {form.size}")
    return form.unpack(frame)


def _check(magic: bytes, expected: bytes, name: str) -> None:
    if magic != expected:
        raise WrongFrameError(f"{magic!r} where a {name} begins")
