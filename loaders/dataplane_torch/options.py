"""The options of loaders over urls beyond torch's arguments, defined once for all classes.

Also the names that other loaders have for such options, with what to use here instead.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypedDict

from dataplane.config import RAISE
from dataplane.errors import ConfigError, DataplaneError, RowOutOfBounds
from dataplane.rpc.bounds import NAME_LENGTH_MAX, check_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataplane.model import Topology
    from dataplane.transforms.options import Lengths, Numbers
    from dataplane.transforms.pack_options import Pack
    from dataplane.transforms.stacks import Stack
    from dataplane.transforms.steps.registry import Transform

_P = ParamSpec("_P")
Function = str | Callable[..., Any]
"""A function of a module, or its name: "package.module:function"."""


class UrlOptions(TypedDict, total=False):
    """The options of a dataset that is named by urls; DataLoader's docstring explains them."""

    seed: int
    end: str | None
    global_batch_size: int | None
    map: Function | None
    collate: Function | None
    columns: Sequence[str] | None
    lists: str
    codes: Sequence[str] | None
    dtype: Mapping[str, object] | None
    pad_value: Numbers | None
    max_length: Lengths | None
    truncation_side: str
    fill_null: Numbers | None
    nulls: str
    stack: Mapping[str, Stack | Sequence[str]] | None
    transforms: Mapping[str, Sequence[Transform]] | None
    decode: str | None
    bad_images: str
    where: str | None
    sample: float | None
    split: Sequence[str | float] | None
    limit: int | None
    pack: Pack | None
    balance: str | None
    format: str | None
    lanes: int | None
    window: int | None
    service: str | None
    name: str | None
    sharing: str | None
    topology: Topology | None
    device_mesh: DeviceMesh | None
    batch_axes: Sequence[str | int] | None
    dp_rank: int | None
    dp_size: int | None
    columns_by_stage: Mapping[int, Sequence[str]] | None
    sequence_part: Sequence[str] | None
    dataset_moved: bool


DEFAULTS: Final[Mapping[str, object]] = {
    **dict.fromkeys(UrlOptions.__annotations__),
    "seed": 0,
    "lists": "padded",
    "truncation_side": "right",
    "nulls": "fill",
    "bad_images": RAISE,
    "dataset_moved": False,
}

# Options that are texts: what to pass, and how many characters they have.
_TEXTS: Final[Mapping[str, tuple[str, int, int]]] = {
    "name": ("the name of the job", 1, NAME_LENGTH_MAX),
    "sharing": ("the name of the group that jobs with equal loaders share", 1, 200),
    "service": ('the address of the coordinator, such as "10.0.0.1:7077"', 0, NAME_LENGTH_MAX),
    "format": ('the name of a format, such as "parquet"', 0, NAME_LENGTH_MAX),
}

