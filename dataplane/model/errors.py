"""Every error that Dataplane raises, by fault: the class says who acts.

DataplaneError
├─ ConfigError            you asked for the impossible: raised before any work
│  ├─ SpecMismatch        two members of a job disagree: field, expected, found
│  ├─ BudgetTooSmall      a memory budget cannot hold what must be in memory at once
│  ├─ VersionMismatch     versions do not match: client, node, coordinator, a saved state, torch
│  └─ AccessDenied        a token or certificate is missing, wrong or not for this: call
├─ ClosedError            you closed it, then used it
├─ PeerLost               the other side went away
│  ├─ NotWrittenError      the coordinator cannot write its database now, such as to a full disk
│  └─ NeighbourGone        another node did not send a block or slab: get it elsewhere
├─ LeaseError
│  ├─ LeaseExpired        join again
│  └─ LeaseFenced         a newer generation took your place: stop, or join again
├─ StoreError             retried only as the retry table says
│  ├─ ShardNotFound       no such bucket, folder or object
│  ├─ StoreDenied         credentials missing or refused
│  ├─ StoreThrottled      the store asks us to slow down
│  ├─ StoreUnavailable    no answer, or the store's own failure
│  └─ TruncatedRead       fewer bytes than asked for
├─ DatasetChangedError    the object has changed since it was indexed
├─ CorruptShard           never retried: shard, byte offset, expected, found
│  ├─ ImageError          an image cannot be decoded: shard, row, column
│  └─ SchemaMismatch      a shard's schema differs from the dataset's
├─ NotKept                a node's disk does not have a block: read it elsewhere
├─ FunctionError          your map or collate function failed: function, shard, block or step
├─ RowOutOfBounds         a row lies outside its block or slab: a bug in Dataplane, report it
└─ DataStallError         no batch within the deadline: stage, shard, node, last error

The details of an error (shard, offset, field, …) are its *nouns*: keyword arguments that become
attributes. An error is sent between processes as class name, message and nouns, never as a pickle.
A noun that the class declares and that was not given is None. Neither the message nor a noun ever
contains a password or a signature from a url. Below an error's message, a traceback names the place
in docs/reference/errors.md that explains its class: a note, which is no part of `str(error)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dataplane.model.redact import redacted

__all__ = [
    "AccessDenied",
    "BudgetTooSmall",
    "ClosedError",
    "ConfigError",
    "CorruptShard",
    "DataStallError",
    "DataplaneError",
    "DatasetChangedError",
    "FunctionError",
    "ImageError",
    "LeaseError",
    "LeaseExpired",
    "LeaseFenced",
    "PeerLost",
    "RowOutOfBounds",
    "SchemaMismatch",
    "ShardNotFound",
    "SpecMismatch",
    "StoreDenied",
    "StoreError",
    "StoreThrottled",
    "StoreUnavailable",
    "TruncatedRead",
    "VersionMismatch",
]
"""The errors that a trainer may get; dataplane_torch exports them as well."""

Noun = str | int | None


class DataplaneError(Exception):
    """The root: `except DataplaneError` catches every error that Dataplane raises deliberately."""

    nouns: Mapping[str, Noun]
    known: ClassVar[tuple[str, ...]] = ("peer",)
    """The nouns that this class adds to those of its base class."""
    remedy: ClassVar[str] = "correct what the message names, and run it again"
    """The advice to people who get this class or one below it."""

    def __init__(self, message: str, **nouns: Noun) -> None:
        super().__init__(redacted(message))
        self.nouns = {
            name: redacted(noun) if isinstance(noun, str) else noun for name, noun in nouns.items()
        }
        self.add_note(f"see {self.page}")

    @property
    def page(self) -> str:
        """The place in the documentation that explains this class of errors, or its base here."""
        known = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        return f"docs/reference/errors.md#{known.__name__.lower()}"

    def __getattr__(self, name: str) -> Noun:
        nouns = self.__dict__.get("nouns", {})
        if name in nouns:
            found: Noun = nouns[name]
            return found
        if any(name in vars(cls).get("known", ()) for cls in type(self).__mro__):
            return None
        raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {sorted(nouns)}")

    def __reduce__(self) -> tuple[object, ...]:
        return (rebuild, (type(self).__name__, str(self), dict(self.nouns)))


class ConfigError(DataplaneError):
    """You asked for the impossible: raised before any work."""

    remedy: ClassVar[str] = "correct it and run the command again; --help has examples"
    known: ClassVar[tuple[str, ...]] = (
        "field",
        "key",
        "found",
        "allowed",
        "expected",
        "file",
        "path",
        "variable",
        "address",
        "port",
        "service",
        "job",
        "rank",
        "shard",
    )


class SpecMismatch(ConfigError):
    """Two members of a job disagree. Nouns: field, expected, found; `reopened` is true if joining
    may succeed after other ranks have closed their previous loaders.
    """

    remedy: ClassVar[str] = "give all ranks, or the loader and its state, the same arguments"
    known: ClassVar[tuple[str, ...]] = ("reopened",)


class BudgetTooSmall(ConfigError):
    """A memory budget cannot hold what must be in memory at once. Nouns: needed, budget."""

    remedy: ClassVar[str] = "raise the budget; `dataplane config show` says where it was set"
    known: ClassVar[tuple[str, ...]] = ("needed", "budget")


class VersionMismatch(ConfigError):
    """Client, node and coordinator are of different versions, or the installed torch lacks a name
    that we need. Nouns: expected, found.
    """

    remedy: ClassVar[str] = "install one version of dataplane-loader on every host, and restart"


class AccessDenied(ConfigError):
    """A token or certificate is missing, wrong, or does not allow this. Nouns: call."""

    remedy: ClassVar[str] = "docs/security.md says who may make which call, and where tokens are"
    known: ClassVar[tuple[str, ...]] = ("call",)


class ClosedError(DataplaneError):
    """You closed it, then used it."""

    remedy: ClassVar[str] = "make a new loader: a closed one cannot be opened again"


class PeerLost(DataplaneError):
    """The other side went away. Nouns: peer."""

    remedy: ClassVar[str] = (
        "check the address, and that the process runs there (`dataplane serve` starts one)"
    )
    known: ClassVar[tuple[str, ...]] = ("peer", "last_error", "status")


class NotWrittenError(PeerLost):
    """The coordinator cannot write its database now, for example because the disk is full. Nodes
    send the request again later. Nouns: peer.
    """

    remedy: ClassVar[str] = "make room on the coordinator's disk; nodes then go on by themselves"


class NeighbourGone(PeerLost):
    """Another node did not send a block or a slab, so it must come from elsewhere. Nouns: peer;
    `working` is true if that node is still making the slab, and may be asked for it again.
    """

    remedy: ClassVar[str] = "none: the node reads the block elsewhere"
    known: ClassVar[tuple[str, ...]] = ("working",)


class LeaseError(DataplaneError):
    """A membership ended."""

    remedy: ClassVar[str] = "another launch of the job took over; stop this one, or start it again"
    known: ClassVar[tuple[str, ...]] = ("job", "member", "generation")


class LeaseExpired(LeaseError):
    """The lease was not renewed in time: join again. Nouns: job, member."""


class LeaseFenced(LeaseError):
    """A newer generation took your place. Nouns: job, member, generation."""


class StoreError(DataplaneError):
    """The object store failed. Nouns: shard."""

    remedy: ClassVar[str] = "check the network and the store; then run the command again"
    known: ClassVar[tuple[str, ...]] = ("shard", "attempts")


class ShardNotFound(StoreError):
    """No such bucket, folder or object. Nouns: shard."""

    remedy: ClassVar[str] = "check the spelling and the store's endpoint"


class StoreDenied(StoreError):
    """Credentials missing or refused. Nouns: shard."""

    remedy: ClassVar[str] = "check the credentials in the environment and their permissions"


class StoreThrottled(StoreError):
    """The store asks us to slow down. Nouns: shard."""


class StoreUnavailable(StoreError):
    """No answer, or the store's own failure. Nouns: shard."""


