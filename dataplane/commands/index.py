"""`dataplane index`: make a manifest of a dataset."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    urls_argument,
    view_options,
    workers_option,
)
from dataplane.commands.own_node import opened_again
from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.settings import node_config

if TYPE_CHECKING:
    from dataplane.plan.manifest import Manifest


SUFFIX = ".manifest"


@click.command("index")
@urls_argument
@click.option(
    "-o", "--output", "target", metavar="FILE", help=f"File to write; its name ends in {SUFFIX}."
)
@click.option(
    "--codes",
    metavar="A,B,…",
    help="Also find and store the distinct values of these columns, for codes=.",
)
@pack_options
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed of the job, if its map takes a generator.",
)
@format_option
@view_options
@workers_option
@setting_options("cache_dir")
@json_option
@interruptible
def index(
    urls: tuple[str, ...],
    *,
    settings: Settings,
    view: View,
    target: str | None,
    codes: str | None,
    packs: PacksAsked | None,
    seed: int,
    format_name: str,
    workers: int,
    as_json: bool,
) -> None:
    """Index a dataset once, and store its manifest.

    The manifest lists shards with size and ETag, and blocks with sample counts. The command stores
    the manifest in the cache folder, where nodes find it. -o also writes the manifest to a file,
    which you can pass instead of a dataset's URL. After an interruption, the same command
    continues.

    Jobs with pack= or where= need counts of packs or rows. Pass the same options here to count them
    before the launch. Otherwise, the first node of a launch counts them for all nodes. With local
    files, each node counts them. --codes finds the values of the columns in codes= before the
    launch. Otherwise, each node finds these values when it first opens such a job.

    URLs may contain globs and braces. A folder means all shards below it.

    \b
    Examples:
      dataplane index s3://bucket/train/
      dataplane index 's3://bucket/train-{000..127}.tfrecord' -o train.manifest
      dataplane index s3://bucket/train/ --where "lang == 'en'" -o train.manifest
      dataplane index 'shards/*.records' --format tfrecord --workers 32
      dataplane index s3://bucket/tokens/ --pack tokens,length=4096 -o tokens.manifest
      dataplane index s3://bucket/texts/ --map mytext:Tokenise --pack tokens,length=4096
    """
    if target is not None:
        _check_target(target)
    from dataplane.commands.datasets import facts, opened

    config = node_config(settings)
    of_view = opened(urls, format_name, workers, config, view)
    manifest = of_view.whole or of_view
    if codes is not None:
        manifest = with_codes(manifest, codes.split(","), format_name, settings)
    of_packs: dict[str, object] = {}
    if packs is not None:
        from dataplane.commands.own_node import with_packs

        counted = with_packs(of_view, packs, format_name, settings, view, seed)
        of_packs = counted.facts()
        manifest = replace(manifest, pack_counts=counted.whole.pack_counts)
    if target is not None:
        _store(manifest, of_view, view, Path(target))
    found = facts(of_view)
    found |= {f"values of {name}": len(one) for name, one in sorted(manifest.categories.items())}
    _show({**found, **of_packs, **({} if target is None else {"manifest": target})}, as_json)


def _store(manifest: Manifest, of_view: Manifest, view: View, target: Path) -> None:
    """Write a manifest, with the row counts of one of its views."""
    from dataplane.index.viewing import with_view
    from dataplane.plan.views import filters

    if filters(view) and not view.limit:
        manifest = with_view(manifest, of_view, view)
    _write(target, manifest.to_bytes())


def _show(found: dict[str, object], as_json: bool) -> None:
    if as_json:
        output.write_json(found)
    else:
        output.write_table(("", ""), found.items())


def _check_target(given: str) -> None:
    target = Path(given)
    if "://" in given:
        raise ConfigError(
            f"-o {given}: a manifest is written to a local file, got a url. Give a path, copy the "
            "file to the store, and pass its url in place of the dataset's",
            key="output",
            found=given,
        )
    if not target.name.endswith(SUFFIX):
        raise ConfigError(
            f"{target} must end in {SUFFIX}: this distinguishes a manifest from a shard",
            key="output",
            found=str(target),
        )
    if not target.absolute().parent.is_dir():
        raise ConfigError(
            f"there is no folder {target.absolute().parent}: create it, or give another -o FILE",
            key="output",
        )


def _write(target: Path, content: bytes) -> None:
    """Write the file atomically, or leave the old one."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Give another -o FILE"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# -- codes -------------------------------------------------------------------------------------
#
# `dataplane index --codes`: find the distinct values of columns, and store them in the manifest.


def with_codes(
    manifest: Manifest, columns: Sequence[str], format_name: str, settings: Settings
) -> Manifest:
    """Return the manifest with the values of these columns, which a node started here reads.

    Raises:  ConfigError: a column does not exist, or cannot have codes.  The errors of a job.
    """
    from dataplane.client.describe import category_values
    from dataplane.transforms.codes import stored_values
    from dataplane.transforms.options import column_options

    options = column_options(columns=columns, codes=columns)
    with opened_again(manifest, format_name, settings, options, View()) as session:
        values = {name: stored_values(category_values(session, name)) for name in columns}
    return manifest.with_categories(values)
