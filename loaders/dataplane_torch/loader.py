"""DataLoader: torch's interface over any torch Dataset, and over the urls of shards.

Modules for only one of these are imported when a loader is opened. Modules for a job are imported
after its node was started, since a node takes longer to start than these imports.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from msgspec.structs import replace
from torch.utils.data import Dataset, Sampler
from typing_extensions import TypeVar, Unpack

from dataplane.base import collector
from dataplane.base.units import whole_from
from dataplane.model.errors import ConfigError
from dataplane.model.ledger import PLACE_MAX
from dataplane_torch.arguments import (
    listed,
    names_shards,
    passed_options,
    passed_to_torch,
    refuse_arguments,
    refuse_torch_arguments,
)
from dataplane_torch.options import DEFAULTS, Arguments, UrlOptions, brief, epoch_of, url_options
from dataplane_torch.stages import stages_of
from dataplane_torch.torch_private.iteration import LoaderBase, index_sampler

if TYPE_CHECKING:
    from dataplane.client.statistics import Statistics
    from dataplane.transforms.mixture_options import MixStep, Mixture, Urls
    from dataplane_torch.arguments import Before
    from dataplane_torch.device import Given, Target
    from dataplane_torch.local.beginning import PassPlace
    from dataplane_torch.local.local_pass import LocalPass
    from dataplane_torch.local.progress import PassState
    from dataplane_torch.local.worker_pass import WorkerPass
    from dataplane_torch.schema import Schema
    from dataplane_torch.shards import UrlJob

    Pass = LocalPass | WorkerPass

_T_co = TypeVar("_T_co", covariant=True, default=Any)


class DataLoader(LoaderBase[_T_co]):
    """Batches of a torch Dataset, or of the shards at urls, with an exact resume state.

    Over a Dataset, all arguments have the names, positions, defaults and meanings of
    torch.utils.data.DataLoader. With num_workers > 0, worker processes run the dataset, and write
    batches straight into memory that this process has mapped. The loader's state is exact after any
    step. With `snapshot_every_n_steps=n`, iterable datasets and samplers save their own states only
    about every n steps, and a resume repeats the steps after the last saved state.

    Over urls, a node reads and decodes shards and makes batches. The arguments over urls:

    Rows
      where: str                 a condition on columns: "lang == 'en' and score > 0.5"
      split: tuple               a part of the rows by their hash: ("train", 0.99)
      sample: float              a share of the rows
      limit: int                 a number of rows, the first ones
    Order and batches
      batch_size: int = 1        samples in a batch of a rank; None if each sample is a padded batch
      global_batch_size: int     samples of all ranks, instead of batch_size
      end: str = "ragged"        an incomplete last global batch: "ragged", "drop" or "pad"
      shuffle: bool = False      whether each epoch has a new random order
      seed: int = 0              the seed of all random numbers
      lanes, window: int         how far the shuffle reaches; from the dataset if left out
    Columns
      columns: list, dict        the columns of batches, in their order, or their types; or all
      dtype: dict                the types of numbers: {"tokens": "int64"}
      lists: str = "padded"      lists come "padded" or "ragged"
      pad_value: number, dict    fills padded lists; 0 if left out
      max_length: int, dict      cuts longer lists
      truncation_side: str = "right"  the side of lists that is cut, "right" or "left"
      fill_null: number, dict    replaces nulls
      nulls: str = "fill"        "mask" adds a column of bools for each that may have nulls
      codes: list                columns that come as integers; `categories()` has their values
      stack: dict                columns joined into one tensor: {"x": ["age", "price"]}
    Images
      transforms: dict           steps by column: {"jpg": [RandomResizedCrop(224), ToLayout("CHW")]}
      decode: str                JPEGs at a reduced size: "exact" never, "fast" always
      bad_images: str = "raise"  "replace" delivers another row for one that cannot be decoded
    Functions and packs
      map: function              makes columns of those of a block, in the node's workers
      resizes: bool = False      map may return another number of rows than it gets
      per_epoch: bool = False    map draws other random numbers in each epoch
      collate: function          makes arrays of those of a batch, in the node's workers
      pack: Pack                 samples of several rows of tokens
      balance: str               "cost" gives all ranks packs of about the same cost
    Place
      device_mesh, batch_axes    a DeviceMesh, and which of its axes batches differ along
      topology, dp_rank, dp_size    instead; otherwise `Topology.auto()` finds it
      columns_by_stage: dict     the columns of each pipeline stage: {0: ["tokens"], -1: ["labels"]}
      sequence_part: list        columns of which a context-parallel rank gets its part
      device: str                the device of the tensors, such as "cuda"; by default the CPU
    Job
      format: str                the shards' format; from their names if left out
      files: str                 the column of paths, if rows of tables name files to read
      on_bad: str = "raise"      "replace" delivers another row for one that cannot be read
      bad_max: float = 0.001     the share of an epoch's samples that may be replaced
      service: str               the coordinator's address; a node of this process if left out
      name: str                  the job's name; from the launch if left out
      sharing: str               equal jobs of one host with this name make each slab once
      timeout: float = 0         seconds to wait for a batch; 0 for the node's setting
      follow: bool = False       each epoch has the shards that are there at its begin
      dataset_moved: bool = False   accepts a state of the same dataset with other ETags
      stages: list               a schedule of recipes: [Stage(steps=9000, max_length=4096), …]
      replay_first_slab: bool = False   repeats the first batches: how fast is the trainer alone?

    Every pass is one epoch, and the next pass is the next epoch, even if the loop left the pass
    early. `state_dict()` is the state of the latest pass: batches that the loop has received count
    as consumed.

    Raises:  ValueError, TypeError, AssertionError: as torch's DataLoader.  ConfigError: arguments
    that cannot be combined, or a device that does not exist.  RuntimeError: a worker died, or
    `timeout` has passed.
    """

    _shards: UrlJob | None
    _target: Target | None
    _resume: PassState | None
    _latest: Callable[[], Pass | None] | None
    _place: PassPlace | None
    _begun: Pass | None
    _loaded_in: dict[str, int]

    @url_options
    def __init__(
        self,
        dataset: Dataset[Any] | Urls | Mixture,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int = 1,
        device: Given = None,
        **options: Unpack[UrlOptions],
    ) -> None:
        if snapshot_every_n_steps < 0:
            raise ValueError("snapshot_every_n_steps option should be non-negative")
        filled = cast("UrlOptions", {**DEFAULTS, **options})
        given = Arguments(dataset, batch_size, shuffle, drop_last, timeout, filled)
        self._target, self.device = _target_of(device), device
        self._open(given, {
            "sampler": sampler, "batch_sampler": batch_sampler, "num_workers": num_workers,
            "collate_fn": collate_fn, "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context, "generator": generator,
            "prefetch_factor": prefetch_factor, "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device, "in_order": in_order,
        }, pin_memory=pin_memory)  # fmt: skip
        self.snapshot_every_n_steps = snapshot_every_n_steps

    def __iter__(self) -> Any:
        """Begin one pass, and return its iterator of batches."""
        if self._shards is not None:
            with brief:
                return self._shards.begin()
        if self._begun is not None:
            begun, self._begun = self._begun, None
        elif (kept := cast("WorkerPass | None", self._kept_pass)) is not None and kept.is_ours:
            begun = kept  # reuse the pass with its persistent workers
            begun.begin_again(self)
        else:
            begun = self._new_pass()
        self._keep(begun)
        return begun

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, even if a resumed pass has fewer left.

        Raises:  TypeError: the dataset is iterable and has no length.
        """
        if self._shards is None:
            return super().__len__()
        with brief:
            return self._shards.step_count

    @property
    def valid_count(self) -> int | None:
        """The number of rows of the last batch that are not padding; None before the first batch,
        and over a Dataset.
        """
        return None if self._shards is None else self._shards.valid_count

    @property
    def epoch(self) -> int | None:
        """The epoch of the running pass or, if no pass is running, of the next pass; None over a
        Dataset.
        """
        return None if self._shards is None else self._shards.epoch

    @property
    def schema(self) -> Schema:
        """Return the columns of batches, with stored type, unit, time zone, dtype and shape,
        without reading a batch.

        Raises:  ConfigError: over a Dataset, whose samples are known only when they are made.
        """
        if self._shards is None:
            raise ConfigError(
                "only loaders over urls have a schema: look at a batch of a torch Dataset instead",
                field="dataset",
            )
        with brief:
            return self._shards.schema

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of a mixture's sources; `source_column` has indices into them."""
        return () if self._shards is None else self._shards.sources

    def set_weights(self, weights: Mapping[str, float]) -> MixStep:
        """Change the weights of a mixture's sources, for example to {"web": 0.3, "code": 0.7}. New
        weights apply from the next round on (a round has 1,024 samples of each lane). Return the
        first step of this round. Every rank must call the method after the same step, with the same
        weights. States contain the weights.

        Raises:  ConfigError: this loader is not over a Mixture, or the weights do not fit its
        sources.  SpecMismatch: another rank of the process group has set other weights.
        """
        if self._shards is None:
            raise ConfigError("only loaders over a Mixture have weights", field="set_weights")
        with brief:
            return self._shards.set_weights(weights)

    def skip(self, steps: int) -> int:
        """Skip the next steps of the running pass (or of the next pass), for example after a spike
        of the loss. Every rank must call the method after the same step, with the same number.
        Later states continue after the skipped steps. Return the number of skipped steps, which is
        smaller than `steps` at the end of the epoch. For a job of a service, use `dataplane skip`,
        which also applies after a resume from an earlier state.

        Raises:  ConfigError: `steps` is not a number of steps, or this loader is over a Dataset.
        """
        if self._shards is None:
            raise ConfigError("only loaders over urls can skip() steps", field="dataset")
        with brief:
            count = whole_from("steps", steps, 0, PLACE_MAX - 1, f"skip({steps!r:.80})")
            return self._shards.skip(count)

    def tombstone(self, *names: str) -> None:
        """Take rows ("part-17.parquet:4") or whole shards ("part-17.parquet") out of this run, from
        the present position on. In a mixture, write "SOURCE:part-17.parquet". Other rows replace
        the removed rows, as with `dataplane tombstone`. Later states contain the change. The
        running pass ends, and the next pass continues the epoch. Every rank must call the method
        after the same step, with the same names.

        Raises:  ConfigError: there is no such row or shard, none is left to replace it, the job is
        that of a service, or this loader is over a Dataset.
        """
        if self._shards is None:
            raise ConfigError("only loaders over urls have a tombstone()", field="dataset")
        for name in names:
            if not isinstance(name, str) or not name:
                raise ConfigError(
                    f"tombstone({name!r:.80}): give names of shards or rows, such as"
                    ' "part-17.parquet" or "part-17.parquet:4"',
                    field="tombstone",
                )
        with brief:
            self._shards.tombstone(names)

    def categories(self, column: str) -> tuple[Any, ...]:
        """Return the sorted values of a column in `codes`: code i stands for the i-th value. Every
        rank, and every run over the dataset, gets the same values. A null has the code -1, or the
        number in `fill_null`.

        Raises:  ConfigError: the column is not one of codes=[…], or this loader is over a Dataset.
        """
        if self._shards is None:
            raise ConfigError("only loaders over urls have categories()", field="dataset")
        with brief:
            return self._shards.categories(column)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. If you loaded a state of the same epoch, the pass
        still begins at the state's position. So a loop `for epoch in range(start, …)` can always
        call the method. A loader over a Dataset calls set_epoch() of dataset and samplers.

        Raises:  ConfigError: `epoch` is not an epoch.
        """
        epoch = epoch_of(epoch)
        if self._shards is not None:
            self._shards.set_epoch(epoch)
            return
        inner = self.batch_sampler
        if not hasattr(inner, "set_epoch"):
            inner = getattr(inner, "sampler", None)  # a BatchSampler of torch passes no epoch on
        samplers = (self.sampler,) if inner is self.sampler else (inner, self.sampler)
        for part in (*samplers, self.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def statistics(self) -> Statistics:
        """Return what the loader has done so far, and why the trainer waited. For a part of the
        run, call the method twice and compute `later.since(earlier)`.

        Raises:  ConfigError: over a Dataset, whose workers do not measure this.
        """
        if self._shards is None:
            raise ConfigError("only loaders over urls have statistics()", field="dataset")
        return self._shards.statistics()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this run. All batches that the loop has received count as consumed.
        The state has only plain values, which JSON can store, except states of your own Dataset or
        sampler. Over urls, the state is the same on every rank.
        """
        if self._shards is not None:
            with brief:
                return self._shards.state_dict()
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            self._place = latest.place
        elif self._place is None:
            # No pass has begun: begin a pass now, which the next iter() returns.
            self._begun = latest = self._new_pass()
            self._keep(latest)
            self._place = latest.place
        return self._place.state().to_dict()

    def ledger(self) -> str:
        """Return the ledger of this run, as JSON lines. Save the ledger beside the checkpoints.
        With the ledger, `dataplane trace`, `where` and `replay` find the rows of any step.

        Raises:  ConfigError: over a Dataset, whose samples have no names.
        """
        if self._shards is None:
            raise ConfigError("only loaders over urls have a ledger()", field="dataset")
        with brief:
            return self._shards.ledger()

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        change: str | None = None,
        before: Before = None,
    ) -> str:
        """Begin the next pass at the position of a state: over urls on any number of ranks, over a
        map-style Dataset with any number of workers. An empty state means the start of the run.

        Over urls, pass `change` to continue with other arguments or shards than those of the state.
        "restart" begins a new epoch with all samples. "unread" begins an epoch with the samples
        that the interrupted epoch did not deliver, and samples of new shards. "finish" first reads
        the rest of the interrupted epoch with the old arguments. For "unread" and "finish", the
        loader needs the old list of shards. If the new list does not begin with the old list, pass
        the old urls or their manifest as `before` (for a mixture, a dict by source). Every rank
        must pass the same arguments. Return a sentence that says what has changed. If nothing has
        changed, the sentence is "", and `change` has no effect.

        Raises:  SpecMismatch: the state is of another job.  VersionMismatch: a newer version saved
        the state.  ConfigError: `state_dict` is not a state, or batch size, length or workers have
        changed.
        """
        with brief:
            if self._shards is not None:
                return self._shards.load_state_dict(state_dict, change, before)
            if change is not None:
                raise ConfigError(
                    f"change={change!r:.80} is for loaders over urls: a torch Dataset has no "
                    "recipe that dataplane knows",
                    field="change",
                )
            self._load_place(state_dict)
            return ""

    def _load_place(self, state_dict: Mapping[str, Any]) -> None:
        from dataplane_torch.local.beginning import PassPlace
        from dataplane_torch.local.progress import PassState
        from dataplane_torch.local.sampling import epochs_of

        resume = None if state_dict == {} else PassState.from_dict(state_dict)
        if resume is not None:
            resume.check(PassPlace(self, self.num_workers).state())
        self._forget()
        self._resume = resume
        self._loaded_in = epochs_of(index_sampler(self))

    def close(self) -> None:
        """Leave the job and end the workers. Existing tensors stay valid. May be called twice."""
        if self._shards is not None:
            self._shards.close()
        else:
            self._forget()

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Refuse Accelerate over urls, and warn over a Dataset: Accelerate reads this attribute
        before it builds a torch loader from this loader.

        Raises:  ConfigError: over urls, which torch's loader cannot read.
        """
        advice = (
            "accelerator.prepare() makes torch's DataLoader of this one: call "
            "dataplane_torch.accelerate.prepare(accelerator, loader) to keep dataplane's"
        )
        if self._shards is not None:
            raise ConfigError(advice, field="dataset")
        warnings.warn(advice, stacklevel=3)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the loader without its running pass; only over a Dataset.

        Raises:  ConfigError: over urls, where the job belongs to this process.
        """
        if self._shards is not None:
            raise ConfigError(
                "a DataLoader over urls belongs to its process: make one in each", field="dataset"
            )
        return {**super().__getstate__(), "_latest": None, "_place": None, "_begun": None}

    def _open(self, given: Arguments, of_torch: dict[str, Any], *, pin_memory: bool) -> None:
        self._shards = self._resume = self._latest = self._place = self._begun = None
        self._loaded_in = {}
        for_urls, for_torch = bool(passed_options(given)), bool(passed_to_torch(of_torch))
        # Only an iterator of samples must be listed: torch needs a length.
        is_samples = for_torch and not for_urls and not isinstance(given.urls, Iterator)
        is_samples |= isinstance(given.urls, Dataset)
        urls = given.urls if is_samples else listed(given.urls, for_urls=for_urls)
        is_urls = names_shards(urls, for_urls=for_urls, for_torch=for_torch)
        if is_urls or isinstance(given.urls, Iterator):
            given = replace(given, urls=urls)
        if is_urls:
            refuse_torch_arguments(of_torch)
            job = _open_job(given, self._target, pin_memory=pin_memory)
            self._shards, shards = job, cast("Dataset[Any]", job.dataset)
            batch_size = None if given.batch_size is None else job.batch_size
            super().__init__(shards, batch_size, drop_last=given.drop_last)
            # Give the sampler a set_epoch(), which frameworks call.
            cast("Any", self.sampler).set_epoch = job.set_epoch
            self.shuffle = bool(given.shuffle)
            self.pin_memory, self.timeout = pin_memory, given.timeout
            return
        _refuse_neither(given.urls)
        refuse_arguments(given)
        of_torch |= {
            "drop_last": given.drop_last,
            "pin_memory": pin_memory or self._target is not None,
            "timeout": given.timeout,
        }
        dataset = cast("Dataset[Any]", given.urls)
        super().__init__(dataset, given.batch_size, given.shuffle, **of_torch)
        if of_torch["sampler"] is None and of_torch["batch_sampler"] is None:
            from dataplane_torch.local.sampling import make_epoch_settable

            make_epoch_settable(self.sampler)

    def _new_pass(self) -> Pass:
        resume, self._resume = self._resume, None
        if self.num_workers:
            self.check_worker_number_rationality()
        return _new_pass(self, resume, self._loaded_in, self._target)

    def _keep(self, begun: Pass) -> None:
        """Keep the position of a pass, which outlives the pass. The pass itself is kept only if its
        workers persist; otherwise it ends with the loop that uses it.
        """
        self._place = begun.beginning.place
        self._latest = weakref.ref(begun)
        if self.num_workers:
            self._kept_pass = begun if self.persistent_workers else None

    def _forget(self) -> None:
        latest = self._latest() if self._latest is not None else None
        if latest is not None:
            latest.close()
        self._latest = self._place = self._begun = self._resume = None
        self._kept_pass = None


