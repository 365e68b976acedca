"""The options of loaders over urls beyond torch's arguments, in groups, and the checks of options
that decide the order. Options of rows and columns are in dataplane/transforms/options.py.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypedDict

from msgspec import Struct

from dataplane.base.units import meant, one_of, ways_to_set, whole_from
from dataplane.model.config import RAISE, JobSpec
from dataplane.model.errors import ConfigError, DataplaneError, RowOutOfBounds
from dataplane.model.ledger import PLACE_MAX
from dataplane.model.records import End
from dataplane.rpc.bounds import NAME_LENGTH_MAX, check_name
from dataplane.transforms.options import COLUMN_DEFAULTS, ColumnArguments, RowArguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dataplane.model.records import Topology
    from dataplane.transforms.pack_options import Pack
    from dataplane.transforms.steps.registry import Transform
    from dataplane_torch.stages import Stage

_P = ParamSpec("_P")
Function = str | Callable[..., Any]
"""A function of a module, or its name: "package.module:function"."""


class OrderArguments(TypedDict, total=False):
    """The arguments about the order of samples, and which samples form a batch."""

    seed: int
    """The seed of all random numbers. Runs with the same seed have the same order."""
    lanes: int | None
    """The number of *lanes*: parts of the dataset from which the shuffle reads at the same time. By
    default, the dataset's size decides their number ([more](../concepts.md#lanes-and-windows))."""
    window: int | None
    """The number of consecutive samples of a lane that are shuffled together. By default, the size
    of the dataset decides this number."""
    global_batch_size: int | None
    """The number of samples of a step over all ranks, instead of `batch_size`. A run can then
    continue on another number of ranks with the same steps.
    """
    end: str | None
    """The rule for samples that do not fill the last global batch. With `"ragged"`, the ranks
    divide these samples, and get batches that differ by at most one sample. If there are fewer
    samples than ranks, the samples join the previous step. `"drop"` means `drop_last=True`. With
    `"pad"`, samples from the epoch's start fill the batch, and `loader.valid_count` is the number
    of rows that are not padding.
    """


class ImageArguments(TypedDict, total=False):
    """The arguments about images."""

    transforms: Mapping[str, Sequence[Transform]] | None
    """Columns of encoded images, with the steps that the node applies: `{"jpg":
    [RandomResizedCrop(224), ToLayout("CHW")]}`.
    """
    decode: str | None
    """With `"exact"`, JPEGs are decoded at full size. With `"fast"`, images of at least twice the
    output size are decoded at a reduced size. By default, RandomResizedCrop decodes as with
    `"fast"`, and other steps decode as with `"exact"`.
    """
    bad_images: str
    """The reaction to an image that cannot be decoded: `"raise"` ends the run with an ImageError,
    and `"replace"` delivers another row of the same block. All ranks get the same row.
    """


class FunctionArguments(TypedDict, total=False):
    """The arguments that make samples from rows: functions of the user, and packs."""

    map: Function | None
    """A function of a module, or its name `"package.module:function"`. Workers call the function on
    the columns of each block. Batches have the columns that the function returns.
    """
    resizes: bool
    """If true, `map` may return more or fewer rows than it gets; the first run counts the rows."""
    per_epoch: bool
    """If true, `map` gets other random numbers in each epoch, and is called again in each epoch."""
    collate: Function | None
    """A function that workers call on each batch; pass it as for `map`. The function gets numpy
    arrays, and returns arrays of any shape, which arrive as tensors.
    """
    pack: Pack | None
    """With `Pack("tokens", length=4096)`, each sample has several rows of tokens, with little
    padding. With `policy="pad"` and `batch_size=None`, each sample is a padded batch of rows of
    similar length.
    """
    balance: str | None
    """With `"cost"`, all ranks get packs with about the same cost of attention at each step."""


