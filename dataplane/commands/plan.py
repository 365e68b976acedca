"""`dataplane plan`: what an epoch costs a cluster, which host reads what, and how well it is
shuffled.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from dataplane.commands import output
from dataplane.commands.interrupt import interruptible
from dataplane.commands.options import (
    Settings,
    format_option,
    json_option,
    setting_options,
    urls_argument,
    workers_option,
)
from dataplane.model import End

if TYPE_CHECKING:
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.explain import Explanation, HostFigures
    from dataplane.plan.manifest import Manifest
    from dataplane.plan.order import Order, SampleOrder

HOSTS_SHOWN = 8
POSITIVE = click.IntRange(min=1)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The job whose epoch is explained. Lanes and window: None takes the dataset's defaults."""

    dp_size: int
    ranks_per_host: int
    global_batch: int
    seed: int
    epoch: int
    shuffle: bool
    lanes: int | None
    window: int | None
    end: End


@click.command("plan")
@urls_argument
@click.option("--dp-size", type=POSITIVE, default=1, show_default=True, help="Data-parallel ranks.")
@click.option(
    "--ranks-per-host", type=POSITIVE, default=8, show_default=True, help="Ranks on each host."
)
@click.option(
    "--global-batch", type=POSITIVE, required=True, help="Samples in a step, over all ranks."
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
@format_option
@workers_option
@setting_options("cache_dir")
@json_option
@interruptible
def plan(
    urls: tuple[str, ...],
    *,
    settings: Settings,
    format_name: str,
    workers: int,
    as_json: bool,
    end: str,
    **asked: int | None,
) -> None:
    """Explain an epoch: steps, which host reads what, memory of open windows, shuffle quality.

    Only the dataset's index is read. The order depends only on seed and epoch, never on ranks;
    lanes and window determine its cost and the quality of the shuffle.

    \b
    Examples:
      dataplane plan s3://bucket/train/ --dp-size 64 --global-batch 1024
      dataplane plan train.manifest --dp-size 512 --global-batch 4096 --lanes 1024 --json
      dataplane plan train.manifest --global-batch 32 --no-shuffle --end drop
    """
    from dataplane.commands.datasets import opened
    from dataplane.settings import node_config

    question = Question(end=End(end), **asked)  # type: ignore[arg-type]
    manifest = opened(urls, format_name, workers, node_config(settings))
    order, cluster, found = explained(manifest, question)
    hosts = _hosts(manifest, order, cluster, question.global_batch)
    if as_json:
        output.write_json({**dataclasses.asdict(found), "hosts": hosts})
        return
    output.write_table(("", "", ""), _lines(manifest, found, question.global_batch))
    output.stdout().print()
    headings = ("hosts", "ranks", "lanes a rank", "open windows", "reads", "times its share")
    rows = [_host_row(each) for each in found.by_host_count]
    output.write_table(headings, rows, "what each host takes, for so many hosts")
    output.stdout().print()
    of_hosts = ("host", "ranks", "begins with")
    output.write_table(of_hosts, [tuple(host.values()) for host in hosts], "who reads what")
    for warning in found.warnings:
        output.warn(warning)


def explained(manifest: Manifest, question: Question) -> tuple[Order, Cluster, Explanation]:
    """The order of the job, and its explanation.

    Raises:  ConfigError: invalid numbers for an order or a slice.
    """
    from dataplane.plan.cluster import Cluster
    from dataplane.plan.defaults import BlockSizes, shuffle_of
    from dataplane.plan.explain import explain
    from dataplane.plan.order import Order

    sizes = BlockSizes.of(manifest.block_rows, manifest.block_decoded)
    shuffle = shuffle_of(sizes, question.lanes, question.window)
    order = Order(
        manifest.block_rows,
        question.seed,
        question.shuffle,
        shuffle.lanes,
        shuffle.window,
        question.epoch,
        shuffle.ramp,
    )
    cluster = Cluster(question.dp_size, min(question.ranks_per_host, question.dp_size))
    return order, cluster, explain(manifest, order, cluster, question.global_batch, question.end)


def _host_row(each: HostFigures) -> tuple[str, ...]:
    size = output.approximate_bytes
    return (
        f"{each.host_count:,}",
        f"{each.dp_size:,}",
        f"{each.lanes_per_rank:,}",
        size(each.open_window_bytes_per_host),
        size(each.bytes_read_per_host),
        f"{each.reads_times_share:.2f}",
    )


def _lines(manifest: Manifest, found: Explanation, global_batch: int) -> list[tuple[str, str, str]]:
    size = output.approximate_bytes
    of_batch = "per batch"
    if found.probed_per_batch < min(global_batch, manifest.sample_count):
        of_batch = f"per {found.probed_per_batch:,} samples"
    return [
        ("samples", f"{manifest.sample_count:,}", f"in {manifest.block_count:,} blocks"),
        ("steps", f"{found.step_count:,}", "the same on every rank"),
        ("dropped", f"{found.samples_dropped:,}", "samples after the last full batch"),
        ("padded", f"{found.samples_padded:,}", "samples that are repeated"),
        ("lanes", f"{found.lanes:,}", f"{found.lanes_per_rank:,} a rank"),
        ("window", f"{found.window:,}", "samples that are shuffled together, per lane"),
        ("open windows", size(found.open_window_bytes_per_host), "of memory, per host"),
        ("reads", size(found.bytes_read_per_host), f"per host and epoch, {found.host_count} hosts"),
        (
            "hosts per block",
            f"{found.hosts_per_block_mean:.2f}",
            f"on average, at most {found.hosts_per_block_max:,}; 1 is best",
        ),
        ("displacement", f"{found.displacement:.3f}", "0: the dataset's order, 1: perfect"),
        (
            f"blocks {of_batch}",
            f"{found.blocks_per_batch:.1f}",
            f"a perfect shuffle: {found.blocks_per_batch_perfect:.1f}",
        ),
        (
            f"shards {of_batch}",
            f"{found.shards_per_batch:.1f}",
            f"a perfect shuffle: {found.shards_per_batch_perfect:.1f}",
        ),
        (
            "shuffle quality",
            f"{found.quality:.3f}",
            "entropy of a batch's labels if the dataset is sorted by 100 labels; 1: perfect",
        ),
    ]


def _hosts(
    manifest: Manifest, order: SampleOrder, cluster: Cluster, global_batch: int
) -> list[dict[str, str]]:
    """For the first hosts: their ranks, and the blocks that their first batches come from."""
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
        more = f" and {len(shards) - 3} more shards" if len(shards) > 3 else ""
        hosts.append(
            {
                "host": f"{host}",
                "ranks": f"{first}-{last}" if last > first else f"{first}",
                "begins_with": f"{len(blocks)} blocks of {some}{more}",
            }
        )
    return hosts