def _open_job(given: Arguments, target: Target | None, *, pin_memory: bool) -> UrlJob:
    """Return the job over urls. If this process has no node yet, start a node, which begins to open
    the dataset. The loader does not wait for the node before the first use.

    Raises:  as `stages_of`, and `JobToOpen.check_files`.
    """
    stages = stages_of(given)
    begun = stages[0].job.begin()
    try:
        for stage in stages:
            stage.job.check_files()
        with collector.resting():  # for the reason in dataplane_torch/__init__.py
            from dataplane_torch.pinning import cuda_pinning
            from dataplane_torch.shards import UrlJob

        return UrlJob(
            stages,
            begun,
            dataset_moved=given.options["dataset_moved"],
            follows=given.options["follow"],
            replays=given.options["replay_first_slab"],
            pinning=cuda_pinning(wanted=pin_memory),
            target=target,
        )
    except BaseException:
        if begun is not None:
            begun.close()
        raise


def _new_pass(
    loader: DataLoader[Any],
    resume: PassState | None,
    loaded_in: dict[str, int],
    target: Target | None,
) -> LocalPass | WorkerPass:
    """Begin a pass over a torch Dataset: in this process, or in workers."""
    if loader.num_workers == 0:
        from dataplane_torch.local.local_pass import LocalPass

        return LocalPass(loader, resume, loaded_in, target)
    from dataplane_torch.local.worker_pass import WorkerPass

    return WorkerPass(loader, resume, loaded_in, target)


def _target_of(device: Given) -> Target | None:
    """Return the device for batches; None for host memory.

    Raises:  ConfigError: there is no such device.
    """
    if device is None:
        return None
    from dataplane_torch.device import find_target

    return find_target(device)


def _refuse_neither(dataset: object) -> None:
    """Refuse other objects.   Raises:  ConfigError: `dataset` is no torch Dataset and no url."""
    needs = ("__getitem__", "__getitems__", "__iter__")
    if not any(hasattr(dataset, need) for need in needs):
        raise ConfigError(
            f"{dataset!r:.80} is neither a torch Dataset nor a url: pass something with "
            "__getitem__ and __len__, an IterableDataset, or the urls of shards",
            field="dataset",
        )
