"""JobSpec: the options that all members of a job agree on. NodeConfig: the settings of one node."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from msgspec import NODEFAULT, Struct, field, structs
from msgspec.structs import replace

from dataplane.model.errors import ConfigError
from dataplane.model.records import (
    ColumnOptions,
    DatasetIdentity,
    End,
    Exhausted,
    ImageSpec,
    MixHistory,
    ScheduledShares,
    ShareChange,
    StackSpec,
    StepSpec,
    Unsigned,
    View,
)

# -- mixture -----------------------------------------------------------------------------------
#
# The spec of a job that mixes several datasets, with all options filled in.

SOURCES_MAX = 1024


def check_source_count(count: int) -> None:
    """Check the number of a mixture's sources.

    Raises:  ConfigError: a mixture cannot have this number of sources.
    """
    if not 1 <= count <= SOURCES_MAX:
        raise ConfigError(
            f"a mixture has 1 to {SOURCES_MAX} sources, not {count}; to mix more shards, give one"
            " source several urls",
            field="sources",
        )


class SourceSpec(Struct, frozen=True):
    """One source of a mixture. `share` is its share of the samples when the job begins, in units of
    2**-32. `passes_max` is how often one epoch may read the source; 0 means no limit.
    """

    name: str
    fingerprint: str
    share: Unsigned
    passes_max: Unsigned = 0
    window: Unsigned = 1
    ramp: Unsigned = 0
    view: View = field(default_factory=View)


class MixtureSpec(Struct, frozen=True):
    """The datasets that a job mixes.

    `length` is the length of an epoch in samples; 0 means that it follows from `exhausted`. With
    `unit` BATCH, each run of `batch` samples comes from one source. `source_column` is the column
    that has the index of each sample's source, or "" for none. `tokens` is the length of an epoch
    in tokens if the user gave the length that way, otherwise 0; `length` is then computed from the
    first shares. `schedule` has the shares that the user scheduled in advance, and `changes` has
    the shares set while the job runs, each with the position where they take effect.
    """

    sources: tuple[SourceSpec, ...]
    exhausted: Exhausted = Exhausted.STOP
    length: Unsigned = 0
    batch: Unsigned = 1
    source_column: str = ""
    tokens: Unsigned = 0
    schedule: tuple[ScheduledShares, ...] = ()
    changes: tuple[ShareChange, ...] = ()

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares at the beginning of the job."""
        return tuple(source.share for source in self.sources)

    @property
    def history(self) -> MixHistory:
        """All shares of the job."""
        return MixHistory((ShareChange(0, 0, self.shares), *self.changes), self.length)

    def with_history(self, history: MixHistory) -> MixtureSpec:
        """Return the same mixture with other shares."""
        first, *changes = history.changes
        pairs = zip(self.sources, first.shares, strict=True)
        sources = tuple(replace(source, share=share) for source, share in pairs)
        return replace(self, sources=sources, length=history.length, changes=tuple(changes))


VERSION = "0.1.0"  # the build reads the version from this line
# Trainers, nodes and coordinators work together if they have the same number. Raise the number with
# the first change after a release to any message between processes, or to a job's options.
PROTOCOL_VERSION = 6
# A coordinator also accepts nodes with the previous number, unless that is below PROTOCOL_OLDEST.
# If nodes with the previous number would not understand a changed call, set both numbers to the new
# one.
PROTOCOL_OLDEST = 6
# The order of samples that docs/order.md specifies. States and digests of shuffled jobs contain it.
ORDER_VERSION = 2

RAISE, REPLACE = "raise", "replace"
"""The values of `on_bad` and `bad_images`: what happens to rows and images that cannot be read."""
BAD_MAX = 0.001

Fact = bool | int | str
_FACT_LENGTH_MAX = 40
_VALUE_LENGTH_MAX = 2000
_STALL_SHARE = 0.75


