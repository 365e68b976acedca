"""The messages between a node and its lender, the process that sends blocks to neighbours.

Messages travel over a Unix SOCK_SEQPACKET pair, one message per packet; a Request also crosses the
network, in a frame (neighbours/wire.py). The node answers each Asked with one Give or Refuse. The
lender answers each Give with one Given. The lender may end at any moment, which ends all of its
requests.
"""

from __future__ import annotations

from msgspec import Raw

from dataplane.model.config import PeerTls
from dataplane.model.records import BlockForm, Region, Stream, Unsigned
from dataplane.rpc.codec import Message
from dataplane.rpc.tasks import AttachArena, DetachArena

NO_DATASET = bytes(16)
"""The `dataset` of a Request for a slab or a manifest. The bytes of a manifest are requested like
those of a raw block.
"""


class StepRange(Message, frozen=True):
    """`count` steps of a stream, from step `first` on."""

    first: Unsigned
    count: Unsigned


class MakeSlab(Message, frozen=True):
    """Make the slab of these steps of a stream. The slab depends only on this message, so the same
    slab may be requested any number of times, and from several makers.

    The answer has a note, which is the encoded FromNode that a trainer would get: a Slab; Working,
    if the slab is not ready yet; or, if the data are bad and no slab can be made from them, the
    error. If the asker has too little room for the Slab, its bytes are not sent.
    """

    digest: str  # of the spec
    stream: Stream
    steps: StepRange  # counted from the start of the stream
    slot_bytes: Unsigned  # size of the asker's slots, which is also the size of the maker's slots
    opening: Raw  # how to open the job, an encoded OpenJob: decoded where the job is not open
    software: str = ""  # the software that decodes images, and hashes of functions; "": neither
    coming: tuple[StepRange, ...] = ()  # steps that the same maker will be asked for next


class LendingKeys(Message, frozen=True):
    """The key of a job's newest generation. The lender closes connections that were opened with the
    key of an older generation.
    """

    job_id: str
    generation: Unsigned
    key: bytes  # 32 bytes; b"": the job has left this node
    only_under: tuple[str, ...] = ()  # url prefixes of the data that may be lent; (): all data

    def __repr__(self) -> str:
        return f"LendingKeys({self.job_id!r}, {self.generation})"  # no key


class StartLending(Message, frozen=True):
    """Start lending. The block arena and the listening socket are sent along."""

    node_id: str  # the lender accepts only connections to this node id
    first_number: Unsigned = 1  # number of the first Asked; larger than all of earlier lenders
    log_level: str = "info"
    log_format: str = "text"
    keys: tuple[LendingKeys, ...] = ()  # known before the first neighbour is let in
    tls: PeerTls | None = None  # for all connections; absent: plain text


class Request(Message, frozen=True):
    """A request of a neighbour, which depends on `form`, `count` and `dataset`.

    RAW or DECODED, with a `count` of 1: bytes [offset, offset + length) of a block in this form.
    RAW, with a larger `count`: this many consecutive whole blocks from `block` on, of `length`
    bytes together. RAW, of NO_DATASET: bytes of a manifest. SLAB: a slab of at most `length` bytes,
    which `slab` describes, an encoded MakeSlab.
    """

    number: Unsigned
    dataset: bytes  # 16 bytes
    block: Unsigned
    offset: Unsigned  # in the block
    length: Unsigned
    form: BlockForm
    count: Unsigned = 1
    slab: bytes = b""


class Asked(Message, frozen=True):
    """A neighbour has sent this request. The blocks of a run have consecutive numbers, starting
    with `number`.
    """

    number: Unsigned
    job_id: str
    node_id: str  # of the neighbour
    request: Request
    only_under: tuple[str, ...] = ()  # as in LendingKeys, for the key of the connection


class Give(Message, frozen=True):
    """Send the note, this region of an arena, and the regions in `more`. The node does not change
    the regions before it receives Given.
    """

    number: Unsigned
    region: Region
    arena_id: Unsigned = 0  # 0: the block arena; otherwise an arena of AttachArena
    note: bytes = b""  # for a slab: an encoded FromNode
    more: tuple[Region, ...] = ()  # further regions of the same arena
    ends: tuple[Unsigned, ...] = ()  # one for each block; of a slab: ()


class Refuse(Message, frozen=True):
    """Refuse the request."""

    number: Unsigned


class Given(Message, frozen=True):
    """The lender no longer reads the regions of a Give."""

    number: Unsigned
    sent_bytes: Unsigned = 0  # bytes that the neighbour has received; 0 unless all have arrived


ToLenderBody = StartLending | LendingKeys | Give | Refuse | AttachArena | DetachArena
FromLenderBody = Asked | Given


class ToLender(Message, frozen=True):
    """The envelope of a node's message to its lender."""

    body: ToLenderBody


class FromLender(Message, frozen=True):
    """The envelope of a lender's message."""

    body: FromLenderBody
