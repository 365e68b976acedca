"""Check a user's arguments before anything is opened, and turn them into a job to open.

A loader's first argument may name shards or be a dataset, and either may be a list of strings.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, cast

from msgspec import Struct, structs
from torch.utils.data import Dataset

from dataplane.base import suffixes
from dataplane.base.units import SECONDS_MAX, meant
from dataplane.client import identity
from dataplane.client.endpoint import Embedded, Endpoint, find_endpoint
from dataplane.client.launch import BegunNode
from dataplane.model.changes import changes_of
from dataplane.model.config import BAD_MAX, RAISE, REPLACE
from dataplane.model.errors import ConfigError, ShardNotFound
from dataplane.model.joined import with_files
from dataplane.model.records import (
    ColumnOptions,
    ImageSpec,
    MixUnit,
    PackSpec,
    View,
)
from dataplane.model.redact import redacted, unsigned
from dataplane.rpc.messages import (
    DatasetSource,
    JobOpened,
    MixtureAsked,
    OpenJob,
    WeightsChanged,
)
from dataplane.settings import named_service
from dataplane.transforms.functions import function_name, refuse_within_import
from dataplane.transforms.mixture_options import Mixture, Urls
from dataplane.transforms.options import COLUMN_DEFAULTS, ROW_ARGUMENTS, column_options, view_of
from dataplane.transforms.pack_options import balanced, pack_spec
from dataplane_torch.group import check_layout, check_pixels, check_weights, launch_token
from dataplane_torch.options import DEFAULTS, Arguments, UrlOptions, check_texts, order_of
from dataplane_torch.parts import RankParts, parts_of
from dataplane_torch.topology import topology_of

_CHECKED_MAX = 256
_WILDCARD = re.compile(r"[*?\[{]")
_ONE_SLASH = re.compile(r"(s3[an]?|gs|gcs|az|azure|https?|hf|file|pipe):", re.IGNORECASE)

# For each argument that only torch's DataLoader has: its default, which is accepted, and advice.
_TORCH_ONLY: Final[Mapping[str, tuple[object, str]]] = {
    "sampler": (None, "the order comes from shuffle, seed, lanes and window"),
    "batch_sampler": (None, "batches come from batch_size or global_batch_size"),
    "num_workers": (
        0,
        "the node does the work: leave it out, or give torch's DataLoader a ShardedIterableDataset",
    ),
    "collate_fn": (
        None,
        'batches are dicts of tensors: use collate="package.module:function", which gets a dict',
    ),
    "worker_init_fn": (None, "there are no workers in this process"),
    "multiprocessing_context": (None, "there are no workers in this process"),
    "generator": (None, "the order comes from seed"),
    "prefetch_factor": (None, "the node reads ahead as far as its memory allows"),
    "persistent_workers": (False, "the node lives as long as its trainers"),
    "pin_memory_device": ("", "memory is pinned for every device"),
    "in_order": (True, "batches always come in order"),
}


class JobToOpen(Struct, frozen=True):
    """A job to open, and its endpoint. DataLoader workers receive it by fork or by pickle.

    `request.member_id` is empty, since every process that joins has its own. `is_named` is true if
    the user has named the job, so that its spec may change between loaders. `parts` is the part of
    each batch that this rank gets.
    """

    endpoint: Endpoint
    request: OpenJob
    stall_timeout_s: float | None
    is_named: bool
    parts: RankParts

    def begin(self) -> BegunNode | None:
        """Start the node of this process before its first use, if it has none yet."""
        mixture = self.request.mixture
        source = self.request.source if mixture is None else mixture.sources[0].source
        return self.endpoint.begin(source)

    def check_files(self) -> None:
        """Check that local paths exist, so that a misspelt path is an error when the loader is
        made. For a glob, the folder before its first wildcard is checked. Paths of a service are
        not checked, since its node opens them; urls of stores are checked by the node.

        Raises:  ShardNotFound: a path does not exist.
        """
        if not isinstance(self.endpoint, Embedded):
            return
        mixture = self.request.mixture
        named = [("", self.request.source)]
        if mixture is not None:
            named = [(f"source {source.name!r}: ", source.source) for source in mixture.sources]
        for name, source in named:
            for url in source.urls[:_CHECKED_MAX]:
                if problem := _missing(url):
                    raise ShardNotFound(f"{name}{problem}", shard=url)

    def check_ranks(self, opened: JobOpened) -> None:
        """Compare the opened job with the jobs that other ranks have opened.

        Raises:  SpecMismatch: the jobs differ.  PeerLost: the process group's store does not
        answer.
        """
        check_pixels(opened.pixels)
        if not self.is_named:
            digest = changes_of(opened.entries).job_digest(opened.spec.joint_digest)
            stage = len(opened.spec.stages)
            check_layout(self.request.job_id, self.request.topology, digest, stage)

    def check_weights(self, found: WeightsChanged, epoch: int, cursor: int, number: int) -> None:
        """Compare new weights with the weights that other ranks have set. `number` counts these
        changes.

        Raises:  SpecMismatch: the weights differ.  PeerLost: the process group's store does not
        answer.
        """
        if not self.is_named:
            weights = f"{epoch}:{cursor}:{found.mix.digest}"
            check_weights(self.request.job_id, self.request.topology, number, weights)


def job_of(given: Arguments) -> JobToOpen:
    """Return the job for these arguments.

    Raises:  ConfigError, TypeError: arguments are invalid or cannot be combined.  PeerLost:
             torch.distributed is initialized, and its store does not answer.
    """
    refuse_within_import()
    mixture = given.urls if isinstance(given.urls, Mixture) else None
    by_source = {} if mixture is None else _urls_of(mixture)
    urls = tuple(itertools.chain(*by_source.values())) or _urls(given.urls)
    options = given.options
    check_texts(options)
    topology = topology_of(options)
    ranks = max(topology.world_size, topology.dp_size)
    launch = identity.launch_identity(os.environ, ranks, launch_token())
    view = _view(options)
    pack = balanced(
        view.pack,
        options["balance"],
        shuffle=bool(given.shuffle),
        mixes=mixture is not None and mixture.unit != MixUnit.BATCH,
    )
    view = structs.replace(view, pack=pack)
    mixture_asked = None if mixture is None else _mixture(mixture, by_source, options, pack)
    views = [view] if mixture_asked is None else [source.view for source in mixture_asked.sources]
    if not isinstance(given.timeout, Real) or not 0 <= given.timeout <= SECONDS_MAX:
        raise ConfigError(
            f"timeout={given.timeout!r:.80}: pass 0 to {SECONDS_MAX:,.0f} seconds", field="timeout"
        )
    request = OpenJob(
        job_id=identity.job_id(launch, urls, options["name"]),
        incarnation=launch.incarnation,
        member_id="",
        source=DatasetSource(urls, _format(options)),
        topology=topology,
        spec=structs.replace(
            order_of(given, topology.dp_size, pads=any(view.pads for view in views)),
            transforms=_transforms(options),
            column_options=_column_options(options),
            view=view,
        ),
        sharing=options["sharing"] or "",
        mixture=mixture_asked,
    )
    service = options["service"] or named_service()
    endpoint = find_endpoint(service, identity.node_name(launch, request.sharing))
    named = options["name"] is not None
    parts = parts_of(topology, options["columns_by_stage"], options["sequence_part"])
    return JobToOpen(endpoint, request, given.timeout or None, is_named=named, parts=parts)


def _format(options: UrlOptions) -> str:
    name, column = options["format"] or "", options["files"]
    return with_files(name, column) if column else name


def _transforms(options: UrlOptions) -> tuple[ImageSpec, ...]:
    names = ("transforms", "decode", "bad_images")
    if all(options[name] == DEFAULTS[name] for name in names):  # type: ignore[literal-required]
        return ()
    # Import late, so that loaders without images start faster.
    from dataplane.transforms.images import image_specs

    transforms, bad_images = options["transforms"] or {}, options["bad_images"]
    if transforms and _bad_max(options):
        bad_images = REPLACE
    return image_specs(transforms, options["decode"], bad_images)


def _bad_max(options: UrlOptions) -> float:
    """Return the share of rows that may be replaced because they cannot be read; 0 if such a row
    ends the run.
    """
    on_bad, given = options["on_bad"], options["bad_max"]
    if not isinstance(on_bad, str) or on_bad not in {RAISE, REPLACE}:
        raise ConfigError(
            f'on_bad={on_bad!r:.80}: choose "{RAISE}", which ends the run with an error at a row '
            f'that cannot be read, or "{REPLACE}", which delivers another row in its place, the '
            "same on all ranks",
            field="on_bad",
        )
    if given is not None and on_bad == RAISE:
        raise ConfigError(
            f'bad_max={given!r:.80} without on_bad="{REPLACE}", of which it is the limit: pass '
            "both, or neither",
            field="bad_max",
        )
    share = BAD_MAX if given is None else given
    if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
        raise ConfigError(
            f"bad_max={given!r:.80}: pass the share of an epoch's samples that may be replaced, "
            "more than 0, and 1 at most",
            field="bad_max",
        )
    return float(share) if on_bad == REPLACE else 0.0


def _column_options(options: UrlOptions) -> ColumnOptions:
    given: Mapping[str, Any] = {**options}
    arguments = {name: given[name] for name in COLUMN_DEFAULTS}
    if (pack := pack_spec(options["pack"])) is not None:
        names = (*COLUMN_DEFAULTS, "transforms")
        refused = [name for name in names if not _is(given[name], DEFAULTS[name])]
        if refused:
            raise ConfigError(
                f"{refused[0]}={given[refused[0]]!r:.80} with pack=: batches of packs have the"
                " columns that Pack(column, carry=[…], outputs=[…]) names, as they are"
                " stored: to change them, or to fill nulls, write a map=, and for another type of"
                " the tokens pass Pack(…, dtype=…)",
                field=refused[0],
            )
        arguments["columns"] = pack.stored
    return column_options(**arguments)


def _view(options: UrlOptions) -> View:
    given: Mapping[str, Any] = {**options}
    rows = view_of(**{name: given[name] for name in ROW_ARGUMENTS})
    return structs.replace(
        rows,
        map=function_name(options["map"], "map"),
        collate=function_name(options["collate"], "collate"),
        pack=pack_spec(options["pack"]),
        bad_max=_bad_max(options),
        resizes=_about_map(options, "resizes"),
        per_epoch=_about_map(options, "per_epoch"),
    )


def _about_map(options: UrlOptions, name: Literal["resizes", "per_epoch"]) -> bool:
    """Return the value of an option that says something about map=."""
    value, why = options[name], ""
    if value not in {False, True}:
        raise ConfigError(f"{name}={value!r:.80}: pass True or False", field=name)
    if options["map"] is None:
        why = "without map=, which it is about: pass both"
    elif options["pack"] is not None and name == "resizes":
        why = (
            "with pack=: let map return an empty list to leave a document out of packs, which cut "
            "long documents themselves"
        )
    elif name == "per_epoch" and (options["pack"] is not None or options["resizes"]):
        why = (
            "with resizes= or pack=: the number of samples is counted once, for all epochs. Draw "
            "in collate=, or leave it out"
        )
    if value and why:
        raise ConfigError(f"{name}=True {why}", field=name)
    return bool(value)


def refuse_torch_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that apply only to a torch Dataset, unless they have their defaults.

    Raises:  ConfigError: an argument does not apply to urls.
    """
    for name in passed_to_torch(given):
        raise ConfigError(
            f"{name}={given[name]!r:.80} does not apply to a dataset that is named by urls: "
            f"{_TORCH_ONLY[name][1]}",
            field=name,
        )