# Arguments of other loaders, and what to use here.
_FOREIGN: Final[Mapping[str, str]] = {
    "weights streams proportion probabilities datasets stopping_strategy": (
        "pass Mixture({name: Source(url, weight=…), …}) as the first argument"
    ),
    "shuffle_seed manual_seed random_seed": "use seed=, from which the whole order follows",
    "shuffle_algo shuffle_block_size shuffle_buffer shuffle_buffer_size buffer_size shardshuffle "
    "shuffle_files reshuffle_each_iteration": (
        "use shuffle=True; window= says among how many samples, and lanes= among how many places"
    ),
    "predownload prefetch prefetch_batches prefetch_size cache_limit max_cache_size keep_zip "
    "download_retry download_timeout": (
        "leave it out: the node reads ahead, and keeps as much as its memory settings allow "
        "(`dataplane config show`)"
    ),
    "worker_count num_threads num_parallel_calls num_proc worker_buffer_size workers_count "
    "reader_pool_type": (
        "leave it out: the node chooses the number of its workers, unless its setting worker_count "
        "fixes it"
    ),
    "batching_method num_canonical_nodes partition_algo sampling_method sampling_granularity "
    "epoch_size replication in_memory deterministic cycle_length block_length": (
        "leave it out: the order is the same for any number of ranks, nodes and workers"
    ),
    "nodesplitter workersplitter splitter split_by_node split_by_worker sharding_filter "
    "shard_options": (
        "leave it out: every rank gets its own part of each global batch, whatever the number of "
        "ranks, nodes and workers"
    ),
    "epoch start_epoch initial_epoch current_epoch": (
        "call set_epoch(epoch) on the loader before the pass; without it each pass is the next "
        "epoch, and load_state_dict() resumes where a state was taken"
    ),
    "subset partition subset_fraction fraction dataset_fraction": (
        'use sample=0.1 for a tenth of the rows, split=("train", 0.99) and ("validation", 0.01) '
        "for disjoint parts, or name the shards of a part in the first argument"
    ),
    "validation_split val_split test_split train_size test_size": (
        'use split=("train", 0.99) in one loader, and split=("validation", 0.01) in another'
    ),
    "filter filters filter_fn predicate query row_filter": (
        "use where=, a condition on columns such as where=\"lang == 'en' and score > 0.5\""
    ),
    "handler on_error on_bad_sample error_policy ignore_errors ignore_corrupt skip_errors "
    "skip_corrupt ignore_decoding_errors": (
        'use bad_images="replace", which delivers other rows in the places of those whose images '
        "cannot be decoded; all other damage ends a run with an error"
    ),
    "max_samples num_samples n_samples take max_examples": "use limit=, a number of rows",
    "storage_options client_kwargs s3_client_kwargs s3_client_config filesystem": (
        "leave it out: stores take their endpoint and credentials from the environment "
        "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …), as their own tools do"
    ),
    "rank num_replicas shard_id shard_index device_id process_index": (
        "use dp_rank=; without it, Topology.auto() finds it"
    ),
    "world_size num_shards process_count shard_count": (
        "use dp_size=; without it, Topology.auto() finds it"
    ),
    "drop_remainder drop_remainder_batch": "use drop_last=True",
    "epochs num_epochs repeat resampled infinite": (
        "each pass over the loader is one epoch: write a loop around it"
    ),
    "transform map_fn operations pipelines preprocess decode_fn process_fn": (
        'use map="package.module:function", which workers call once a block, or transforms= for '
        "images"
    ),
    "collator data_collator batch_fn collation_fn batch_transform": (
        'use collate="package.module:function", which workers call once a batch'
    ),
    "remote local data_files input_dir urls url path paths fname data_source data_dir "
    "file_pattern": "pass a url, folder or glob, or a list of them, as the first argument",
    "streaming cache_dir local_cache download": (
        "leave it out: shards are read where they are, and nothing is downloaded before"
    ),
    "select features fields schema_fields usecols": "use columns=, the names of those you want",
    "pad_token_id padding_value pad_id padding_token_id": "use pad_value=",
    "categorical categorical_columns cat_cols category_columns vocab vocabulary": "use codes=",
    "max_len max_seq_len max_seq_length seq_len sequence_length truncation": "use max_length=",
    "packing pack_sequences sequence_packing packed pack_to_max_length": (
        'use pack=Pack("tokens", length=4096)'
    ),
    "max_tokens batch_tokens token_budget batch_max_tokens max_batch_tokens group_by_length "
    "length_bucketing bucketing bucket_boundaries bucket_by_sequence_length num_buckets": (
        'use batch_size=None, pack=Pack("tokens", 16384, policy="pad")'
    ),
    "batch_format return_type output_format as_dict": (
        "leave it out: a batch is a dict of tensors and lists, by column"
    ),
}
_ADVICE: Final[Mapping[str, str]] = {
    name: said for names, said in _FOREIGN.items() for name in names.split()
}


class _Brief:
    """Around what a public method does: our frames are left out of the traceback of its errors, so
    that these end below the line of the user's that is meant. Most come from a node, and those
    frames only say so. With DATAPLANE_LOG_LEVEL=debug, and for bugs, tracebacks are whole.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if not isinstance(error, DataplaneError) or isinstance(error, RowOutOfBounds):
            return
        if os.environ.get("DATAPLANE_LOG_LEVEL", "").lower() != "debug":
            raise error.with_traceback(None) from error.__cause__


brief = _Brief()


def check_texts(options: UrlOptions) -> None:
    """Raises:  ConfigError: an option that is a text is something else, or too long."""
    for name, (what, least, most) in _TEXTS.items():
        given: object = {**options}[name]
        if given is not None and (not isinstance(given, str) or not least <= len(given) <= most):
            raise ConfigError(
                f"{name}={given!r:.80}: pass {what}, of at most {most} characters", field=name
            )
        if given is not None:
            check_name(name, given, needed=False, most=most)


def url_options(init: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap an `__init__` that takes `**options: Unpack[UrlOptions]`. The signature then lists all
    options, and an unknown name raises a TypeError that says what to use.
    """
    own = [
        one
        for one in inspect.signature(init).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    known = {one.name for one in own} | DEFAULTS.keys()

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in kwargs.keys() - known:
            raise TypeError(_unexpected(init.__qualname__.partition(".")[0], name, known))
        with brief:
            init(*args, **kwargs)

    spelled = [*own, *_parameters()]
    checked.__signature__ = inspect.Signature(spelled)  # type: ignore[attr-defined]
    return checked


def _parameters() -> Iterator[inspect.Parameter]:
    for name, kind in UrlOptions.__annotations__.items():
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS[name],
            annotation=getattr(kind, "__forward_arg__", kind),
        )


def _unexpected(taker: str, name: str, known: Collection[str]) -> str:
    from dataplane.settings import BY_NAME
    from dataplane.units import meant, ways_to_set

    said = f"{taker}() has no argument {name!r}"
    if name in _ADVICE:
        return f"{said}: {_ADVICE[name]}"
    if name in BY_NAME:
        return f"{said}: it is a setting, and not of one loader. Set {ways_to_set(name, '…')}"
    return f"{said}{meant(name, known)}"
