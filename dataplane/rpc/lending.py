"""The messages between a node and its lender, the process that sends blocks to neighbours.

Over a Unix SOCK_SEQPACKET pair, one message per packet; a Request also crosses the network, in a
frame (neighbours/wire.py). The node answers each Asked with one Give, GiveDecodedOnly or Refuse;
each Give is followed by one Given. The lender may end at any moment: then all of its numbers are
over.
"""

from __future__ import annotations

from dataplane.model.config import PeerTls
from dataplane.model.records import BlockForm, Region, Stream, Unsigned
from dataplane.rpc.codec import Message
from dataplane.rpc.messages import OpenJob

NO_DATASET = bytes(16)
"""The dataset of a slab, and of a manifest, which is requested like the bytes of a raw block."""


class StepRange(Message, frozen=True):
    """So many steps of a stream, from this one on."""

    first: Unsigned
    count: Unsigned


class MakeSlab(Message, frozen=True):
    """Make the slab of these steps of a stream; those in `coming` will be asked for next. The slab
    depends on nothing else than what is said here, so it may be asked for any number of times, and
    of several makers.

    The note that comes with the answer is an encoded tasks.Result. Its body is an Assembled, which
    describes the slab; with `batch_count` 0 and without a slab, if the asker has too little room
    for the first batch. Or it is the error for which the slab cannot be made from its data.
    """

    digest: str  # of the spec
    stream: Stream  # its steps count from where it begins
    steps: StepRange
    slot_bytes: Unsigned  # of the slot it goes to: the maker uses equal ones
    software: str = ""  # that decodes images, and hashes of the code of functions; "": none
    coming: tuple[StepRange, ...] = ()  # what the same maker will be asked for next
    opening: OpenJob | None = None  # sent to a maker that does not know the job


class LendingKeys(Message, frozen=True):
    """The key of a job's newest generation; b"" if the job has left this node. For it is lent only
    what is `only_under` these urls; () for everything. Connections that older generations have
    opened are closed.
    """

    job_id: str
    generation: Unsigned
    key: bytes  # 32 bytes; none: the job has left this node
    only_under: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"LendingKeys({self.job_id!r}, {self.generation})"  # no key


class StartLending(Message, frozen=True):
    """Who lends. The block arena and the listening socket are sent with it."""

    node_id: str  # whom neighbours must ask for
    first_number: Unsigned = 1  # of what is asked: larger than those of lenders before
    log_level: str = "info"
    log_format: str = "text"
    keys: tuple[LendingKeys, ...] = ()  # known before the first neighbour is let in
    tls: PeerTls | None = None  # of all connections; none: plain text


class Request(Message, frozen=True):
    """Bytes [offset, offset + length) of a block in this form. With a `count` of more than 1: so
    many whole blocks of form RAW from `block` on, which the dataset has one after the other and
    which have `length` bytes together. Of NO_DATASET: bytes of a manifest. SLAB: a slab of at most
    `length` bytes, described in `slab`, an encoded MakeSlab.
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
    """A neighbour sends this request. It gets only what is `only_under` these urls, as the key says
    with which its connection was opened. The blocks of a run have the numbers from `number` on.
    """

    number: Unsigned
    job_id: str
    node_id: str  # who asks
    request: Request
    only_under: tuple[str, ...] = ()


class Give(Message, frozen=True):
    """Send this region of an arena, and those of `more`, after the note. They stay as they are
    until Given.
    """

    number: Unsigned
    region: Region  # as long as was asked for; of a slab at most so long, or empty
    arena_id: Unsigned = 0  # 0: the block arena; otherwise one that was lent before
    note: bytes = b""  # of a slab: a Result
    more: tuple[Region, ...] = ()  # of the same arena; sent after it
    ends: tuple[Unsigned, ...] = ()  # one for each block of a run


class GiveDecodedOnly(Message, frozen=True):
    """Say that there is only the decoded block, of this length."""

    number: Unsigned
    length: Unsigned


class Refuse(Message, frozen=True):
    """Say no; `is_unknown`: since the job of the slab is not open here."""

    number: Unsigned
    is_unknown: bool = False  # ask again with `opening`


class LendArena(Message, frozen=True):
    """Regions of this arena may be given; its descriptor is sent along."""

    arena_id: Unsigned


class ReturnArena(Message, frozen=True):
    """No region of this arena will be given any more."""

    arena_id: Unsigned


class Given(Message, frozen=True):
    """The region is no longer read. `sent_bytes` have reached the neighbour: all or none."""

    number: Unsigned
    sent_bytes: Unsigned = 0  # that the neighbour has received; 0 if not all of them


ToLenderBody = (
    StartLending | LendingKeys | Give | GiveDecodedOnly | Refuse | LendArena | ReturnArena
)
FromLenderBody = Asked | Given


class ToLender(Message, frozen=True):
    """The envelope of a node's message to its lender."""

    body: ToLenderBody


class FromLender(Message, frozen=True):
    """The envelope of a lender's message."""

    body: FromLenderBody