class TruncatedRead(StoreError):
    """Fewer bytes than asked for. Nouns: shard, offset, expected, found."""

    known: ClassVar[tuple[str, ...]] = ("offset", "expected", "found")


class DatasetChangedError(DataplaneError):
    """The object has changed since it was indexed. Nouns: shard, expected, found."""

    remedy: ClassVar[str] = "index the dataset again, or restore the shard as it was indexed"
    known: ClassVar[tuple[str, ...]] = ("shard", "expected", "found")


class CorruptShard(DataplaneError):
    """The bytes are not what the format promises. Nouns: shard, offset, expected, found."""

    remedy: ClassVar[str] = "rewrite the shard from its source; retrying will not help"
    known: ClassVar[tuple[str, ...]] = (
        "shard",
        "offset",
        "expected",
        "found",
        "field",
        "line",
        "block",
        "row",
        "column",
    )


class ImageError(CorruptShard):
    """An image cannot be decoded: truncated, too large, or not an image. Nouns: shard, row (in the
    shard), key (of samples that have one), column, reason. Until the shard is known, row is the
    index among the images being decoded.
    """

    remedy: ClassVar[str] = 'rewrite the image, or pass bad_images="replace"'
    known: ClassVar[tuple[str, ...]] = ("reason", "key")


class SchemaMismatch(CorruptShard):
    """A shard's schema differs from the dataset's. Nouns: shard, field, expected, found."""

    remedy: ClassVar[str] = "rewrite the shard with the dataset's schema, or leave it out"


