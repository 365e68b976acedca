"""What a user may ask for, checked before anything is opened: arguments -> a job to open."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed
from torch.utils.data import Dataset

from dataplane.client import identity
from dataplane.client.endpoint import Endpoint, find_endpoint
from dataplane.client.topology import find_topology
from dataplane.errors import ConfigError
from dataplane.model import End, ListPolicy, Topology
from dataplane.rpc.messages import DatasetSource, OpenJob
from dataplane.transforms.images import Transform, image_specs
from dataplane.transforms.stacks import Stack, stack_specs
from dataplane_torch.group import launch_token

Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SEED_MAX = (1 << 64) - 1
_NAME_MAX = 200

# What torch's DataLoader takes besides, with its defaults, which are accepted, and what to do.
_TORCH_ONLY: Final[Mapping[str, tuple[object, str]]] = {
    "sampler": (None, "the order comes from shuffle, seed, lanes and window"),
    "batch_sampler": (None, "batches come from batch_size or global_batch_size"),
    "num_workers": (
        0,
        "the node's workers do the work: leave it out, or give torch's a ShardedIterableDataset",
    ),
    "collate_fn": (None, "batches arrive as dicts of tensors; change them in the loop"),
    "worker_init_fn": (None, "there are no workers in this process"),
    "multiprocessing_context": (None, "there are no workers in this process"),
    "generator": (None, "the order comes from seed"),
    "prefetch_factor": (None, "the node reads ahead as far as its memory allows"),
    "persistent_workers": (False, "the node lives as long as its trainers"),
    "pin_memory_device": ("", "memory is pinned for every device"),
    "in_order": (True, "batches always come in order"),
}


# What torch's DataLoader does not take, with our defaults.
_URLS_ONLY: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        (
            *("end", "global_batch_size", "columns", "fill_null", "transforms", "stack"),
            *("format", "lanes", "window", "service", "name", "sharing", "topology", "dp_rank"),
            "dp_size",
        )
    ),
    "seed": 0,
    "lists": "padded",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A job to open, and where: a value that DataLoader workers get by fork or by pickle.

    `request.member_id` is empty: every process that joins has its own.
    """

    endpoint: Endpoint
    request: OpenJob
    stall_timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that DataLoader and ShardedIterableDataset share, as the user gave them."""

    urls: object
    batch_size: int | None
    shuffle: bool | None
    seed: int
    drop_last: bool
    end: str | None
    global_batch_size: int | None
    columns: Sequence[str] | None
    lists: str
    fill_null: Mapping[str, float] | None
    transforms: Mapping[str, Sequence[Transform]] | None
    stack: Mapping[str, Stack | Sequence[str]] | None
    format: str | None
    lanes: int | None
    window: int | None
    service: str | None
    name: str | None
    sharing: str | None
    topology: Topology | None
    dp_rank: int | None
    dp_size: int | None
    timeout: float


def job_of(given: Arguments) -> Job:
    """The job that these arguments ask for.

    Raises:  ConfigError, TypeError: arguments that mean nothing, or not together.
             PeerLost: torch.distributed is initialised, and its store does not answer.
    """
    urls = _urls(given.urls)
    distributed = _distributed()
    topology = find_topology(
        os.environ,
        explicit=given.topology,
        distributed=distributed,
        dp_rank=given.dp_rank,
        dp_size=given.dp_size,
    )
    launch = identity.launch_identity(os.environ, topology.world_size, launch_token())
    if given.timeout < 0:
        raise ConfigError(f"timeout is {given.timeout}: 0 or more seconds", field="timeout")
    request = OpenJob(
        job_id=identity.job_id(launch, urls, given.name),
        incarnation=launch.incarnation,
        member_id="",
        source=DatasetSource(urls, given.format or ""),
        topology=topology,
        seed=_count("seed", given.seed, 0, _SEED_MAX),
        shuffle=bool(given.shuffle),
        lanes=_optional_count("lanes", given.lanes),
        window=_optional_count("window", given.window),
        global_batch=_global_batch(given, topology),
        end=_end(given),
        columns=_columns(given.columns),
        lists=_lists(given.lists),
        fill_null=tuple(sorted((name, float(v)) for name, v in (given.fill_null or {}).items())),
        transforms=image_specs(given.transforms or {}),
        sharing=_sharing(given.sharing),
        stack=stack_specs(given.stack or {}),
    )
    service = given.service or os.environ.get("DATAPLANE_SERVICE")
    endpoint = find_endpoint(service, identity.node_name(launch, request.sharing))
    return Job(endpoint, request, given.timeout or None)


def refuse_torch_arguments(given: Mapping[str, Any]) -> None:
    """Raises for whatever only means something over a torch Dataset, unless it is the default.

    Raises:  ConfigError: not over urls.
    """
    for name, value in given.items():
        default, advice = _TORCH_ONLY[name]
        if value != default:
            raise ConfigError(
                f"{name}={value!r:.80} does not apply to a dataset that is named by urls: {advice}",
                field=name,
            )


def refuse_arguments(given: Arguments) -> None:
    """Raises for whatever only means something over urls, unless it is the default.

    Raises:  ConfigError: not over a torch Dataset.
    """
    for name, default in _URLS_ONLY.items():
        value = getattr(given, name)
        if value != default:
            raise ConfigError(
                f"{name}={value!r:.80} applies to datasets that are named by urls, and this is a "
                f"{type(given.urls).__name__}: its Dataset, sampler and collate_fn decide that",
                field=name,
            )


def _urls(given: object) -> tuple[str, ...]:
    if isinstance(given, Dataset):
        raise ConfigError(
            f"a torch Dataset ({type(given).__name__}) is none: pass it to DataLoader",
            field="urls",
        )
    if isinstance(given, str | os.PathLike):
        given = [given]
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(
            f"pass one url or a list of urls (globs, braces and prefixes allowed), not "
            f"{given!r:.80}",
            field="urls",
        )
    urls = []
    for one in given:
        if not isinstance(one, str | os.PathLike) or not os.fspath(one):
            raise ConfigError(f"{one!r:.80} is no url", field="urls")
        urls.append(_absolute(str(os.fspath(one))))
    return tuple(urls)


def _absolute(url: str) -> str:
    """Paths are the node's to open, and a node has a working directory of its own."""
    if "://" in url or url.startswith("/"):
        return url
    slash = "/" if url.endswith("/") else ""
    return os.path.abspath(os.path.expanduser(url)) + slash  # noqa: PTH100, PTH111 - may be a glob