class JobSpec(Struct, frozen=True):
    """Everything that decides which samples a job yields, in which order and form. Every rank that
    joins a job must have an equal spec.

    `fingerprint` is the manifest's. `transforms` are the image steps of the image columns.
    `column_options` decide the form of all columns. `ramp` is computed from the manifest, lanes and
    window. `view` decides which rows the job reads, and which functions change them. With a
    `mixture`, the job reads several datasets, each with its own window, ramp and view, and
    `fingerprint` covers all of them. A loader sends its spec unchanged to the node, which fills in
    the defaults. `stages` are the former stages of a run whose recipe has changed.
    """

    fingerprint: str
    seed: Unsigned = 0
    shuffle: bool = False
    lanes: Unsigned = 1
    window: Unsigned = 1
    global_batch: Unsigned = 1
    end: End = End.RAGGED
    transforms: tuple[ImageSpec, ...] = ()
    column_options: ColumnOptions = field(default_factory=ColumnOptions)
    ramp: Unsigned = 0
    view: View = field(default_factory=View)
    mixture: MixtureSpec | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def first_epoch(self) -> int:
        """The first epoch of the present stage."""
        return self.stages[-1].next_epoch if self.stages else 0

    @property
    def urls_before(self) -> tuple[str, ...]:
        """The urls of the datasets of former stages, as far as the user gave them: absolute paths
        as urls, the others unchanged.
        """
        before = (url for stage in self.stages for _, urls in stage.before for url in urls)
        return tuple(f"file://{url}" if url.startswith("/") else url for url in before)

    def digest(self) -> str:
        """Return 32 hex digits over everything but `global_batch` and the weights of a mixture; if
        the job is shuffled, also over the version of the order.

        A saved state is valid only for a spec with the same digest. Its cursor counts samples, so a
        run may be resumed with another global batch, and the state itself has the weights. Every
        other difference would change the remaining samples or their form. A new field with a
        default, here or in a value that this one contains, changes no digest: see `_FIRST_FIELDS`.
        """
        fields = _digested(self)
        del fields["global_batch"]
        if self.has_versioned_order:
            fields["order"] = ORDER_VERSION
        # Put column options beside the other fields: when digests were first saved, they were
        # fields of the spec itself.
        fields |= fields.pop("column_options")
        return _hashed(fields, 16)

    @property
    def has_versioned_order(self) -> bool:
        """Whether the positions of samples depend on the version of the order."""
        return self.shuffle or self.mixture is not None

    @property
    def pads(self) -> bool:
        """Whether the job's samples, or those of one of its sources, are padded batches."""
        sources = () if self.mixture is None else self.mixture.sources
        return self.view.pads or any(source.view.pads for source in sources)

    @property
    def joint_digest(self) -> str:
        """Return 32 hex digits over what all ranks of a launch must have in common: the contents of
        their slabs, and the weights that the user gave.
        """
        if self.mixture is None:
            return self.slabs_digest
        return _hashed([self.slabs_digest, self.asked_weights], 16)

    @property
    def slabs_digest(self) -> str:
        """Return 32 hex digits over what the bytes of a slab depend on besides its rows: the
        digest, and whether images that cannot be decoded are replaced. `digest` does not cover the
        latter, so that a run that failed at such an image can be resumed with
        `bad_images="replace"`.
        """
        is_replaced = self.replaces_images or self.bad_max > 0
        return _hashed([self.digest(), REPLACE], 16) if is_replaced else self.digest()

    @property
    def bad_max(self) -> float:
        """The share of an epoch's samples that may be replaced because they cannot be read; 0 means
        that none may. All sources of a mixture have the same share.
        """
        views = [self.view] if self.mixture is None else [s.view for s in self.mixture.sources]
        return max(view.bad_max for view in views)

    @property
    def replaces_images(self) -> bool:
        """Whether a row whose image cannot be decoded is replaced by another row."""
        return any(image.replaces for image in self.transforms)

    @property
    def asked_weights(self) -> str:
        """Return 16 hex digits over the weights of a mixture and their schedule, as the user gave
        them; "" without a mixture.
        """
        if self.mixture is None:
            return ""
        return _hashed([self.mixture.shares, _digested(self.mixture.schedule)], 8)

    def rows_digest(self, layout: str) -> str:
        """Return 16 hex digits over everything that decides which rows of a dataset with this
        layout are in which global batches, except the weights of a mixture. The form of the columns
        is not covered.
        """
        view = structs.replace(self.view, map="", collate="")
        fields = _digested(
            structs.replace(
                self,
                fingerprint=layout,
                view=view,
                transforms=(),
                column_options=ColumnOptions(),
            )
        )
        fields["order"] = ORDER_VERSION
        return _hashed(fields, 8)

    def facts(self) -> dict[str, Fact]:
        """Return the facts about the job in a saved state: each option that is not its default, by
        name.

        Numbers, flags and short texts are stored unchanged; a longer value is stored as "#" and 16
        hex digits of its hash, so that an option takes about 50 bytes at most. The dataset's
        fingerprint and `global_batch` are left out.
        """
        return {
            name: _fact(value)
            for name, (value, default) in self.options().items()
            if value != default
        }

    def values(self) -> dict[str, str]:
        """Return the text of each fact that is stored as a hash, for errors; long ones are cut."""
        texts = {
            name: text_of(value)
            for name, (value, default) in self.options().items()
            if value != default and not isinstance(value, int)
        }
        return {
            name: text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}…"
            for name, text in texts.items()
            if len(text) > _FACT_LENGTH_MAX
        }

    def options(self) -> dict[str, tuple[Any, Any]]:
        """Return (value, default) of every option by name, including those of contained values."""
        found = dict(_options(self))
        del found["fingerprint"], found["global_batch"]
        # Leave the weights out: a state stores them in its history.
        del found["weights"], found["schedule"]
        del found["bad_images"], found["bad_max"]  # they may change during a run
        del found["stages"]  # a state stores the stages beside the options
        return found

    def differences(self, other: JobSpec) -> tuple[tuple[str, str, str], ...]:
        """Return (field, mine, other's) for every field that differs. Column options are listed
        separately; for transforms, only the differing parts are shown.
        """
        if self == other:  # the usual case, when a rank joins
            return ()
        others = {name: value for name, (value, _) in _options(other)}
        return tuple(
            (name, _images_shown(mine, others[name]), _images_shown(others[name], mine))
            if name == "transforms"
            else (name, str(mine), str(others[name]))
            for name, (mine, _) in _options(self)
            # An option that one side lacks is not compared: `mixture.length` is left out if the
            # user gave the length in tokens.
            if name in others and mine != others[name] and _told(mine) != _told(others[name])
        )


