"""`dataplane pack`: write a dataset as new shards."""

from __future__ import annotations

import os

import click

from dataplane.commands import output
from dataplane.commands.options import (
    Settings,
    interruptible,
    json_option,
    setting_options,
    urls_argument,
    view_options,
)
from dataplane.model.records import View
from dataplane.settings import node_config


@click.command("pack")
@urls_argument
@click.argument("dest")
@click.option(
    "--format",
    "format_name",
    default="parquet",
    show_default=True,
    metavar="NAME",
    help="Format of the new shards: parquet, arrow or tar.",
)
@click.option(
    "--columns", metavar="A,B,…", help="Only these columns (of the map, if there is one)."
)
@click.option(
    "--map",
    "map_name",
    default="",
    metavar="MODULE:FUNCTION",
    help="Write what this function returns, as with map=.",
)
@view_options
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=None,
    help="Number of processes.  [default: one for each processor]",
)
@setting_options("cache_dir")
@json_option
@interruptible
def pack(
    urls: tuple[str, ...],
    *,
    dest: str,
    settings: Settings,
    view: View,
    format_name: str,
    columns: str | None,
    map_name: str,
    workers: int | None,
    as_json: bool,
) -> None:
    """Write a dataset as new shards below DEST, a folder on disk or in a bucket.

    The rows keep their order. Each shard is written completely or not at all. After an
    interruption, the same command continues. Pass DEST/_dataplane/dataset.manifest to loaders. The
    file sha256sums in the same folder has the checksums of all shards.

    \b
    Examples:
      dataplane pack s3://bucket/raw/ s3://bucket/train/
      dataplane pack 'raw/*.jsonl.gz' train/ --where "lang == 'en'" --columns id,text
      dataplane pack raw/ train/ --map mytext:Tokenise --format arrow
    """
    from dataplane.commands.datasets import opened
    from dataplane.pack import MANIFEST, in_processes, pack_shards

    config, count = node_config(settings), workers or len(os.sched_getaffinity(0))
    source = opened(urls, "", count, config)
    with output.progress() as bar:
        task = bar.add_task("packing", total=None, note="")
        manifest, parts = pack_shards(
            urls,
            dest,
            config,
            format_name=format_name,
            view=view,
            columns=[name for part in (columns or "").split(",") if (name := part.strip())],
            map_name=map_name,
            run=in_processes(count),
            progress=lambda done, total: bar.update(
                task, total=total, completed=done, note=f"{done:,}/{total:,} shards"
            ),
            source=source,
        )
    facts = {
        "shards": len(manifest.shards),
        "rows": manifest.sample_count,
        "bytes": sum(part.size_bytes for part in parts),
        "manifest": f"{dest.rstrip('/')}/{MANIFEST}",
    }
    if as_json:
        output.write_json(facts)
    else:
        output.write_table(("", ""), facts.items())