def passed_to_torch(given: Mapping[str, Any]) -> list[str]:
    """Return the arguments that apply only to a torch Dataset and do not have their defaults."""
    return [name for name, value in given.items() if not _is(value, _TORCH_ONLY[name][0])]


def passed_options(given: Arguments) -> list[str]:
    """Return the arguments that apply only to urls and do not have their defaults."""
    options: Mapping[str, object] = {**given.options}
    return [name for name, value in options.items() if not _is(value, DEFAULTS[name])]


def _is(given: object, default: object) -> bool:
    """Return whether an argument has its default. Arrays, which compare by element, never do."""
    return given is default or (default is not None and given == default)


def refuse_arguments(given: Arguments) -> None:
    """Refuse arguments that apply only to urls, unless they have their defaults.

    Raises:  ConfigError: an argument does not apply to a torch Dataset.
    """
    options: Mapping[str, object] = {**given.options}
    for name in passed_options(given):
        raise ConfigError(
            f"{name}={options[name]!r:.80} applies to datasets that are named by urls, but this is "
            f"a {type(given.urls).__name__}: {_instead(name, options[name])}",
            field=name,
        )


def _instead(name: str, value: object) -> str:
    """Return what to use with a torch Dataset instead of an option of urls."""
    match name:
        case "seed":
            return f"use generator=torch.Generator().manual_seed({value!r:.80})"
        case "collate":
            return "use collate_fn=, a function of a list of samples"
        case "map" | "transforms":
            return "do this in __getitem__ of the Dataset, or in collate_fn="
        case "where" | "limit" | "sample" | "split":
            return "use torch.utils.data.Subset, or a sampler="
    return "its Dataset, sampler and collate_fn decide that"