class PlaceArguments(TypedDict, total=False):
    """The arguments about this rank's place, and the part of each batch that it gets."""

    topology: Topology | None
    """A Topology with this process's ranks. By default, `Topology.auto()` finds the ranks in the
    mesh, the process group or the launcher's environment.
    """
    device_mesh: DeviceMesh | None
    """A DeviceMesh, from which the loader takes the data-parallel rank of this process."""
    batch_axes: Sequence[str | int] | None
    """The names (or numbers) of the mesh's axes along which batches differ. By default, the loader
    recognises these axes by their [usual names](../parallel.md). An error says when it cannot."""
    dp_rank: int | None
    """The data-parallel rank of this process; also pass `dp_size`."""
    dp_size: int | None
    """The number of data-parallel ranks."""
    columns_by_stage: Mapping[int, Sequence[str]] | None
    """The columns of each pipeline stage: `{0: ["tokens"], -1: ["labels"]}`. -1 is the last stage;
    other stages get `{}`.
    """
    sequence_part: Sequence[str] | None
    """Columns of sequences [B, T]. Each context-parallel rank gets only its own part of every
    sequence, without a copy."""


class JobArguments(TypedDict, total=False):
    """The arguments about the job as a whole."""

    format: str | None
    """The name of the format, if the names of the shards have no known suffix."""
    files: str | None
    """The column of a table with paths of files. The node reads each file into the column `image`.
    Paths are relative to the folder of the table.
    """
    service: str | None
    """The address of a coordinator, `"10.0.0.1:7077"`; by default the setting `service`. Without
    either, this process starts a node.
    """
    name: str | None
    """The name of the job. By default, the loader makes a name from the launcher's run id and the
    urls. A later launch with the same `name` continues the same job.
    """
    sharing: str | None
    """A name. If jobs of one host have equal batches and pass the same name, the node decodes each
    image only once for all of them."""
    follow: bool
    """If true, list the shards again at the start of each epoch. New names must sort after all old
    names. A resumed epoch keeps the shards that it had at its start.
    """
    dataset_moved: bool
    """If true, accept a state of a dataset that was copied: the ETags of shards (or modification
    times of local files) may differ. Names, sizes and blocks must be equal.
    """
    on_bad: str
    """The reaction to damaged rows and blocks: `"raise"` ends the run, and `"replace"` delivers
    other rows instead.
    """
    bad_max: float | None
    """The share of an epoch's rows that `on_bad="replace"` may replace; 0.001 by default."""
    stages: Sequence[Stage] | None
    """The parts of a run that change the loader's arguments, in order: `[Stage(steps=9000,
    max_length=4096), Stage(change="unread", max_length=32768)]`. Each Stage except the last has
    `steps` or `epochs`. Pass a Stage the arguments that differ from the loader's, such as
    `batch_size`, or another dataset as first argument ([example](../howto/sequence-length.md)).
    """
    replay_first_slab: bool
    """If true, repeat the first batches of each epoch, to measure the trainer alone. Such a run has
    no state.
    """


class UrlOptions(
    RowArguments,
    OrderArguments,
    ColumnArguments,
    ImageArguments,
    FunctionArguments,
    PlaceArguments,
    JobArguments,
    total=False,
):
    """All options of a dataset that is named by urls, as DataLoader's docstring lists them."""


DEFAULTS: Final[Mapping[str, object]] = {
    **dict.fromkeys(UrlOptions.__annotations__),
    **COLUMN_DEFAULTS,
    "seed": 0,
    "bad_images": RAISE,
    "on_bad": RAISE,
    "follow": False,
    "dataset_moved": False,
    "resizes": False,
    "per_epoch": False,
    "replay_first_slab": False,
}


class Arguments(Struct, frozen=True):
    """The arguments that DataLoader and ShardedIterableDataset share, as the user gave them."""

    urls: object
    batch_size: int | None
    shuffle: bool | None
    drop_last: bool
    timeout: float
    options: UrlOptions


_SEED_MAX = (1 << 64) - 1
_COUNT_MAX = (1 << 31) - 1

# For each option that is a text: what to pass, and the minimum and maximum number of characters.
_TEXTS: Final[Mapping[str, tuple[str, int, int]]] = {
    "name": ("the name of the job", 1, NAME_LENGTH_MAX),
    "sharing": ("the name of the group that jobs with equal loaders share", 1, 200),
    "service": ('the address of the coordinator, such as "10.0.0.1:7077"', 0, NAME_LENGTH_MAX),
    "format": ('the name of a format, such as "parquet"', 0, NAME_LENGTH_MAX),
    "files": ("the name of the column of paths", 1, NAME_LENGTH_MAX),
}


