"""`dataplane doctor`: checks the machine, makes a short run, and finds what limits it."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import structs

from dataplane.base.machine import this_machine
from dataplane.commands import output
from dataplane.commands.options import (
    NODE_SETTINGS,
    SECURITY_SETTINGS,
    Settings,
    format_option,
    interruptible,
    json_option,
    setting_options,
    workers_option,
)
from dataplane.commands.own_node import own_session, request_of, warn_of
from dataplane.commands.traced import asked_coordinator
from dataplane.model.config import JobSpec
from dataplane.model.records import ListPolicy
from dataplane.settings import node_config

if TYPE_CHECKING:
    from dataplane.client.statistics import Bound, FirstBatch
    from dataplane.commands.doctor_checks import Check
    from dataplane.commands.doctor_run import Trial, TrialLength
    from dataplane.plan.manifest import Manifest
    from dataplane.rpc.messages import OpenJob


_POSITIVE = click.IntRange(min=1)
_INDEXED_AGAIN_S = 10.0
"""A dataset that takes longer to index is not indexed a second time."""


@dataclasses.dataclass(frozen=True, slots=True)
class DoctorJob:
    """The job to try, with the arguments of a DataLoader."""

    batch_size: int
    shuffle: bool
    seed: int
    lanes: int | None
    window: int | None
    columns: str | None
    lists: str
    transform: tuple[str, ...]
    stack: tuple[str, ...]


@click.command("doctor")
@click.argument("urls", nargs=-1, metavar="URL...")
@click.option("--security", "only_security", is_flag=True, help="Check the settings of a service.")
@click.option(
    "--batch-size",
    type=_POSITIVE,
    default=32,
    show_default=True,
    help="Samples in a batch of the rank.",
)
@click.option("--shuffle/--no-shuffle", default=True, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--lanes", type=_POSITIVE, help="Default: from the dataset's blocks.")
@click.option("--window", type=_POSITIVE, help="Samples; default: from the dataset's blocks.")
@click.option("--columns", metavar="A,B,…", help="Only these columns.  [default: all]")
@click.option(
    "--lists",
    type=click.Choice([one.value for one in ListPolicy]),
    default=ListPolicy.PADDED.value,
    show_default=True,
)
@click.option(
    "--transform",
    multiple=True,
    metavar="COLUMN=STEPS",
    help="Transforms of an image column:  "
    "\"jpg=RandomResizedCrop(224), ToLayout('CHW')\". May be repeated.",
)
@click.option(
    "--stack",
    multiple=True,
    metavar="NAME=A,B,…[:DTYPE]",
    help='Columns joined into one tensor: "x=age,price:float32". May be repeated.',
)
@click.option(
    "--step-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Duration of a training step; with 0, take batches without a pause.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=8.0,
    show_default=True,
    help="Duration of the run.",
)
@click.option("--steps", type=_POSITIVE, help="Stop after this many batches.")
@format_option
@workers_option
@setting_options(
    "listen", "join", "metrics_listen", "state_dir", *SECURITY_SETTINGS, *NODE_SETTINGS
)  # fmt: skip
@json_option
@interruptible
def doctor(
    urls: tuple[str, ...],
    *,
    settings: Settings,
    format_name: str,
    workers: int,
    as_json: bool,
    step_ms: float,
    seconds: float,
    steps: int | None,
    only_security: bool,
    **asked: Any,
) -> int:
    """Find what limits a run of this dataset on this machine, and which setting would help.

    The command checks the machine, and reads a little from the storage. Then it runs one rank of
    the job with its own node for some seconds. Instead of a training step, the rank waits --step-ms
    for each batch. The result shows how much of the time storage, decoding, assembly and the
    trainer took.

    The result also divides the time until the first batch of a new loader: the node's start, the
    dataset's index, storage and so on.

    With --join and no URL, the command watches a running service for --seconds. It shows which
    ranks wait, for which stage, and which nodes and stores do not answer. The exit status is 1 if
    something is wrong.

    With --security, the command only checks the settings of a service: who can connect, with which
    token or certificate, and when these expire. Pass the same options as to `dataplane serve`. The
    exit status is 1 if something is wrong.

    In JSON, the keys are checks, bound (null if the run was too short), advice, first_batch, and
    statistics (the values of `DataLoader.statistics()`).

    \b
    Examples:
      dataplane doctor s3://bucket/train/ --batch-size 256 --step-ms 180
      dataplane doctor /data/photos/ --batch-size 64 --transform "jpg=RandomResizedCrop(224)"
      dataplane doctor /data/train/ --worker-count 4 --json
      dataplane doctor --join head-node:7077
      dataplane doctor --security --listen 10.0.0.1:7077
    """
    if only_security:
        from dataplane.commands import doctor_security

        return _report(doctor_security.checks(settings), "security", as_json=as_json)
    if not urls:
        return _check_service(settings, seconds, as_json=as_json)
    from dataplane.commands.doctor_run import TrialLength

    length = TrialLength(seconds, steps)
    _examine(
        urls, settings, format_name, workers, DoctorJob(**asked), step_ms, length, as_json=as_json
    )
    return output.EXIT_OK


def _examine(
    urls: tuple[str, ...],
    settings: Settings,
    format_name: str,
    workers: int,
    job: DoctorJob,
    step_ms: float,
    length: TrialLength,
    *,
    as_json: bool,
) -> None:
    """Run the checks and the trial, and print the results."""
    from dataplane.commands import doctor_checks, doctor_run

    request = _request(urls, format_name, job)  # invalid options fail before anything is read
    config = node_config(settings)
    at, found, indexing_s = _looked_at(urls, format_name, workers, config, job, request)
    if not as_json:
        output.write_table(("check", "found", "advice"), doctor_checks.lines(found), "machine")
        output.stdout().print()
    with _empty_cache(config.cache_dir, indexing_s) as empty:
        done = _tried(request, settings, empty, step_ms / 1e3, length)
    from dataplane.client.statistics import bound_of

    first = done.found.first_batch
    if not empty:  # a new loader needs at least as long for the index
        first = structs.replace(first, index_s=max(first.index_s, indexing_s))
    bound = bound_of(done.found)
    told = doctor_run.advice(bound, done.found, at) if bound else []
    if as_json:
        output.write_json(_as_json(found, done, bound, told, first))
        return
    _show(done, bound, first)
    if bound is None:
        output.warn("the run was too short to find its limit: use more --seconds")
        return
    output.stdout().print(doctor_run.verdict(bound, done.found), soft_wrap=True)
    output.stdout().print("What would help:", style="bold")
    for one in told:
        output.stdout().print(f"  - {one}", soft_wrap=True, markup=False)
    if done.is_short:
        output.warn("the run saw only the first batches: use more --seconds")


def _check_service(settings: Settings, seconds: float, *, as_json: bool) -> int:
    from dataplane.commands import doctor_checks

    address = str(settings["join"].value)
    if not address:
        raise click.UsageError("Missing argument 'URL...', or --join for a running service.")
    checks = asked_coordinator(
        settings,
        lambda client: doctor_checks.service_checks(client, seconds),
        address=address,
    )
    return _report(checks, f"service at {address}", as_json=as_json)


def _report(checks: Sequence[Check], title: str, *, as_json: bool) -> int:
    from dataplane.commands import doctor_checks

    if as_json:
        output.write_json({"checks": [dataclasses.asdict(check) for check in checks]})
    else:
        output.write_table(("check", "found", "advice"), doctor_checks.lines(checks), title)
    is_wrong = any(check.advice and not check.may_stay for check in checks)
    return output.EXIT_BAD_DATA if is_wrong else output.EXIT_OK


def _request(urls: tuple[str, ...], format_name: str, job: DoctorJob) -> OpenJob:
    """Build the request for the job to try.

    Raises:  ConfigError: invalid transforms.
    """
    from dataplane.commands.doctor_run import stacks_of, transforms_of
    from dataplane.transforms.images import image_specs
    from dataplane.transforms.options import column_options

    return request_of(
        urls,
        format_name,
        JobSpec(
            "",
            job.seed,
            job.shuffle,
            job.lanes or 0,
            job.window or 0,
            job.batch_size,
            transforms=image_specs(transforms_of(job.transform)),
            column_options=column_options(
                columns=job.columns.split(",") if job.columns else None,
                lists=job.lists,
                stack=stacks_of(job.stack),
            ),
        ),
    )


def _looked_at(
    urls: tuple[str, ...],
    format_name: str,
    workers: int,
    config: Any,
    job: DoctorJob,
    request: OpenJob,
) -> tuple[Any, list[Any], float]:
    """Return the facts for the advice, the checks, and how long indexing the dataset took."""
    from dataplane.commands import doctor_checks, doctor_run
    from dataplane.commands.datasets import opened
    from dataplane.commands.doctor_checks import disk
    from dataplane.plan.defaults import BlockSizes, shuffle_of

    began = time.monotonic()
    manifest = opened(urls, format_name, workers, config)
    indexing_s = time.monotonic() - began
    probe = doctor_checks.probe(manifest, config.fetch_count)
    checks = [*doctor_checks.environment(config, manifest), *disk(config)]
    checks.append(doctor_checks.storage(probe))
    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    shuffle = shuffle_of(sizes, job.lanes, job.window)
    at = doctor_run.TrialSetup(
        config,
        this_machine().cpu_count,
        probe,
        shuffle.lanes * sizes.open_window_bytes(shuffle.window),
        dataset_bytes=_decoded_bytes(manifest, request),
        block_count=manifest.block_count,
        has_images=bool(job.transform),
        has_all_columns=job.columns is None,
        can_skip_columns=manifest.column_places is not None,
        is_shuffled=job.shuffle,
        is_compressed=not manifest.shards.zero_copy.all(),
    )
    return at, checks, indexing_s


@contextlib.contextmanager
def _empty_cache(cache_dir: str, indexing_s: float) -> Iterator[str]:
    """Yield a new cache folder without the index that this command has just made, so that the node
    of the trial indexes again while it starts, like the node of a new loader on a new host. Yields
    "" if indexing takes long, or if no folder can be made.
    """
    made = None
    if cache_dir and indexing_s < _INDEXED_AGAIN_S:
        with contextlib.suppress(OSError):
            made = tempfile.TemporaryDirectory(
                prefix="doctor-", dir=cache_dir, ignore_cleanup_errors=True
            )
    if made is None:
        yield ""
        return
    with made as empty:
        yield empty


def _decoded_bytes(manifest: Manifest, request: OpenJob) -> int:
    """Estimate the bytes of all batches of one epoch, including pixels."""
    stored = int(manifest.block_decoded.clip(manifest.block_length).sum())
    pixels = sum(image.height * image.width * 3 for image in request.spec.transforms)
    return stored + manifest.sample_count * pixels


def _tried(
    request: OpenJob, settings: Settings, cache_dir: str, step_s: float, length: Any
) -> Trial:
    """Run the job, with a progress bar."""
    from dataplane.client.statistics import Statistics
    from dataplane.commands import doctor_run

    session = own_session(request, settings, cache_dir)
    try:
        warn_of(session)
        with output.progress() as bar:
            task = bar.add_task("running", total=1.0, note="")

            def show(done: float, so_far: Statistics) -> None:
                bar.update(task, completed=done, note=f"{so_far.samples_per_s:,.0f} samples/s")

            return doctor_run.run_trial(session, step_s, length, show)
    finally:
        session.close()


def _show(done: Trial, bound: Bound | None, first: FirstBatch) -> None:
    from dataplane.commands import doctor_run

    found = done.found
    rows: list[tuple[str, str, str]] = [
        ("samples/s", f"{found.samples_per_s:,.0f}", f"{done.steps:,} steps in all"),
        *doctor_run.first_batch_rows(first),
    ]
    if bound is not None:
        elapsed_s = found.elapsed_s
        rows += [
            ("trainer waited", f"{bound.waited_share:.0%}", "of its time, divided into"),
            *(
                (f"  {name}", f"{seconds / elapsed_s:.0%}", meaning)
                for name, seconds, meaning in (
                    ("fetch", found.fetch_wait_s, "for blocks from storage"),
                    ("decode", found.decode_wait_s, "for blocks to be decoded"),
                    ("room", found.room_wait_s, "for a free slot"),
                    ("queue", found.queue_wait_s, "for a free worker"),
                    ("assemble", found.assemble_wait_s, "for batches to be made"),
                    ("other", found.other_wait_s, "planning and messages"),
                )
            ),
            *((f"{stage.value} busy", f"{share:.0%}", "") for stage, share in bound.busy),
        ]
    output.write_table(("run", "", ""), rows)
    output.stdout().print()
    output.stdout().print(doctor_run.first_batch_advice(first), soft_wrap=True, markup=False)


def _as_json(
    checks: list[Any], done: Trial, bound: Bound | None, told: list[str], first: FirstBatch
) -> dict[str, object]:
    from dataplane.commands import doctor_run

    return {
        "checks": [dataclasses.asdict(check) for check in checks],
        "bound": None
        if bound is None
        else {
            "stage": bound.stage.value,
            "samples_per_s": bound.samples_per_s,
            "samples_per_s_without": bound.samples_per_s_without,
            "waited_share": bound.waited_share,
            "busy": {stage.value: share for stage, share in bound.busy},
        },
        "advice": told,
        "first_batch": {
            "total_s": first.total_s,
            "stages_s": first.stages(),
            "advice": doctor_run.first_batch_advice(first),
        },
        "first_batch_s": done.first_batch_s,
        "steps": done.steps,
        "statistics": msgspec.to_builtins(done.found),
    }