def _distributed() -> tuple[int, int] | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def _global_batch(given: Arguments, topology: Topology) -> int:
    if given.global_batch_size is None:
        return _count("batch_size", given.batch_size, 1) * topology.dp_size
    if given.batch_size != 1:
        raise ConfigError(
            f"batch_size={given.batch_size} (of one rank) and global_batch_size="
            f"{given.global_batch_size} (of all of them) say two things: pass one",
            field="global_batch_size",
        )
    return _count("global_batch_size", given.global_batch_size, 1)


def _end(given: Arguments) -> End:
    if given.end is None:
        return End.DROP if given.drop_last else End.RAGGED
    ends = {end.value: end for end in End}
    if given.end not in ends:
        raise ConfigError(f"end={given.end!r}: choose one of {', '.join(ends)}", field="end")
    if given.drop_last and ends[given.end] is not End.DROP:
        raise ConfigError(
            f"drop_last=True and end={given.end!r} say two things: pass one", field="end"
        )
    return ends[given.end]


def _lists(given: str) -> ListPolicy:
    policies = {policy.value: policy for policy in ListPolicy}
    if given not in policies:
        raise ConfigError(f"lists={given!r}: choose one of {', '.join(policies)}", field="lists")
    return policies[given]


def _columns(given: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(given, str):
        raise ConfigError(f"columns={given!r}: pass a list of names", field="columns")
    if given is not None and not given:
        raise ConfigError("columns=[] leaves nothing: name some, or leave it out", field="columns")
    return tuple(given or ())


def _sharing(given: object) -> str:
    if given is not None and (not isinstance(given, str) or not 0 < len(given) <= _NAME_MAX):
        raise ConfigError(
            f"sharing={given!r:.80}: the name that jobs which load alike have in common, of "
            f"{_NAME_MAX} characters at most",
            field="sharing",
        )
    return given or ""


def _optional_count(name: str, value: int | None) -> int | None:
    return None if value is None else _count(name, value, 1)


def _count(name: str, value: object, least: int, most: int = (1 << 31) - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(
            f"{name}={value!r:.80}: a whole number from {least} to {most}", field=name
        )
    return value
