"""The messages between a node and its lender, the process that sends blocks to neighbours.

Over a Unix SOCK_SEQPACKET pair, one message per packet; neighbours/wire.py has what crosses the
network. The node answers each Asked with one Give, GiveDecodedOnly or Refuse; each Give is followed
by one Given. The lender may end at any moment: then all of its numbers are over.
"""

from __future__ import annotations

from dataplane.model.config import PeerTls
from dataplane.model.records import BlockForm, Region, Unsigned
from dataplane.rpc.codec import Message


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


class Asked(Message, frozen=True):
    """A neighbour asks for bytes of a block; or for a slab, an encoded MakeSlab, for which it has
    room for `length` bytes. It gets only what is `only_under` these urls, as its key says. With a
    `count` of more than 1: for so many whole blocks of `length` bytes together.
    """

    number: Unsigned
    job_id: str
    dataset: bytes  # 16 bytes
    block: Unsigned
    offset: Unsigned  # in the block
    length: Unsigned
    form: BlockForm
    node_id: str = ""  # who asks
    slab: bytes = b""  # an encoded MakeSlab
    only_under: tuple[str, ...] = ()  # as of the key with which the connection was opened
    count: Unsigned = 1


class Give(Message, frozen=True):
    """Send this region of an arena, and those of `more`, after the note. They stay as they are
    until Given.
    """

    number: Unsigned
    region: Region  # as long as was asked for; of a slab at most so long, or empty
    arena_id: Unsigned = 0  # 0: the block arena; otherwise one that was lent before
    note: bytes = b""  # of a slab a Result, of several blocks what became of each
    more: tuple[Region, ...] = ()  # of the same arena; sent after it


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
