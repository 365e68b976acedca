"""The messages between a node and its lender, the process that sends blocks to neighbours.

Frozen values, used outside this package instead of protobuf classes. Names and fields equal those
of proto/dataplane/rpc/v1/neighbours.proto, whose comments are the specification; a test compares
the two.
"""

from __future__ import annotations

from msgspec import Struct

from dataplane.config import PeerTls
from dataplane.model import BlockForm, Region


class LendingKeys(Struct, frozen=True):
    """The key of a job's newest generation; b"" if the job has left this node. For it is lent only
    what is `only_under` these urls; () for everything.
    """

    job_id: str
    generation: int
    key: bytes
    only_under: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"LendingKeys({self.job_id!r}, {self.generation})"  # no key


class StartLending(Struct, frozen=True):
    """Who lends. The block arena and the listening socket are sent with it."""

    node_id: str
    first_number: int = 1
    log_level: str = "info"
    log_format: str = "text"
    keys: tuple[LendingKeys, ...] = ()
    tls: PeerTls | None = None


class Asked(Struct, frozen=True):
    """A neighbour asks for bytes of a block; or for a slab, an encoded MakeSlab, for which it has
    room for `length` bytes. It gets only what is `only_under` these urls, as its key says. With a
    `count` of more than 1: for so many whole blocks of `length` bytes together.
    """

    number: int
    job_id: str
    dataset: bytes
    block: int
    offset: int
    length: int
    form: BlockForm
    node_id: str = ""
    slab: bytes = b""
    only_under: tuple[str, ...] = ()
    count: int = 1


class Give(Struct, frozen=True):
    """Send this region of an arena, and those of `more`, after the note."""

    number: int
    region: Region
    arena_id: int = 0
    note: bytes = b""
    more: tuple[Region, ...] = ()


class GiveDecodedOnly(Struct, frozen=True):
    """Say that there is only the decoded block, of this length."""

    number: int
    length: int


class Refuse(Struct, frozen=True):
    """Say no; `is_unknown`: since the job of the slab is not open here."""

    number: int
    is_unknown: bool = False


class LendArena(Struct, frozen=True):
    """Regions of this arena may be given; its descriptor is sent along."""

    arena_id: int


class ReturnArena(Struct, frozen=True):
    """No region of this arena will be given any more."""

    arena_id: int


class Given(Struct, frozen=True):
    """The region is no longer read. `sent_bytes` have reached the neighbour: all or none."""

    number: int
    sent_bytes: int = 0


ToLenderBody = (
    StartLending | LendingKeys | Give | GiveDecodedOnly | Refuse | LendArena | ReturnArena
)
FromLenderBody = Asked | Given


class ToLender(Struct, frozen=True):
    """The envelope of a node's message to its lender."""

    body: ToLenderBody


class FromLender(Struct, frozen=True):
    """The envelope of a lender's message."""

    body: FromLenderBody
