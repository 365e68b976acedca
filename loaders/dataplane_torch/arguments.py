"""Checks a user's arguments before anything is opened, and turns them into a job to open."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, cast

from msgspec import Struct, structs
from torch.utils.data import Dataset

from dataplane.client import identity
from dataplane.client.endpoint import Embedded, Endpoint, find_endpoint
from dataplane.client.launch import BegunNode
from dataplane.config import JobSpec
from dataplane.errors import ConfigError, ShardNotFound
from dataplane.ledger import PLACE_MAX
from dataplane.model import (
    ColumnOptions,
    End,
    ImageSpec,
    MixUnit,
    PackSpec,
    Topology,
    View,
)
from dataplane.rpc.messages import (
    DatasetSource,
    JobOpened,
    MixtureAsked,
    OpenJob,
    WeightsChanged,
)
from dataplane.settings import named_service
from dataplane.transforms.functions import function_name
from dataplane.transforms.mixture_options import Mixture
from dataplane.transforms.options import ARGUMENTS, column_options
from dataplane.transforms.pack_options import balanced, pack_spec
from dataplane.transforms.view_options import VIEW_ARGUMENTS, view_of
from dataplane.units import SECONDS_MAX, meant, whole
from dataplane_torch.group import check_layout, check_pixels, check_weights, launch_token
from dataplane_torch.naming import listed
from dataplane_torch.options import DEFAULTS, UrlOptions, check_texts
from dataplane_torch.parts import RankParts, parts_of
from dataplane_torch.topology import topology_of

_SEED_MAX = (1 << 64) - 1
_CHECKED_MAX = 256
_WILDCARD = re.compile(r"[*?\[{]")
_ONE_SLASH = re.compile(r"(s3[an]?|gs|gcs|az|azure|https?|hf|file|pipe):", re.IGNORECASE)

# Arguments that only torch's DataLoader takes: the default, which is accepted, and what to do.
_TORCH_ONLY: Final[Mapping[str, tuple[object, str]]] = {
    "sampler": (None, "the order comes from shuffle, seed, lanes and window"),
    "batch_sampler": (None, "batches come from batch_size or global_batch_size"),
    "num_workers": (
        0,
        "the node's workers do the work: leave it out, or give torch's a ShardedIterableDataset",
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

    `request.member_id` is empty: every process that joins has its own. `is_named`: the user has
    named the job, so that its spec may change between loaders. `parts` is what this rank gets of
    each batch.
    """

    endpoint: Endpoint
    request: OpenJob
    stall_timeout_s: float | None
    is_named: bool
    parts: RankParts

    def begin(self) -> BegunNode | None:
        """Start the node of this process ahead of its use, if it has none yet."""
        mixture = self.request.mixture
        source = self.request.source if mixture is None else mixture.sources[0].source
        return self.endpoint.begin(source)

    def check_files(self) -> None:
        """Check that local paths exist, so that a misspelt one is an error when the loader is made.
        Of a glob, the folder before its first wildcard is checked. A service's node opens them
        elsewhere, and stores are asked by the node.

        Raises:  ShardNotFound: one does not exist.
        """
        if not isinstance(self.endpoint, Embedded):
            return
        mixture = self.request.mixture
        named = [("", self.request.source)]
        if mixture is not None:
            named = [(f"source {one.name!r}: ", one.source) for one in mixture.sources]
        for name, source in named:
            for url in source.urls[:_CHECKED_MAX]:
                if problem := _missing(url):
                    raise ShardNotFound(f"{name}{problem}", shard=url)

    def check_ranks(self, opened: JobOpened) -> None:
        """Compare what was opened with what other ranks have opened.

        Raises:  SpecMismatch: it differs.  PeerLost: the process group's store does not answer.
        """
        check_pixels(opened.pixels)
        if not self.is_named:
            digest = opened.spec.joint_digest
            check_layout(self.request.job_id, self.request.topology, digest)

    def check_weights(self, found: WeightsChanged, epoch: int, cursor: int, number: int) -> None:
        """Compare weights that were set, the how-manieth time, with what other ranks have set.

        Raises:  SpecMismatch: it differs.  PeerLost: the process group's store does not answer.
        """
        if not self.is_named:
            told = f"{epoch}:{cursor}:{found.mix.digest}"
            check_weights(self.request.job_id, self.request.topology, number, told)


class Arguments(Struct, frozen=True):
    """The arguments that DataLoader and ShardedIterableDataset share, as the user gave them."""

    urls: object
    batch_size: int | None
    shuffle: bool | None
    drop_last: bool
    timeout: float
    options: UrlOptions