class Stage(Struct, frozen=True):
    """A former stage of a run, which ended when the run's recipe was changed.

    When the stage ended, all ranks together had consumed `cursor` of the `sample_count` samples of
    `epoch`. `digest` is the digest of the stage's spec, `dataset` the identity of the dataset that
    it read, and `rows` the digest of the rows of all steps up to its end. If `unread`, the next
    stage began with the samples that the interrupted epoch had not delivered. `before` has the urls
    of the former stage's datasets, by the names of sources, if they are given. `spec` is the
    stage's spec without the dataset (fingerprints are "", windows of sources are unknown), or None
    if the state lacked it. `global_batch` is 0 if unknown. A schedule ends a `planned` stage.
    """

    digest: str
    epoch: Unsigned
    cursor: Unsigned
    sample_count: Unsigned
    dataset: DatasetIdentity
    rows: str = ""
    unread: bool = False
    spec: JobSpec | None = None
    before: tuple[tuple[str, tuple[str, ...]], ...] = ()
    global_batch: Unsigned = 0
    planned: bool = False

    @property
    def next_epoch(self) -> int:
        """The first epoch of the stage that follows."""
        return self.epoch + (self.cursor > 0)


# The fields that each class had when digests that cover the class were first saved. Every digest
# covers these fields. A field that was added later is left out of the digest while it has its
# default, so that older checkpoints stay valid. Never change this table: tests/test_digests.py has
# digests of each class.
_FIRST_FIELDS: Mapping[type, frozenset[str]] = {
    JobSpec: frozenset(
        (
            *("fingerprint", "seed", "shuffle", "lanes", "window", "global_batch", "end"),
            "column_options",
        )
    ),
    ColumnOptions: frozenset(ColumnOptions.__struct_fields__[:3]),
    ImageSpec: frozenset(
        (
            *("column", "height", "width", "cut", "resize", "scale", "ratio", "flip", "layout"),
            *("dtype", "mean", "std"),
        )
    ),
    MixtureSpec: frozenset(("sources",)),
    SourceSpec: frozenset(("name", "fingerprint", "passes_max", "window", "ramp")),
    StackSpec: frozenset(("name", "columns", "dtype")),
    StepSpec: frozenset(("name", "numbers")),
}


