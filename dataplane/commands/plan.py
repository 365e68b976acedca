"""`dataplane plan`: the cost of an epoch for a cluster, what each host reads, and how well the
epoch is shuffled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dataplane.commands import output
from dataplane.commands.options import (
    PacksAsked,
    Settings,
    format_option,
    interruptible,
    json_option,
    pack_options,
    setting_options,
    view_options,
    workers_option,
)
from dataplane.commands.plan_mixture import (
    AskedMixture,
    Question,
    mixture_options,
    show_host_counts,
    show_mixture,
)
from dataplane.commands.plan_stages import show_ledger, show_state
from dataplane.commands.traced import is_a_ledger
from dataplane.model.config import JobSpec, NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.model.records import End, View
from dataplane.settings import node_config
from dataplane.store.urls import exists

if TYPE_CHECKING:
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.explain import Explanation
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import SampleOrder

HOSTS_SHOWN = 8
_RAMP_SHOWN = 4
POSITIVE = click.IntRange(min=1)


@click.command("plan")
@click.argument("urls", nargs=-1, metavar="[URL...]")
@mixture_options
@click.option(
    "--dp-size", type=POSITIVE, default=1, show_default=True, help="Number of data-parallel ranks."
)
@click.option(
    "--ranks-per-host",
    type=POSITIVE,
    default=8,
    show_default=True,
    help="Ranks on each host; the table for 1 to 1,024 hosts also uses this number.",
)
@click.option(
    "--global-batch", type=POSITIVE, help="Samples of a step, over all ranks; needed for URLs."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--shuffle/--no-shuffle", default=True, show_default=True)
@click.option("--lanes", type=POSITIVE, help="Default: from the dataset's blocks.")
@click.option("--window", type=POSITIVE, help="Samples; default: from the dataset's blocks.")
@click.option(
    "--end",
    type=click.Choice([one.value for one in End]),
    default=End.RAGGED.value,
    show_default=True,
    help="What happens to samples that do not fill the last global batch.",
)
@pack_options
@format_option
@view_options
@workers_option
@setting_options("cache_dir", "block_arena_bytes")
@json_option
@interruptible
def plan(
    urls: tuple[str, ...],
    *,
    mixture: AskedMixture | None,
    settings: Settings,
    view: View,
    format_name: str,
    workers: int,
    as_json: bool,
    end: str,
    packs: PacksAsked | None,
    **asked: int | None,
) -> None:
    """Show steps, reads of each host, memory of open windows and shuffle quality of an epoch.

    The command reads only the dataset's index and, with --pack, the column of tokens once. Lanes
    and window decide the memory that the order needs, and the quality of the shuffle. The number of
    ranks has no influence on the order.

    For a mixture, name each dataset with --source. The plan shows how many samples of each source
    an epoch has, how often the source is read, when it is exhausted, and how much memory its open
    windows take. Options of a source are weight, passes, max_passes, mean_length, format, where,
    sample, split and limit. For a ledger or a loader's saved state (JSON, or torch.save()), the
    plan shows the past and future stages of the run.

    \b
    Examples:
      dataplane plan s3://bucket/train/ --dp-size 64 --global-batch 1024
      dataplane plan train.manifest --dp-size 512 --global-batch 4096 --lanes 1024 --json
      dataplane plan tokens.manifest --global-batch 1024 --pack tokens,length=4096
      dataplane plan texts.manifest --global-batch 1024 --map mytext:f --pack tokens,length=4096
      dataplane plan --source web=s3://bucket/web/,weight=0.7 \\
        --source code=s3://bucket/code/,weight=0.3,max_passes=2 --global-batch 1024
      dataplane plan checkpoints/ledger.jsonl
      dataplane plan checkpoints/state.json
    """
    from dataplane.commands.datasets import opened

    if len(urls) == 1 and exists(urls[0]) and is_a_ledger(urls):
        show_ledger(settings, urls[0], asked, workers, as_json=as_json)
        return
    if len(urls) == 1 and show_state(urls[0], as_json=as_json):
        return
    question = _question(asked, end)
    if mixture is not None:
        show_mixture(
            mixture, settings, view, question, packs=packs, format_name=format_name,
            workers=workers, as_json=as_json,
        )  # fmt: skip
        return
    config = node_config(settings)
    manifest, of_packs = opened(urls, format_name, workers, config, view), dict[str, object]()
    spec = question.asked_of(JobSpec(manifest.fingerprint, view=view))
    if packs is not None:
        from dataplane.commands.own_node import with_packs

        counted = with_packs(manifest, packs, format_name, settings, view, question.seed)
        manifest, of_packs = counted.packs, counted.facts()
        spec = question.asked_of(counted.spec())
    _show(manifest, spec, question, config, of_packs, as_json=as_json)


def _question(asked: Mapping[str, int | None], end: str) -> Question:
    if asked["global_batch"] is None:
        raise ConfigError(
            "--global-batch is needed: the number of samples in a step, over all ranks",
            field="global_batch",
        )
    return Question(end=End(end), **asked)  # type: ignore[arg-type]


def _show(
    manifest: Manifest,
    spec: JobSpec,
    question: Question,
    config: NodeConfig,
    of_packs: Mapping[str, object],
    *,
    as_json: bool,
) -> None:
    from dataplane.plan.advice import advice
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.defaults import BlockSizes, with_shuffle
    from dataplane.plan.explain import explain
    from dataplane.plan.orders import order_of
    from dataplane.plan.shuffled import ShuffledJob, ShuffledSource

    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    spec, batch = with_shuffle(spec, sizes), question.global_batch
    order = order_of(spec, manifest, question.epoch)
    cluster = Cluster(question.dp_size, question.ranks_per_host)
    # Whether open windows fit into memory is unknown for jobs with a map=, whose blocks have other
    # sizes.
    kept_bytes, arena_bytes = 0, math.inf
    if spec.shuffle and not spec.view.map:
        arena_bytes = config.block_arena_bytes
        kept_bytes = _kept_bytes(manifest, spec, config)
    stored = int(manifest.block_length.sum(dtype="int64"))
    whole = ShuffledSource(sizes, order.window, batch, stored, kept_bytes)
    found = explain(spec, whole, order, cluster)
    hosts = _hosts(manifest, order, cluster, batch)
    warnings = found.warnings
    if spec.shuffle:
        said = advice(ShuffledJob((whole,), order.lanes, cluster, batch, arena_bytes))
        warnings = (*filter(None, [said]), *warnings)
    if as_json:
        facts = {**dataclasses.asdict(found), "warnings": warnings}
        output.write_json({**facts, "hosts": hosts, **of_packs})
        return
    lines = _lines(manifest, found)
    lines += [(name, output.show(value), "with --pack") for name, value in of_packs.items()]
    output.write_table(("", "", ""), lines)
    show_host_counts(found.by_host_count)
    output.stdout().print()
    of_hosts = ("host", "ranks", "begins with", "reads for its first batch")
    shown = [(*row, output.approximate_bytes(size)) for *row, size in map(dict.values, hosts)]
    output.write_table(of_hosts, shown, "who reads what")
    for warning in warnings:
        output.warn(warning)


def _kept_bytes(manifest: Manifest, spec: JobSpec, config: NodeConfig) -> int:
    """Return the memory that all blocks of the dataset would take in a node."""
    from dataplane.node.dataset import can_pack, dataset_of

    arena = config.block_arena_bytes
    packed = can_pack(manifest, spec, arena)
    return dataset_of(1, manifest, spec, packed=packed, arena_bytes=arena).kept_bytes


def _lines(manifest: Manifest, found: Explanation) -> list[tuple[str, str, str]]:
    size = output.approximate_bytes
    return [
        ("samples", f"{manifest.sample_count:,}", f"in {manifest.block_count:,} blocks"),
        ("steps", f"{found.step_count:,}", "the same on every rank"),
        ("dropped", f"{found.samples_dropped:,}", "samples after the last full batch"),
        ("padded", f"{found.samples_padded:,}", "samples that are repeated"),
        ("lanes", f"{found.lanes:,}", f"{found.lanes_per_rank:,} a rank"),
        ("window", f"{found.window:,}", "samples that are shuffled together, per lane"),
        *_ramp_lines(found, manifest.sample_count),
        (
            "open windows",
            size(found.open_window_bytes_per_host),
            "of memory, per host: an estimate of the average",
        ),
        (
            "reads",
            size(found.bytes_read_per_host),
            f"per host and epoch, {output.counted(found.host_count, 'host')}, on average",
        ),
        ("hosts per block", f"{found.hosts_per_block:.2f}", "on average; 1 is best"),
        (
            "shuffle quality",
            f"{found.quality:.3f}",
            "entropy of a batch's labels if the dataset is sorted by 100 labels; 1: perfect",
        ),
        ("in epoch 0", f"{found.quality_of_epoch_0:.3f}", "the same, with its shorter windows"),
    ]


def _ramp_lines(found: Explanation, sample_count: int) -> list[tuple[str, str, str]]:
    """Describe the shorter windows of epoch 0, if there are any."""
    windows = found.ramp_windows
    if not windows:
        return []
    middle = ", ..., " if len(windows) > _RAMP_SHOWN else ", "
    shown = middle.join(
        ", ".join(f"{each:,}" for each in some)
        for some in (windows[: _RAMP_SHOWN - 1], windows[_RAMP_SHOWN - 1 :][-1:])
        if some
    )
    begins = f"full ones from sample {found.ramp_end:,} on"
    if found.ramp_end == sample_count:
        begins = "none of them is full"
    return [("first windows", shown, f"of epoch 0, for an early first batch; {begins}")]


def _hosts(
    manifest: Manifest, order: SampleOrder, cluster: Cluster, global_batch: int
) -> list[dict[str, Any]]:
    """Return, for the first hosts, their ranks, the blocks of their first batches, and the stored
    size of these blocks.
    """
    from dataplane.plan.order import upcoming

    hosts = []
    stop = min(global_batch, manifest.sample_count)
    for host in range(min(cluster.host_count, HOSTS_SHOWN)):
        first = host * cluster.ranks_per_host
        last = min(first + cluster.ranks_per_host, cluster.dp_size) - 1
        blocks = {
            int(block)
            for rank in range(first, min(last + 1, stop))
            for block in upcoming(order, rank, stop, cluster.dp_size)
        }
        shards = sorted({manifest.shards[int(manifest.block_shard[one])].url for one in blocks})
        some = ", ".join(url.rpartition("/")[2] for url in shards[:3])
        counted = output.counted(len(blocks), "block")
        more = f" and {len(shards) - 3} more shards" if len(shards) > 3 else ""
        hosts.append(
            {
                "host": f"{host}",
                "ranks": f"{first}-{last}" if last > first else f"{first}",
                "begins_with": f"{counted} of {some}{more}" if blocks else "no sample",
                "first_batch_bytes": sum(manifest.block_length[[*blocks]].tolist()),
            }
        )
    return hosts