def job_of(given: Arguments) -> JobToOpen:
    """The job for these arguments.

    Raises:  ConfigError, TypeError: arguments are invalid or cannot be combined.  PeerLost:
             torch.distributed is initialized, and its store does not answer.
    """
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
    if not isinstance(given.timeout, Real) or not 0 <= given.timeout <= SECONDS_MAX:
        raise ConfigError(
            f"timeout={given.timeout!r:.80}: pass 0 to {SECONDS_MAX:,.0f} seconds", field="timeout"
        )
    request = OpenJob(
        job_id=identity.job_id(launch, urls, options["name"]),
        incarnation=launch.incarnation,
        member_id="",
        source=DatasetSource(urls, options["format"] or ""),
        topology=topology,
        spec=JobSpec(
            "",
            seed=_count("seed", options["seed"], 0, _SEED_MAX),
            shuffle=bool(given.shuffle),
            lanes=_count_or_zero("lanes", options["lanes"]),
            window=_count_or_zero("window", options["window"]),
            global_batch=_global_batch(given, topology, pads=_pads(view, mixture_asked)),
            end=_end(given),
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


def _transforms(options: UrlOptions) -> tuple[ImageSpec, ...]:
    names = ("transforms", "decode", "bad_images")
    if all(options[name] == DEFAULTS[name] for name in names):  # type: ignore[literal-required]
        return ()
    # A late import: loaders without images start faster without it.
    from dataplane.transforms.images import image_specs

    return image_specs(options["transforms"] or {}, options["decode"], options["bad_images"])


def _column_options(options: UrlOptions) -> ColumnOptions:
    given: Mapping[str, Any] = {**options}
    asked = {name: given[name] for name in ARGUMENTS}
    if (pack := pack_spec(options["pack"])) is not None:
        names = (*ARGUMENTS, "transforms")
        refused = [name for name in names if not _is(given[name], DEFAULTS[name])]
        if refused:
            raise ConfigError(
                f"{refused[0]}={given[refused[0]]!r:.80} with pack=: batches of packs have the"
                " columns that Pack(column, carry=[…], outputs=[…]) names, as they are"
                " stored: to change them, or to fill nulls, write a map=, and for another type of"
                " the tokens pass Pack(…, dtype=…)",
                field=refused[0],
            )
        asked["columns"] = pack.stored
    return column_options(**asked)


def _view(options: UrlOptions) -> View:
    given: Mapping[str, Any] = {**options}
    rows = view_of(**{name: given[name] for name in VIEW_ARGUMENTS})
    return structs.replace(
        rows,
        map=function_name(options["map"], "map"),
        collate=function_name(options["collate"], "collate"),
        pack=pack_spec(options["pack"]),
    )


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
    """The arguments that apply only to a torch Dataset and do not have their defaults."""
    return [name for name, value in given.items() if not _is(value, _TORCH_ONLY[name][0])]


def passed_options(given: Arguments) -> list[str]:
    """The arguments that apply only to urls and do not have their defaults."""
    options: Mapping[str, object] = {**given.options}
    return [name for name, value in options.items() if not _is(value, DEFAULTS[name])]


def _is(given: object, default: object) -> bool:
    """Whether an argument has its default. An array compares by element, and is none."""
    return given is default or (default is not None and given == default)


def refuse_arguments(given: Arguments) -> None:
    """Refuse arguments that apply only to urls, unless they have their defaults.

    Raises:  ConfigError: an argument does not apply to a torch Dataset.
    """
    options: Mapping[str, object] = {**given.options}
    for name in passed_options(given):
        raise ConfigError(
            f"{name}={options[name]!r:.80} applies to datasets that are named by urls, and this is "
            f"a {type(given.urls).__name__}: its Dataset, sampler and collate_fn decide that",
            field=name,
        )


def _mixture(
    mixture: Mixture,
    urls: Mapping[str, tuple[str, ...]],
    options: UrlOptions,
    pack: PackSpec | None,
) -> MixtureAsked:
    """The mixture; each source has the loader's options of rows, unless it has its own, and the
    loader's packs. Batches are made of samples of all of them.
    """
    views, options = {}, cast("UrlOptions", {**options, "collate": None})
    for name, source in mixture.sources.items():
        try:
            own = _view(cast("UrlOptions", {**options, **source.own_options()}))
            views[name] = structs.replace(own, pack=pack)
        except ConfigError as error:
            raise ConfigError(f"source {name!r}: {error}", **error.nouns) from error
    return mixture.asked(urls, views, options["format"] or "")


def _urls_of(mixture: Mixture) -> dict[str, tuple[str, ...]]:
    """The urls of each source."""
    found = {}
    for name, source in mixture.sources.items():
        try:
            found[name] = _urls(source.urls)
        except ConfigError as error:
            raise ConfigError(f"source {name!r}: {error}", field="urls") from error
    return found


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
    for one in given:
        if not isinstance(one, str | os.PathLike) or not os.fspath(one):
            raise ConfigError(f"{one!r:.80} is not a url", field="urls")
        try:
            _ = os.fspath(one).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{one!r:.200} is not UTF-8, as names of shards are: rename the file", field="urls"
            ) from error
        urls.append(_absolute(str(os.fspath(one))))
    return tuple(urls)


def _absolute(url: str) -> str:
    """Make a path absolute, since the node opens it from another working directory. Of an url with
    a slash too few, the node says what was meant.
    """
    is_url = "://" in url or (_ONE_SLASH.match(url) and not os.path.lexists(url))
    if is_url or url.startswith("/"):
        return url
    slash = "/" if url.endswith("/") else ""
    return os.path.abspath(os.path.expanduser(url)) + slash  # noqa: PTH100, PTH111 - may be a glob


def _missing(url: str) -> str:
    """Describe the problem of a local path that does not exist; "" for all others."""
    path = url.removeprefix("file://")
    if not path.startswith("/") or os.path.lexists(path) or (path != url and "%" in path):
        return ""
    literal = _WILDCARD.split(path, maxsplit=1)[0]
    if literal != path:
        path = literal.rpartition("/")[0] or "/"
        if os.path.lexists(path):
            return ""
    folder, _, name = path.rstrip("/").rpartition("/")
    near = ""
    while folder and not os.path.isdir(folder):  # noqa: PTH112 - may be a surrogate
        folder, _, name = folder.rpartition("/")
    with contextlib.suppress(OSError):  # a folder that may not be listed
        near = meant(name, os.listdir(folder or "/"))  # noqa: PTH208
    return f"there is no file or folder {path}; {folder or '/'} is there{near}"


def _pads(view: View, mixture: MixtureAsked | None) -> bool:
    """Whether samples are padded batches."""
    views = [view] if mixture is None else [source.view for source in mixture.sources]
    return any(each.pads for each in views)


def _global_batch(given: Arguments, topology: Topology, *, pads: bool) -> int:
    whole = given.options["global_batch_size"]
    if pads and (given.batch_size is not None or whole is not None):
        name = "batch_size" if whole is None else "global_batch_size"
        raise ConfigError(
            f"{name}={given.batch_size if whole is None else whole!r:.80} with"
            ' Pack(…, policy="pad"): each sample is a padded batch already, of as many rows as fit'
            " into its length: pass batch_size=None",
            field=name,
        )
    if pads:
        return topology.dp_size
    if whole is None and given.batch_size is None:
        raise ConfigError(
            "batch_size=None: samples that are batches already are those of"
            ' pack=Pack("tokens", 16384, policy="pad"). Pass the samples of a rank\'s batch',
            field="batch_size",
        )
    if whole is None:
        return _count("batch_size", given.batch_size, 1) * topology.dp_size
    if given.batch_size != 1:
        raise ConfigError(
            f"batch_size={given.batch_size} (per rank) conflicts with global_batch_size={whole} "
            "(over all ranks): pass one of them",
            field="global_batch_size",
        )
    return _count("global_batch_size", whole, 1)


def _end(given: Arguments) -> End:
    end = given.options["end"]
    if end is None:
        return End.DROP if given.drop_last else End.RAGGED
    ends = {end.value: end for end in End}
    if not isinstance(end, str) or end not in ends:
        raise ConfigError(f"end={end!r:.80}: choose one of {', '.join(ends)}", field="end")
    if given.drop_last and ends[end] is not End.DROP:
        raise ConfigError(f"drop_last=True conflicts with end={end!r}: pass one", field="end")
    return ends[end]


def _count_or_zero(name: str, value: int | None) -> int:
    return 0 if value is None else _count(name, value, 1)


def _count(name: str, value: object, least: int, most: int = (1 << 31) - 1) -> int:
    found = whole(value)
    if found is None or not least <= found <= most:
        raise ConfigError(
            f"{name}={value!r:.80}: a whole number from {least} to {most}", field=name
        )
    return found


def epoch_of(given: object) -> int:
    """The epoch that `set_epoch` was given.

    Raises:  ConfigError: it is not an epoch number.
    """
    found = whole(given)
    if found is None or not 0 <= found < PLACE_MAX:
        raise ConfigError(
            f"an epoch is a whole number from 0 to {PLACE_MAX - 1}, got {given!r:.80}",
            field="epoch",
        )
    return found