def _mixture(
    mixture: Mixture,
    urls: Mapping[str, tuple[str, ...]],
    options: UrlOptions,
    pack: PackSpec | None,
) -> MixtureAsked:
    """Return the mixture. Each source has the loader's options about rows, unless it has its own,
    and the loader's packs.
    """
    views, options = {}, cast("UrlOptions", {**options, "collate": None})
    for name, source in mixture.sources.items():
        try:
            own = _view(cast("UrlOptions", {**options, **source.own_options()}))
            views[name] = structs.replace(own, pack=pack)
        except ConfigError as error:
            raise ConfigError(f"source {name!r}: {error}", **error.nouns) from error
    return mixture.asked(urls, views, _format(options))


def _urls_of(mixture: Mixture) -> dict[str, tuple[str, ...]]:
    """Return the urls of each source."""
    urls = {}
    for name, source in mixture.sources.items():
        try:
            urls[name] = _urls(source.urls)
        except ConfigError as error:
            raise ConfigError(f"source {name!r}: {error}", field="urls") from error
    return urls


Before = Urls | Mapping[str, Urls] | None
"""The urls of a dataset, or the urls of the sources of a mixture, by name."""


def before_of(given: Before) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the urls of former datasets by the names of sources, "" without a mixture.

    Raises:  ConfigError: `given` has something that is not a url, or is signed.
    """
    if given is None:
        return ()
    by_source = given if isinstance(given, Mapping) else {"": given}
    before = tuple((name, _urls(urls)) for name, urls in by_source.items())
    for url in (url for _, urls in before for url in urls):
        if unsigned(url) != url:
            raise ConfigError(
                f"before= has {redacted(unsigned(url))} with a signature or credentials, which "
                "would be part of saved states: pass urls without them, and give the node "
                "credentials for the store, or name local copies",
                field="before",
            )
    return before


def _urls(given: object) -> tuple[str, ...]:
    if isinstance(given, Dataset):
        raise ConfigError(
            f"expected the urls of shards, got a torch Dataset ({type(given).__name__}): pass it "
            "to DataLoader instead",
            field="urls",
        )
    if isinstance(given, str | os.PathLike):
        given = [given]
    given = listed(given)
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(
            f"pass one url or a list of urls (globs, braces and prefixes allowed), not "
            f"{given!r:.80}",
            field="urls",
        )
    urls = []
    for url in given:
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError(f"{url!r:.80} is not a url", field="urls")
        try:
            _ = os.fspath(url).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{url!r:.200} is not valid UTF-8, but names of shards must be: rename the file",
                field="urls",
            ) from error
        urls.append(_absolute(str(os.fspath(url))))
    return tuple(urls)


def _absolute(url: str) -> str:
    """Make a path absolute, since the node opens it from another working directory. A url that
    lacks a slash is left to the node, whose error says what was meant.
    """
    if url.startswith(suffixes.TABLE_PREFIXES):
        kind, _, table = url.partition("+")
        return f"{kind}+{_absolute(table)}"
    is_url = "://" in url or (_ONE_SLASH.match(url) and not os.path.lexists(url))
    if is_url or url.startswith("/"):
        return url
    slash = "/" if url.endswith("/") else ""
    return os.path.abspath(os.path.expanduser(url)) + slash  # noqa: PTH100, PTH111 - may be a glob


def _missing(url: str) -> str:
    """Describe the problem of a local path that does not exist; "" for everything else."""
    path = url.removeprefix("file://")
    if not path.startswith("/") or os.path.lexists(path):
        return ""
    if path != url and os.path.lexists(decoded := urllib.parse.unquote(path)):
        return f"there is no file or folder {path}: urls are not decoded, so pass {decoded}"
    literal = _WILDCARD.split(path, maxsplit=1)[0]
    if literal != path:
        path = literal.rpartition("/")[0] or "/"
        if os.path.lexists(path):
            return ""
    folder, _, name = path.rstrip("/").rpartition("/")
    near = ""
    while folder and not os.path.isdir(folder):  # noqa: PTH112 - may be a surrogate
        folder, _, name = folder.rpartition("/")
    with contextlib.suppress(OSError):  # the folder may not be readable
        near = meant(name, os.listdir(folder or "/"))  # noqa: PTH208
    return f"there is no file or folder {path}; {folder or '/'} is there{near}"


class _Looks(enum.Enum):
    """The looks of a string: the name of a shard, perhaps a path to shards, or a text sample."""

    SHARDS = enum.auto()
    PATH = enum.auto()
    TEXT = enum.auto()


def listed(dataset: Any, *, for_urls: bool = True) -> Any:
    """Convert a collection or an iterator of paths to a list: arrays and tuples of configurations,
    `Path.glob()`, keys of a dict. A set is sorted. Anything else is returned unchanged, and read
    only up to the first member that is no path: reading a sample may take long. Without arguments
    `for_urls`, an empty sequence is a dataset without samples.
    """
    if not _may_hold_paths(dataset):
        return dataset
    members, paths = iter(dataset), list[Any]()
    for member in members:
        if not isinstance(member, str | os.PathLike):
            is_read = isinstance(dataset, Iterator)
            return itertools.chain(paths, [member], members) if is_read else dataset
        paths.append(str(member) if isinstance(member, str) else member)
    if not (paths or for_urls) and hasattr(dataset, "__getitem__"):
        return dataset
    return sorted(paths, key=os.fspath) if isinstance(dataset, AbstractSet) else paths


def _may_hold_paths(dataset: Any) -> bool:
    """Return whether `dataset` is a collection or an iterator, but not a list or a tuple, not a
    text, and not an array of numbers.
    """
    if isinstance(dataset, list | tuple | str | bytes | bytearray):
        return False
    if type(dataset).__module__ == "numpy" and getattr(dataset, "ndim", 0) == 1:
        return bool(dataset.dtype.kind in "UO")
    if isinstance(dataset, Sequence | AbstractSet | Iterator):
        return True
    return isinstance(dataset, Collection) and not hasattr(dataset, "__getitem__")


def names_shards(dataset: object, *, for_urls: bool, for_torch: bool) -> bool:
    """Return whether this is one url, a list of urls, or a mixture. `for_urls` and `for_torch` say
    that the user passed arguments that apply only to urls, or only to torch Datasets, which decides
    what a list of strings or an empty list is. Without either, all strings must look like shards:
    by suffix, scheme, glob or folder.

    Raises:  ConfigError: the list is empty, or its strings might be urls or samples.
    """
    if isinstance(dataset, str | os.PathLike | Mixture):
        return True
    if not isinstance(dataset, list | tuple):
        return False
    if not dataset and (for_urls or not for_torch):
        raise ConfigError(
            f"the dataset is {dataset!r}: there is nothing to load. If it comes from a glob that "
            "matched nothing, pass the pattern itself: the error will then name it. If it is a list"
            " of samples, pass collate_fn, or a Dataset that wraps the list",
            field="dataset",
        )
    if not all(isinstance(member, str | os.PathLike) for member in dataset):
        return False
    if for_urls or for_torch:
        return for_urls
    return _all_name_shards(dataset)


def _all_name_shards(dataset: Sequence[str | os.PathLike[str]]) -> bool:
    looks = {_Looks.SHARDS: 0, _Looks.PATH: 0, _Looks.TEXT: 0}
    for path in dataset:
        looks[_looks(path)] += 1
        if looks[_Looks.PATH] or (looks[_Looks.SHARDS] and looks[_Looks.TEXT]):
            raise ConfigError(
                f"a list of {len(dataset)} strings may name shards, or be samples: "
                f"{os.fspath(path)!r:.80} does not end as a shard does, and is not a folder, glob "
                'or url. If they are shards, name their format, as in format="parquet"; if they '
                "are samples, pass collate_fn, or a Dataset that wraps the list",
                field="dataset",
            )
    return not looks[_Looks.TEXT]


def _looks(given: str | os.PathLike[str]) -> _Looks:
    if not isinstance(given, str) or "://" in given or suffixes.names_a_shard(given):
        return _Looks.SHARDS
    if given.startswith(suffixes.TABLE_PREFIXES):
        return _Looks.SHARDS
    if any(space in given for space in " \t\n"):
        return _Looks.TEXT
    is_path = given.startswith(("/", "./", "../", "~/"))
    if _WILDCARD.search(given):
        return _Looks.SHARDS if is_path or "/" in given else _Looks.PATH
    if is_path:
        return _Looks.SHARDS if Path(given).expanduser().is_dir() else _Looks.PATH
    is_folder = given.endswith("/") or os.path.isdir(given)  # noqa: PTH112 - Path's may raise
    return _Looks.SHARDS if is_folder else _Looks.TEXT
