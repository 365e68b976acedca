"""Facts about a user's samples, kept beside the shards that were made of them.

Little is imported here: Dataplane's own process of a trial reads it, and its memory counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane_bench.model import ColumnType, Workload, WorkloadColumn

_NAME = "about.json"


@dataclass(frozen=True, slots=True)
class About:
    """`leaves` maps each column to Dataplane's name for it; `notes` list what was left out."""

    columns: tuple[WorkloadColumn, ...]
    leaves: tuple[str, ...]
    sample_count: int
    notes: tuple[str, ...]


def write_about(about: About, folder: Path) -> None:
    """Into the folder that holds `source` and `shards`."""
    fields = {
        "columns": [
            [column.name, column.kind, column.dtype, column.shape] for column in about.columns
        ],
        "leaves": about.leaves,
        "sample_count": about.sample_count,
        "notes": about.notes,
    }
    (folder / _NAME).write_text(json.dumps(fields), encoding="utf-8")


def read_about(folder: Path) -> About:
    """As `write_about` wrote it."""
    fields = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    columns = tuple(
        WorkloadColumn(name, ColumnType(kind), dtype, tuple(shape))
        for name, kind, dtype, shape in fields["columns"]
    )
    return About(columns, tuple(fields["leaves"]), fields["sample_count"], tuple(fields["notes"]))


def leaves(workload: Workload) -> dict[str, str]:
    """Each column, and what Dataplane calls it: a struct's field, or a name that no file can have,
    is called otherwise for all others ("image.bytes" is "image_bytes").
    """
    if not workload.urls:
        return {column.name: column.name for column in workload.columns}
    about = read_about(workload.source.parent)
    return dict(zip((column.name for column in about.columns), about.leaves, strict=True))


def shared_names(leaves: Sequence[str]) -> list[str]:
    """The names of columns that are Dataplane's `leaves`: every loader can take them, as part of
    a file's name, as a key, as an identifier; no two are the same.
    """
    names: list[str] = []
    for leaf in leaves:
        plain = "".join(
            character if character.isascii() and character.isalnum() else " "
            for character in leaf.lower()
        )
        name = "_".join(plain.split()) or "column"
        if not name[0].isalpha():
            name = f"column_{name}"
        number, first = 2, name
        while name in names:
            name, number = f"{first}_{number}", number + 1
        names.append(name)
    return names
