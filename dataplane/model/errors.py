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
contains a password or a signature from a url. A traceback shows the remedy below the message, as a
note that is no part of `str(error)`.
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
    """The base of all errors: `except DataplaneError` catches every error of Dataplane."""

    nouns: Mapping[str, Noun]
    known: ClassVar[tuple[str, ...]] = ("peer",)
    """The nouns that this class adds to those of its base class."""
    remedy: ClassVar[str] = "correct what the message names, then try again"
    """The advice to people who get this class or one below it."""

    def __init__(self, message: str, **nouns: Noun) -> None:
        super().__init__(redacted(message))
        self.nouns = {
            name: redacted(noun) if isinstance(noun, str) else noun for name, noun in nouns.items()
        }
        self.add_note(f"what to do: {self.remedy}")

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
    """An argument, option or setting is wrong. Raised before any work begins."""

    remedy: ClassVar[str] = "correct the argument, option or setting that the message names"
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
    """Two ranks of a job, or a loader and a state, have different arguments. Nouns: field,
    expected, found; `reopened` is true if joining may succeed after other ranks have closed their
    previous loaders.
    """

    remedy: ClassVar[str] = "give all ranks, or the loader and its state, the same arguments"
    known: ClassVar[tuple[str, ...]] = ("reopened",)


class BudgetTooSmall(ConfigError):
    """A memory budget is too small for the data that must be in memory at once. Nouns: needed,
    budget.
    """

    remedy: ClassVar[str] = (
        "raise the setting that the message names; `dataplane config show` prints its origin"
    )
    known: ClassVar[tuple[str, ...]] = ("needed", "budget")


class VersionMismatch(ConfigError):
    """Trainer, node and coordinator have different versions of Dataplane, or the installed torch
    lacks a name that Dataplane needs. Nouns: expected, found.
    """

    remedy: ClassVar[str] = (
        "install the same version of dataplane-loader on every host, and restart"
    )


class AccessDenied(ConfigError):
    """A token or certificate is missing, is wrong, or does not allow the call. Nouns: call."""

    remedy: ClassVar[str] = "check the token and the certificate, and the roles and claims of a JWT"
    known: ClassVar[tuple[str, ...]] = ("call",)


class ClosedError(DataplaneError):
    """A loader or connection was used after it was closed."""

    remedy: ClassVar[str] = "make a new loader, since a closed loader cannot be opened again"


class PeerLost(DataplaneError):
    """Another process (a node, coordinator or trainer) does not answer. Nouns: peer."""

    remedy: ClassVar[str] = (
        "check the address, and whether the process runs there (`dataplane serve` starts it)"
    )
    known: ClassVar[tuple[str, ...]] = ("peer", "last_error", "status")


class NotWrittenError(PeerLost):
    """The coordinator cannot write its database now, for example because the disk is full. Nodes
    send the request again later. Nouns: peer.
    """

    remedy: ClassVar[str] = "free disk space for the coordinator; nodes then go on by themselves"


class NeighbourGone(PeerLost):
    """Another node did not send a block or a slab (a few batches). Nouns: peer; `working` is true
    if the other node is still making the slab.
    """

    remedy: ClassVar[str] = (
        "do nothing, since the node reads the block from the store, or makes the slab itself"
    )
    known: ClassVar[tuple[str, ...]] = ("working",)


class LeaseError(DataplaneError):
    """A rank or node has lost its place in a job."""

    remedy: ClassVar[str] = (
        "stop this process if another launch has taken over the job, else start the job again"
    )
    known: ClassVar[tuple[str, ...]] = ("job", "member", "generation")


class LeaseExpired(LeaseError):
    """A node did not renew a rank's place in the job in time. Nouns: job, member."""


class LeaseFenced(LeaseError):
    """A newer launch of the job has taken over. Nouns: job, member, generation."""


class StoreError(DataplaneError):
    """A request to an object store failed. Nouns: shard."""

    remedy: ClassVar[str] = "check the network and the store, then try again"
    known: ClassVar[tuple[str, ...]] = ("shard", "attempts")


class ShardNotFound(StoreError):
    """The bucket, folder or object does not exist. Nouns: shard."""

    remedy: ClassVar[str] = "check the spelling and the store's endpoint"


class StoreDenied(StoreError):
    """The store refused the credentials, or there are none. Nouns: shard."""

    remedy: ClassVar[str] = "check the credentials in the environment and their permissions"


class StoreThrottled(StoreError):
    """The store asks for fewer requests (HTTP 429 or 503). Nouns: shard."""


class StoreUnavailable(StoreError):
    """The store does not answer, or reports a failure of its own. Nouns: shard."""


class TruncatedRead(StoreError):
    """The store sent fewer bytes than requested. Nouns: shard, offset, expected, found."""

    known: ClassVar[tuple[str, ...]] = ("offset", "expected", "found")


class DatasetChangedError(DataplaneError):
    """A shard has changed since it was indexed. Nouns: shard, expected, found."""

    remedy: ClassVar[str] = (
        "restore the old shard, or start again with the new one: make a manifest that you pass "
        "again with `dataplane index`. A state of the old shards then needs dataset_moved=True "
        "(if only ETags or times differ) or load_state_dict(change=)"
    )
    known: ClassVar[tuple[str, ...]] = ("shard", "expected", "found")


class CorruptShard(DataplaneError):
    """The bytes of a shard violate its format. Nouns: shard, offset, expected, found."""

    remedy: ClassVar[str] = (
        'write the shard again from its source, or pass on_bad="replace" (the loader then reads '
        "other rows); a retry does not help"
    )
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
    """An image cannot be decoded, for example because the file is truncated or is no image. Nouns:
    shard, row (in the shard), key (of samples that have one), column, reason. If shard is None, row
    is the index among the images that were decoded together.
    """

    remedy: ClassVar[str] = 'replace the image in its shard, or pass bad_images="replace"'
    known: ClassVar[tuple[str, ...]] = ("reason", "key")


class SchemaMismatch(CorruptShard):
    """A shard and its dataset have different schemas. Nouns: shard, field, expected, found."""

    remedy: ClassVar[str] = "write the shard again with the dataset's schema, or leave it out"


class NotKept(DataplaneError):
    """A node's disk cache does not have a block. Nouns: trouble (the reason why the disk cannot be
    used at present; empty if the disk works).
    """

    remedy: ClassVar[str] = "do nothing, since the node reads the block from the store"
    known: ClassVar[tuple[str, ...]] = ("trouble",)


class FunctionError(DataplaneError):
    """A worker called a map= or collate= function, which raised an exception or returned an invalid
    value. Nouns: function; shard and block for a map, step (of the epoch) for a collate function.
    """

    remedy: ClassVar[str] = "correct the function; the message contains its traceback"
    known: ClassVar[tuple[str, ...]] = ("function", "shard", "block", "row", "column", "step")


class RowOutOfBounds(DataplaneError):
    """A row lies outside its block or slab, because of a bug in Dataplane. Nouns: row."""

    remedy: ClassVar[str] = "report this bug of Dataplane, with the traceback"
    known: ClassVar[tuple[str, ...]] = ("row",)


class DataStallError(DataplaneError):
    """No batch came within the deadline (`stall_timeout_s`). Nouns: stage, shard, node, last_error;
    function (the map= or collate= that workers call), done and total (numbers of blocks).
    """

    remedy: ClassVar[str] = (
        "run `dataplane status` to see which rank waits, and read the log of its node"
    )
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