# Fields that may change during a run, and so are part of no digest. The weights of a mixture are
# saved in the history of a state; the treatment of bad images may change when a job is resumed.
_CHANGING: Mapping[type, frozenset[str]] = {
    MixtureSpec: frozenset(("schedule", "changes")),
    SourceSpec: frozenset(("share",)),
    ImageSpec: frozenset(("replaces",)),
    View: frozenset(("bad_max",)),
}


def _digested(value: Any) -> Any:
    """Convert a value to the form that digests cover: Structs as dicts, without fields that may
    change during a run, and without those that were added later and have their default.
    """
    if isinstance(value, tuple):
        return [_digested(part) for part in value]
    if not isinstance(value, Struct):
        return value
    first = _FIRST_FIELDS.get(type(value), frozenset())
    changing = _CHANGING.get(type(value), frozenset())
    if isinstance(value, MixtureSpec) and value.tokens:
        changing |= {"length"}  # the length follows from the shares
    return {
        name: _digested(part)
        for name, default in _defaults_of(value).items()
        if name not in changing
        and ((part := _unchanged(getattr(value, name))) != default or name in first)
    }


def _unchanged(value: Any) -> Any:
    """Return a view without the fields in _CHANGING, and every other value as it is."""
    return replace(value, bad_max=0.0) if isinstance(value, View) else value


def sparse(value: Any) -> Any:
    """Return a Struct as plain values, without the fields that have their default."""
    if isinstance(value, tuple):
        return [sparse(part) for part in value]
    if isinstance(value, Enum):
        return value.value
    if not isinstance(value, Struct):
        return value
    return {
        name: sparse(part)
        for name, default in _defaults_of(value).items()
        if (part := getattr(value, name)) != default
    }


def _hashed(value: Any, size: int) -> str:
    return hashlib.blake2b(_json(value).encode(), digest_size=size).hexdigest()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _told(value: Any) -> str:
    """Return a key that is equal for equal values, also if they contain NaN, which does not equal
    itself.
    """
    return _json(_digested(value))


def text_of(value: Any) -> str:
    """Return an option as text: a string unchanged, everything else as JSON."""
    return str(value) if isinstance(value, str) else _json(_digested(value))


def _fact(value: Any) -> Fact:
    if isinstance(value, int):
        return value
    text = text_of(value)
    if len(text) <= _FACT_LENGTH_MAX:
        return text
    return f"#{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def _options(value: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, default in _defaults_of(value).items():
        part = getattr(value, name)
        if name == "mixture":
            yield from _mixture_options(part)
        elif isinstance(default, Struct):
            yield from _options(part)
        else:
            yield name, (part, default)
        if isinstance(value, JobSpec) and name == "transforms":
            yield "bad_images", (REPLACE if value.replaces_images else RAISE, RAISE)


