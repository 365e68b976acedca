"""The job that `trace`, `where` and `replay` describe: given by urls, by a saved ledger, or by a
job's name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec import structs

from dataplane.base import suffixes
from dataplane.commands.options import (
    CLIENT_SETTINGS,
    Settings,
    format_option,
    json_option,
    security_given,
    setting_options,
    view_options,
    workers_option,
)
from dataplane.model.changes import resizes
from dataplane.model.config import JobSpec, Stage
from dataplane.model.errors import ConfigError, DatasetChangedError, PeerLost
from dataplane.model.ledger import MARK, PLACE_MAX, Ledger, SourceUrls
from dataplane.model.records import End, View
from dataplane.model.redact import redacted
from dataplane.settings import node_config
from dataplane.store.urls import exists

if TYPE_CHECKING:
    from dataplane.model.changes import EpochSteps
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import TracedOrder
    from dataplane.plan.windows import Int64
    from dataplane.rpc.calls import CoordinatorClient


# -- targets -----------------------------------------------------------------------------------
#
# Recognize the kind of target on a command line: a ledger, urls of a dataset, or a job.


def is_a_ledger(target: Sequence[str]) -> bool:
    """Return whether the target is one file that begins like a ledger.

    Raises:  ConfigError: the name looks like a file's path, but the file does not exist.
    """
    if len(target) != 1:
        return False
    _expect_file(target[0])
    if not os.path.isfile(target[0]):  # noqa: PTH113 - Path.is_file() raises if it is too long
        return False
    with Path(target[0]).open("rb") as file:
        return file.read(len(MARK)) == MARK


def _expect_file(name: str) -> None:
    """Refuse names that look like a missing file.

    Raises:  ConfigError: the name looks like a file's path, but the file does not exist.
    """
    is_one = "://" not in name and not any(mark in name for mark in "*?{")
    is_path = name.startswith(("/", "./", "../")) or suffixes.suffix_of(name)
    if is_one and is_path and not exists(name):
        raise ConfigError(
            f"there is no file {name}: check the path; `dataplane ledger export JOB` writes the"
            " ledger of a job, and loader.ledger() that of a run without a service"
        )


def names_urls(target: Sequence[str]) -> bool:
    """Return whether these are urls or paths, and not the name of a job."""
    return any(
        any(mark in text for mark in "/*?{") or exists(text) or bool(suffixes.suffix_of(text))
        for text in target
    )


_Answer = TypeVar("_Answer")
POSITIVE = click.IntRange(min=1)
COUNT = click.IntRange(min=0, max=PLACE_MAX - 1)
DIGITS_MAX = 18
_EPOCHS_MAX = 10_000
_OF_URLS = ("global_batch", "seed", "shuffle", "lanes", "window", "end")


@dataclasses.dataclass(frozen=True, slots=True)
class TracedSource:
    """One dataset of a job, and the view of it that the job reads. `name` is "" without a mixture.
    If samples are packs, `rows` is the manifest of their rows.
    """

    name: str
    manifest: Manifest
    view: View
    rows: Manifest | None = None

    @property
    def of_rows(self) -> Manifest:
        """The manifest of the rows of the view."""
        return self.manifest if self.rows is None else self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A job and its datasets. `reached` is the epoch and the cursor that its run has reached; None
    if there is no run.
    """

    sources: tuple[TracedSource, ...]
    spec: JobSpec
    dp_size: int
    reached: tuple[int, int] | None
    ledger: Ledger | None = None
    at_stage: Callable[[Traced, int], Traced] | None = None

    def at(self, epoch: int) -> Traced:
        """Return the job as it was in an epoch: with the recipe and datasets of its stage.

        Raises:  ConfigError: the datasets of a former stage, or its batches, are unknown.
        """
        return self if self.at_stage is None else self.at_stage(self, epoch)

    def steps_made(self, epoch: int) -> int:
        """Return how many steps of an epoch the run makes; if the recipe was changed within the
        epoch, only the steps before the change.
        """
        job = self.at(epoch)
        for stage in self.spec.stages:
            if stage.epoch == epoch and stage.cursor:
                return -(-stage.cursor // job.spec.global_batch)
        return job.step_count(epoch)

    @property
    def is_packed(self) -> bool:
        """Whether samples are packs."""
        return any(source.rows is not None for source in self.sources)

    def order(self, epoch: int) -> TracedOrder:
        """Return the order of an epoch."""
        from dataplane.plan.orders import job_order

        return job_order(self.spec, [source.manifest for source in self.sources], epoch)

    def steps(self, order: TracedOrder, epoch: int, cursor: int = 0) -> EpochSteps:
        """Return the steps of an epoch with this order, including skipped steps."""
        from dataplane.model.changes import EpochSteps

        mix = None if self.spec.mixture is None else self.spec.mixture.history
        return EpochSteps.of(
            self.spec, order.sample_count, epoch, cursor=cursor, dp_size=self.dp_size, mix=mix
        )

    @property
    def first_blocks(self) -> Int64:
        """The number of each source's first block in the order, which numbers the blocks of all
        sources consecutively.

        Shapes:  result: int64[sources + 1].
        """
        from dataplane.plan.shards import starts_of

        return starts_of([source.manifest.block_count for source in self.sources])

    def place_of(self, source: int, shard: int) -> dict[str, str]:
        """Return the url of a shard, without its secrets, and the name of its source if the job
        mixes several.
        """
        of = self.sources[source]
        named = {"source": of.name} if of.name else {}
        return {**named, "shard": redacted(of.manifest.shards.urls[shard])}

    def step_count(self, epoch: int) -> int:
        """Return how many steps an epoch has, including skipped steps."""
        return self.steps(self.order(epoch), epoch).count

    @property
    def epoch(self) -> int:
        """The epoch that is used if the command line names none."""
        return 0 if self.reached is None else self.reached[0]


def step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name a step. The command is called with `which`, made of them."""

    @functools.wraps(command)
    def named(*, step: int | None, epoch: int | None, global_step: int | None, **given: Any) -> Any:
        if (step is None) == (global_step is None) or (global_step is not None and epoch):
            raise ConfigError(
                "give --step N (a step of the epoch of --epoch) or --global-step N (counted over"
                " epochs, without --epoch), not both",
                field="step",
            )
        return command(which=StepAsked(step, epoch, global_step), **given)

    made: Callable[..., Any] = named
    for flag, text in (
        ("--epoch", "The epoch. Default: the job's present epoch; 0 for URLs."),
        ("--global-step", "Instead of --step: the step, counted from 0 over all epochs."),
        ("--step", "The step, counted from 0 within its epoch."),
    ):
        made = click.option(flag, type=COUNT, help=text)(made)
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class StepAsked:
    """A step as the command line names it: in an epoch, or counted over all epochs."""

    step: int | None
    epoch: int | None
    global_step: int | None

    def of(self, job: Traced) -> tuple[int, int]:
        """Return the epoch, and the step in it.

        Raises:  ConfigError: the step is too far away to be found.
        """
        if self.step is not None:
            return job.epoch if self.epoch is None else self.epoch, self.step
        assert self.global_step is not None
        left = self.global_step
        if job.spec.mixture is None and not job.spec.stages:
            return divmod(left, max(1, job.step_count(0)))
        for epoch in range(_EPOCHS_MAX):  # epochs may differ in length
            count = job.steps_made(epoch)
            if left < count:
                return epoch, left
            left -= count
        raise ConfigError(
            f"--global-step {self.global_step} is not in the first {_EPOCHS_MAX:,} epochs: give "
            "--epoch and --step instead",
            field="global_step",
        )


def traced_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options that name a job. The command gets them as keyword
    arguments, which it passes to `traced` as one mapping.
    """
    options = (
        click.argument("target", nargs=-1, required=True, metavar="URL...|LEDGER|JOB"),
        click.option("--data", "data", multiple=True, metavar="URL",
                     help="Where the dataset of a ledger or job is now: a URL or manifest; "
                     "NAME=URL for a source of a mixture."),
        click.option("--dataset-moved", is_flag=True,
                     help="Accept a dataset whose ETags differ from those of the job."),
        click.option("--dp-size", type=POSITIVE, help="Data-parallel ranks. Default: the job's."),
        click.option("--cursor", type=COUNT, default=0,
                     help="Position of step 0; needed if an epoch has several batch sizes."),
        click.option("--global-batch", type=POSITIVE, help="With URL: samples of a step."),
        click.option("--seed", type=COUNT, help="With URL; default: 0."),
        click.option("--shuffle/--no-shuffle", default=None, help="With URL; default: shuffled."),
        click.option("--lanes", type=POSITIVE, help="With URL; default: from the dataset."),
        click.option("--window", type=POSITIVE, help="With URL; default: from the dataset."),
        click.option("--end", type=click.Choice([end.value for end in End]),
                     help="With URL; default: ragged."),
        format_option,
        view_options,
        workers_option,
        setting_options("cache_dir", *CLIENT_SETTINGS, "allowed_functions"),
        json_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def traced(settings: Settings, options: Mapping[str, Any]) -> Traced:
    """Return the job that the command line names.

    Raises:  ConfigError: these arguments do not determine a job.  DatasetChangedError: the dataset
    is not the job's.  Errors of a call of the coordinator, and of opening a dataset.
    """
    target: tuple[str, ...] = options["target"]
    given = [name for name in _OF_URLS if options[name] is not None]
    given += ["where"] if options["view"] != View() else []
    if is_a_ledger(target):
        ledger = Ledger.from_lines(Path(target[0]).read_text(), target[0])
    elif names_urls(target):
        return _of_urls(settings, options)
    elif len(target) == 1:
        try:
            ledger = live_ledger(settings, target[0])
        except PeerLost as error:
            said = f"no file or folder is named {target[0]}, and to find a job of this name"
            raise PeerLost(f"{said}, a coordinator is needed: {error}", **error.nouns) from error
    else:
        raise ConfigError(f"{' '.join(target)}: give the urls of one dataset, a ledger, or a job")
    if ledger.spec.stages and "global_batch" in given:  # allowed, for former stages
        given.remove("global_batch")
    if given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for urls, and the ledger of a job"
            " already contains its value: leave the option out",
            job=target[0],
        )
    return of_ledger(settings, options, ledger)


def _of_urls(settings: Settings, options: Mapping[str, Any]) -> Traced:
    from dataplane.plan.defaults import BlockSizes, with_shuffle

    if options["global_batch"] is None:
        raise ConfigError(
            "--global-batch is needed for urls: the number of samples in a step, over all ranks",
            field="global_batch",
        )
    if options["data"]:
        raise ConfigError(
            "--data is for a ledger or a job, but the urls of the dataset were given: leave --data "
            "out"
        )
    view = options["view"]
    manifest = _opened(settings, options, options["target"], options["format_name"], view)
    spec = JobSpec(
        manifest.fingerprint,
        seed=options["seed"] or 0,
        shuffle=options["shuffle"] is not False,
        lanes=options["lanes"] or 0,
        window=options["window"] or 0,
        global_batch=options["global_batch"],
        end=End(options["end"] or End.RAGGED.value),
        view=view,
    )
    spec = with_shuffle(spec, BlockSizes.of(manifest.block_rows, manifest.block_decoded))
    source = TracedSource("", manifest, view)
    return Traced((source,), spec, options["dp_size"] or 1, None)


def of_ledger(settings: Settings, options: Mapping[str, Any], ledger: Ledger) -> Traced:
    """Return the job of this ledger.

    Raises:  as `traced`.
    """
    from dataplane.plan.views import rows_only

    mixture, whole = ledger.spec.mixture, []
    if mixture is None:
        urls = options["data"] or ledger.urls
        if not urls:
            raise ConfigError(
                f"the ledger of job {ledger.job_id!r} has no urls of its dataset: pass --data URL",
                job=ledger.job_id,
            )
        places = [SourceUrls("", tuple(urls), ledger.format)]
        known = [(ledger.spec.fingerprint, ledger.spec.view)]
    else:
        places = _places(ledger, options["data"])
        known = [(source.fingerprint, source.view) for source in mixture.sources]
    for place, (_, view) in zip(places, known, strict=True):
        form = options["format_name"] or place.format
        whole.append(_opened(settings, options, place.urls, form, rows_only(view)))
    fingerprints = [fingerprint for fingerprint, _ in known]
    if not resizes(ledger.spec):
        _check(whole, fingerprints, ledger, options)
    sources = [
        _source(settings, ledger.spec, place.name, manifest, view)
        for place, manifest, (_, view) in zip(places, whole, known, strict=True)
    ]
    if resizes(ledger.spec):  # the map decides how many samples there are
        _check([source.manifest for source in sources], fingerprints, ledger, options)
    dp_size = options["dp_size"] or ledger.dp_size
    reached = ledger.epoch, ledger.cursor
    at_stage = _stages(settings, options) if ledger.spec.stages else None
    return Traced(tuple(sources), ledger.spec, dp_size, reached, ledger, at_stage)


def _stages(settings: Settings, options: Mapping[str, Any]) -> Callable[[Traced, int], Traced]:
    """Return the function that finds the stage of an epoch (`Traced.at`)."""
    from dataplane.commands.datasets import STORES
    from dataplane.commands.own_node import packs_in
    from dataplane.index.viewing import viewed
    from dataplane.plan.stages import SourceRead, former_job, sources_of, with_left
    from dataplane.plan.views import rows_only

    config = node_config(settings)

    def samples(whole: Manifest, view: View, seed: int) -> Manifest:
        rows = viewed(whole, rows_only(view), STORES.connect, config)
        return packs_in(rows, view, seed, config) if view.is_counted else rows

    @functools.cache
    def opened(urls: tuple[str, ...]) -> Manifest:
        return _opened(settings, options, urls, "", View())

    def at(job: Traced, epoch: int) -> Traced:
        spec, manifests = job.spec, [source.manifest for source in job.sources]
        before = [
            SourceRead(name, View(), opened(urls))
            for stage in reversed(spec.stages)
            for name, urls in (stage.before if epoch <= spec.first_epoch else ())
        ]
        while epoch < spec.first_epoch:
            ended = spec.stages[-1]
            before = [*before, *sources_of(spec, manifests)]
            spec, manifests = former_job(spec.stages, before, samples)
            job = _former(job, spec, ended, epoch, options["global_batch"])
        if epoch == spec.first_epoch:
            manifests = with_left(spec, manifests, samples, before)
        if manifests == [source.manifest for source in job.sources] and epoch > spec.first_epoch:
            return job
        read = tuple(
            TracedSource(
                source.name, source.manifest, source.view,
                None if source.view.pack is None
                else viewed(source.whole, rows_only(source.view), STORES.connect, config),
            )
            for source in sources_of(spec, manifests)
        )  # fmt: skip
        batch = job.spec.global_batch
        spec = structs.replace(spec, global_batch=batch)
        return dataclasses.replace(job, sources=read, spec=spec, at_stage=None)

    return functools.lru_cache(8)(at)


def _former(job: Traced, spec: JobSpec, ended: Stage, epoch: int, batch: int | None) -> Traced:
    """Return a job with the ledger of a former stage. The global batch is the one that the user
    gives, otherwise the one of the launch that read the epoch.

    Raises:  ConfigError: the global batch is unknown.
    """
    from dataplane.model.changes import number_of

    ledger = job.ledger
    assert ledger is not None
    starts = [entry for entry in ledger.entries if entry.kind == "start"]
    for entry in starts if batch is None else ():
        if entry.position.epoch <= epoch:
            batch = number_of(entry, "global_batch", 1)
    batch = batch or ended.global_batch
    if not batch:
        raise ConfigError(
            f"epoch {epoch} belongs to a former stage of job {ledger.job_id!r}, and its ledger does"
            " not say how many samples a step had then: pass --global-batch",
            field="global_batch",
        )
    spec = structs.replace(spec, global_batch=batch)
    ledger = structs.replace(ledger, spec=spec, dataset=ended.dataset)
    return dataclasses.replace(job, spec=spec, ledger=ledger)


def _source(
    settings: Settings, spec: JobSpec, name: str, rows: Manifest, view: View
) -> TracedSource:
    """Return a source, from the manifest of its view's rows."""
    if not view.is_counted:
        return TracedSource(name, rows, view)
    from dataplane.commands.own_node import packs_in

    samples = packs_in(rows, view, spec.seed, node_config(settings))
    return TracedSource(name, samples, view, None if view.pack is None else rows)


def _places(ledger: Ledger, given: Sequence[str]) -> list[SourceUrls]:
    """Return the urls of a mixture's sources, in its order.

    Raises:  ConfigError: the urls of a source are unknown, or a name is not a source's.
    """
    assert ledger.spec.mixture is not None
    names = [source.name for source in ledger.spec.mixture.sources]
    places = {place.name: place for place in ledger.sources}
    named: dict[str, list[str]] = {}
    for text in given:
        name, mark, url = text.partition("=")
        if not mark or name not in names:
            raise ConfigError(
                f"--data {text}: job {ledger.job_id!r} mixes {', '.join(names)}; give NAME=URL",
                job=ledger.job_id,
            )
        named.setdefault(name, []).append(url)
    for name, urls in named.items():
        form = places[name].format if name in places else ""
        places[name] = SourceUrls(name, tuple(urls), form)
    missing = [name for name in names if name not in places]
    if missing:
        raise ConfigError(
            f"job {ledger.job_id!r} mixes {', '.join(names)}, and its ledger contains no urls of"
            f" {', '.join(missing)}: pass --data {missing[0]}=URL, or the ledger that"
            " loader.ledger() returned",
            job=ledger.job_id,
        )
    return [places[name] for name in names]


def _check(
    manifests: Sequence[Manifest],
    fingerprints: Sequence[str],
    ledger: Ledger,
    options: Mapping[str, Any],
) -> None:
    """Check that these are the datasets of the job, possibly at other urls."""
    from dataplane.plan.views import identity_of_job

    known = ledger.dataset
    has_made = known is not None and resizes(ledger.spec)
    if [manifest.fingerprint for manifest in manifests] == list(fingerprints) and not has_made:
        return
    opened = identity_of_job(manifests, is_mixture=ledger.spec.mixture is not None)
    if known is not None and opened.content == known.content:
        return
    samples = sum(manifest.sample_count for manifest in manifests)
    is_alike = len(manifests) > 1 or samples == ledger.sample_count
    if is_alike and (known is None or opened.layout == known.layout):
        if options["dataset_moved"]:
            return
        advice = "pass --dataset-moved if you know that it was only copied"
        raise DatasetChangedError(
            f"the shards of job {ledger.job_id!r} have other ETags or another place now (local "
            f"files: other modification times), so they may have changed: {advice}"
        )
    if ledger.spec.mixture is not None:
        pairs = zip(ledger.spec.mixture.sources, manifests, strict=True)
        names = [
            source.name
            for source, manifest in pairs
            if source.view.resizes or source.fingerprint != manifest.fingerprint
        ]
        raise DatasetChangedError(
            f"these are not the datasets of job {ledger.job_id!r}: {', '.join(names)} may have "
            "other shards, sizes or blocks. Pass the url of the job's dataset with --data NAME=URL"
        )
    raise DatasetChangedError(
        f"this is not the dataset of job {ledger.job_id!r}: its shards, sizes or blocks differ, or "
        "what its map makes of them. Pass the url of the job's dataset with --data URL",
        expected=f"{ledger.sample_count:,} samples",
        found=f"{samples:,} samples",
    )


def _opened(
    settings: Settings,
    options: Mapping[str, Any],
    urls: Sequence[str],
    format_name: str,
    view: View,
) -> Manifest:
    from dataplane.commands.datasets import opened

    config = node_config(settings)
    return opened(urls, format_name, options["workers"], config, view, leaves_out=True)


def split_row(name: str) -> tuple[str, int]:
    """Split the name of a row into the name of its shard and its number.

    Raises:  ConfigError: the name is not SHARD:ROW.
    """
    shard, _, row = name.rpartition(":")
    if not shard or not row.isdecimal() or len(row) > DIGITS_MAX:
        raise ConfigError(f"--row {name}: give SHARD:ROW, such as 17:4 or part-17.parquet:4")
    return shard, int(row)


def live_ledger(settings: Settings, job: str, away_s: float = 0.0) -> Ledger:
    """Return the ledger of the job of this name, as `asked_coordinator` gets it.

    Raises:  ConfigError: no job has that name.  PeerLost, AccessDenied: as the call.
    """
    from dataplane.rpc.membership import LedgerRequest

    answer = asked_coordinator(settings, lambda client: client.ledger(LedgerRequest(job)), away_s)
    return Ledger(
        answer.job_id, answer.urls, answer.spec, answer.sample_count, answer.dp_size, answer.format,
        answer.epoch, answer.cursor, answer.identity, entries=answer.entries,
    )  # fmt: skip


def asked_coordinator(
    settings: Settings,
    call: Callable[[CoordinatorClient], Awaitable[_Answer]],
    away_s: float = 0,
    address: str | None = None,
) -> _Answer:
    """Call the coordinator at this address, or the one that the settings name, and return its
    answer. Repeat the call for `away_s` if it does not answer.

    Raises:  PeerLost, AccessDenied, or another error, as the call.
    """
    from dataplane.rpc.calls import CoordinatorClient

    async def asked() -> _Answer:
        peer = address or str(settings["join"].value or settings["listen"].value)
        client = CoordinatorClient(peer, security_given(settings, listens=False), patience_s=away_s)
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(asked())