class NotKept(DataplaneError):
    """A node's disk does not have a block, which must be read elsewhere. Nouns: trouble, the reason
    why the disk cannot be used at present; empty if the disk works.
    """

    remedy: ClassVar[str] = "none: the node reads the block from the store"
    known: ClassVar[tuple[str, ...]] = ("trouble",)


class FunctionError(DataplaneError):
    """A function of the user, called by a worker, raised an exception or returned an invalid value.
    The message contains the function's traceback. Nouns: function; shard and block for a map, step
    (of the epoch) for a collate function.
    """

    remedy: ClassVar[str] = "correct the function: the message has its traceback"
    known: ClassVar[tuple[str, ...]] = ("function", "shard", "block", "row", "column", "step")


class RowOutOfBounds(DataplaneError):
    """A row lies outside its block or slab: a bug in Dataplane, please report it. Nouns: row."""

    remedy: ClassVar[str] = "this is a bug in dataplane: please report it with the traceback"
    known: ClassVar[tuple[str, ...]] = ("row",)


class DataStallError(DataplaneError):
    """No batch within the deadline. Nouns: stage, shard, node, last_error; function (of the user,
    if workers are calling one), and the number of blocks done and in total.
    """

    remedy: ClassVar[str] = "`dataplane status` shows which rank waits; look at its node's log"
    known: ClassVar[tuple[str, ...]] = (
        "stage",
        "shard",
        "node",
        "last_error",
        "function",
        "done",
        "total",
        "job",
        "coordinator",
        "step",
        "epoch",
        "pid",
        "block",
        "row",
        "column",
    )


def _tree(root: type[DataplaneError]) -> dict[str, type[DataplaneError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def rebuild(name: str, message: str, nouns: Mapping[str, Noun]) -> DataplaneError:
    """Rebuild the error that was sent as (class name, message, nouns). An unknown class name
    becomes DataplaneError.
    """
    return _tree(DataplaneError).get(name, DataplaneError)(message, **nouns)