class _Brief:
    """A context for public methods that removes our own frames from the traceback of an error, so
    that the traceback ends at the user's line that caused it. With DATAPLANE_LOG_LEVEL=debug, and
    for bugs, tracebacks are complete.
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
    """Check the options that are texts.

    Raises:  ConfigError: an option is not a text, or its length is wrong.
    """
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
        parameter
        for parameter in inspect.signature(init).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    known = {parameter.name for parameter in own} | DEFAULTS.keys()

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        taker = init.__qualname__.partition(".")[0]
        if wrong := [_unexpected(taker, name, known) for name in kwargs if name not in known]:
            raise TypeError("\n".join(wrong))
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

    said = f"{taker}() has no argument {name!r}"
    if name in BY_NAME:
        return f"{said}: it is a setting, not an argument of a loader. Set {ways_to_set(name, '…')}"
    for row in re.split(r"\n(?=\w)", OTHER_NAMES):
        names, _, use = " ".join(row.split()).partition(": ")
        if name in names.split():
            return f"{said}. {use[0].upper()}{use[1:]} (docs/migrate/names.md)"
    page = "help(DataLoader) lists arguments, docs/migrate/names.md those of other loaders"
    return f"{said}{meant(name, known)} ({page})"


OTHER_NAMES = """\
weights streams proportion probabilities datasets stopping_strategy: pass Mixture({name: Source(url,
    weight=…), …}) as the first argument
shuffle_seed manual_seed random_seed: use seed=, which decides the whole order
shuffle_algo shuffle_block_size shuffle_buffer shuffle_buffer_size buffer_size shardshuffle
    shuffle_files reshuffle_each_iteration: use shuffle=True; if needed,
    window= and lanes= change how far samples are mixed