def _mixture_options(mixture: MixtureSpec | None) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the options of a mixture by name, without the datasets themselves."""
    of = mixture or MixtureSpec(())
    names = tuple(source.name for source in of.sources)
    yield "sources", (names, ())
    yield "weights", (of.shares, ())
    yield "schedule", (of.schedule, ())
    yield "max_passes", (tuple(source.passes_max for source in of.sources), ())
    yield "source_views", (tuple(source.view for source in of.sources), ())
    left_out = {"sources", "schedule", "changes", *(("length",) if of.tokens else ())}
    for name, default in _defaults_of(of).items():
        if name not in left_out:
            yield f"mixture.{name}", (getattr(of, name), default)


def _defaults_of(value: Struct) -> Mapping[str, Any]:
    cls: Any = type(value)  # mypy takes `type[object]` for unhashable
    return _defaults(cls)


@functools.cache
def _defaults(cls: Any) -> Mapping[str, Any]:
    """Return the declared default of each field, or NODEFAULT, which equals no value."""
    return {
        each.name: each.default if each.default_factory is NODEFAULT else each.default_factory()
        for each in structs.fields(cls)
    }


def _images_shown(images: tuple[ImageSpec, ...], others: tuple[ImageSpec, ...]) -> str:
    """Return the differences from the others as text, such as "jpg: flip=0.5, dtype=float32"."""
    by_column = {image.column: image for image in others}
    shown = []
    for image in images:
        other = by_column.get(image.column)
        fields = [
            f"{name}={value}"
            for name, value in structs.asdict(image).items()
            if name != "column" and (other is None or value != getattr(other, name))
        ]
        shown += [f"{image.column}: {', '.join(fields)}"] if fields else []
    return "; ".join(shown) or "none"


class PeerTls(Struct, frozen=True):
    """The TLS settings of data connections between nodes: paths of PEM files, and the URIs that
    other nodes' certificates may have (empty: any URI).
    """

    cert: str
    key: str
    ca: str
    peers: tuple[str, ...] = ()


def _lists(entry: str, module: str, path: str) -> bool:
    """Return whether an entry of allowed_functions permits this function of this module."""
    listed, colon, function = entry.partition(":")
    if function:
        return (listed, function) == (module, path)
    if path.startswith("_"):
        return False
    listed = listed.removesuffix(".")
    return listed == module or (not colon and module.startswith(f"{listed}."))


class NodeConfig(Struct, frozen=True):
    """The settings of one node. Sizes are in bytes and are hard limits; times are in seconds.

    There are `worker_count` workers, and up to `worker_count_max` if more of them help. Each may
    use `worker_memory_bytes`, and up to `worker_memory_bytes_max` for a dataset with large blocks.
    Blocks may take `cache_bytes` of disk space in `cache_dir`; 0 means that no blocks are stored.
    `allowed_urls` are the url prefixes that the node may open, separated by spaces; "" allows all.
    An embedded node may open what its trainer could open. `allowed_functions` are the modules and
    single functions that its workers may call for jobs, separated by spaces; "" allows none. With
    `peer_tls`, data connections are encrypted with the files `tls_cert`, `tls_key` and `tls_ca`;
    `tls_peers` are the permitted URIs, separated by spaces.
    """

    cache_dir: str
    block_arena_bytes: int
    delivery_bytes_per_rank: int
    slab_bytes: int
    worker_count: int
    fetch_count: int
    fetch_timeout_s: float
    stall_timeout_s: float
    lease_s: float
    coordinator: str = ""
    embedded: bool = False
    linger_s: float = 2.0
    worker_count_max: int = 0
    worker_memory_bytes: int = 1 << 30
    worker_memory_bytes_max: int = 0
    log_level: str = "info"
    log_format: str = "text"
    allowed_urls: str = ""
    allowed_functions: str = ""
    data_listen: str = ""
    cache_bytes: int = 0
    peer_tls: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_peers: str = ""

    @property
    def data_tls(self) -> PeerTls | None:
        """The TLS settings of the node's data connections; None without `peer_tls`, and for an
        embedded node.
        """
        if not self.peer_tls or self.embedded:
            return None
        return PeerTls(self.tls_cert, self.tls_key, self.tls_ca, tuple(self.tls_peers.split()))

    @property
    def worker_count_most(self) -> int:
        """The largest number of workers that the node may have."""
        return max(self.worker_count, self.worker_count_max)

    @property
    def has_workers(self) -> bool:
        """Whether the node makes slabs itself. Without workers, other nodes make its slabs."""
        return self.worker_count_most > 0

    def allows_function(self, name: str) -> bool:
        """Return whether the node's operator permits the function of this name. An entry of
        `allowed_functions` is a module, a package (which permits everything below it) or a single
        function.
        """
        module, _, path = name.partition(":")
        parts = (*module.split("."), path)
        # Refuse names that begin with "__": a package's `__main__` is a program, and would run when
        # it is imported.
        if not all(part.isidentifier() and not part.startswith("__") for part in parts):
            return False
        return any(_lists(entry, module, path) for entry in self.allowed_functions.split())

    @property
    def task_timeout_s(self) -> float:
        """The longest time that one task may take. It is shorter than `stall_timeout_s`, so that a
        stuck task is ended, with an error that names its block, before trainers report a stall.
        """
        return _STALL_SHARE * self.stall_timeout_s