predownload prefetch prefetch_batches prefetch_size cache_limit max_cache_size keep_zip
    download_retry download_timeout: leave it out: the node reads ahead while it has
    memory (docs/operations.md#memory)
worker_count num_threads num_parallel_calls num_proc worker_buffer_size workers_count
    reader_pool_type: leave it out: the node decides, unless you set its worker_count
num_canonical_nodes partition_algo sampling_method sampling_granularity in_memory deterministic
    cycle_length block_length: leave it out: the order is the same for any number of ranks, nodes
    and workers
batching_method: for "per_stream", use Mixture(…, unit="batch")
replication: use device_mesh=, or dp_rank= and dp_size=: ranks of one dp_rank get equal batches
epoch_size: use Mixture(…, length=…), or limit= for one dataset
nodesplitter workersplitter splitter split_by_node split_by_worker sharding_filter shard_options:
    leave it out: every rank gets its own part of each global batch
epoch start_epoch initial_epoch current_epoch: each pass is the next epoch; to choose
    an epoch, call set_epoch(epoch) or load_state_dict()
subset partition subset_fraction fraction dataset_fraction: use sample=0.1 for a tenth of the rows,
    split= for disjoint parts
validation_split val_split test_split train_size test_size: use split=("train", 0.99) in one loader,
    and split=("validation", 0.01) in another
filter filters filter_fn predicate query row_filter: use where=, a condition on columns such as
    where="lang == 'en' and score > 0.5"
handler on_error on_bad_sample error_policy ignore_errors ignore_corrupt skip_errors skip_corrupt
    ignore_decoding_errors: use on_bad="replace" (docs/formats.md#runs-over-damaged-data), which
    delivers other rows, for at most the share bad_max= of all rows
max_samples num_samples n_samples take max_examples: use limit=, a number of rows
storage_options client_kwargs s3_client_kwargs s3_client_config filesystem token use_auth_token:
    leave it out: endpoint and credentials (docs/operations.md#credentials) come from the
    environment
rank num_replicas shard_id shard_index device_id process_index: use dp_rank=; if left
    out, Topology.auto() finds the rank
world_size num_shards process_count shard_count: use dp_size=; if left out, Topology.auto()
    finds the number of ranks
drop_remainder drop_remainder_batch: use drop_last=True
epochs num_epochs repeat resampled infinite: each pass over the loader is one epoch: write a loop
    around it
transform map_fn operations pipelines preprocess decode_fn process_fn tokenizer: use
    map="package.module:function", which workers call on each block, or transforms= for images
collator data_collator batch_fn collation_fn batch_transform: use collate="package.module:function",
    which workers call on each batch
remote local data_files input_dir urls url path paths fname data_source data_dir file_pattern: pass
    a url, folder or glob, or a list of them, as the first argument
streaming cache_dir local_cache download: leave it out: shards are read where they are
select features fields schema_fields usecols: use columns=
pad_token_id padding_value pad_id padding_token_id: use pad_value=
categorical categorical_columns cat_cols category_columns vocab vocabulary: use codes=
max_len max_seq_len max_seq_length seq_len sequence_length truncation: use max_length=
packing pack_sequences sequence_packing packed pack_to_max_length: use pack=Pack("tokens",
    length=4096)
max_tokens batch_tokens token_budget batch_max_tokens max_batch_tokens group_by_length
    length_bucketing bucketing bucket_boundaries bucket_by_sequence_length num_buckets: use
    batch_size=None, pack=Pack("tokens", 16384, policy="pad")
batch_format return_type output_format as_dict: leave it out: a batch is a dict of tensors and
    lists, by column
"""
"""The arguments of other loaders, and what to use here: a paragraph for each row of
docs/migrate/names.md, which docs/build.py makes of it.
"""


def order_of(given: Arguments, dp_size: int, *, pads: bool) -> JobSpec:
    """Convert the arguments about the order to a job's spec, which has no other options yet. `pads`
    means that samples are padded batches.

    Raises:  ConfigError: an argument is invalid, or two contradict each other.
    """
    options = given.options
    return JobSpec(
        "",
        seed=whole_from("seed", options["seed"], 0, _SEED_MAX),
        shuffle=bool(given.shuffle),
        lanes=_count_or_zero("lanes", options["lanes"]),
        window=_count_or_zero("window", options["window"]),
        global_batch=_global_batch(given, dp_size, pads=pads),
        end=_end(given),
    )


def _global_batch(given: Arguments, dp_size: int, *, pads: bool) -> int:
    whole = given.options["global_batch_size"]
    if pads and (given.batch_size is not None or whole is not None):
        name = "batch_size" if whole is None else "global_batch_size"
        raise ConfigError(
            f"{name}={given.batch_size if whole is None else whole!r:.80} with"
            ' Pack(…, policy="pad"): each sample is already a padded batch, with as many rows as'
            " its length allows. Pass batch_size=None",
            field=name,
        )
    if pads:
        return dp_size
    if whole is None and given.batch_size is None:
        raise ConfigError(
            "batch_size=None: only the samples of"
            ' pack=Pack("tokens", 16384, policy="pad") are batches already. Pass the samples of a'
            " rank's batch",
            field="batch_size",
        )
    if whole is None:
        return whole_from("batch_size", given.batch_size, 1, _COUNT_MAX) * dp_size
    if given.batch_size != 1:
        raise ConfigError(
            f"batch_size={given.batch_size} (per rank) conflicts with global_batch_size={whole} "
            "(over all ranks): pass one of them",
            field="global_batch_size",
        )
    return whole_from("global_batch_size", whole, 1, _COUNT_MAX)


def _end(given: Arguments) -> End:
    end = given.options["end"]
    if end is None:
        return End.DROP if given.drop_last else End.RAGGED
    chosen = one_of("end", end, End)
    if given.drop_last and chosen is not End.DROP:
        raise ConfigError(
            f"drop_last=True conflicts with end={end!r}: pass one of them", field="end"
        )
    return chosen


def _count_or_zero(name: str, value: int | None) -> int:
    return 0 if value is None else whole_from(name, value, 1, _COUNT_MAX)


def epoch_of(given: object) -> int:
    """Check the epoch that `set_epoch` was given.

    Raises:  ConfigError: `given` is not an epoch number.
    """
    return whole_from("epoch", given, 0, PLACE_MAX - 1)
