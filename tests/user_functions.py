"""Functions as users write them for map= and collate=; workers import this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

Columns = dict[str, pa.Array]


def letters(columns: Columns) -> dict[str, Any]:
    """The code points of a text, its length, and the row's number as it was."""
    texts = columns["txt"].to_pylist()
    return {
        "row": columns["row"],
        "ids": [[ord(letter) for letter in text or ""] for text in texts],
        "size": np.array([len(text or "") for text in texts], np.int32),
    }


def as_a_file_says(columns: Columns) -> dict[str, Any]:
    """Lists that depend on the file that an environment variable names."""
    times = int(Path(os.environ["TIMES_FILE"]).read_text())
    return {"ids": [[len(text)] * times for text in columns["txt"].to_pylist()]}


def twice(columns: Columns) -> Columns:
    """One column, doubled."""
    return {**columns, "row": pa.array(2 * columns["row"].to_numpy())}


def noisy(columns: Columns, generator: np.random.Generator) -> dict[str, Any]:
    """Random numbers beside the row's number."""
    return {"row": columns["row"], "noise": generator.random(len(columns["row"]))}


def nested(columns: Columns) -> dict[str, Any]:
    """Columns of all the kinds that a map may return."""
    rows = columns["row"].to_numpy()
    return {
        "vector": np.stack([rows, rows + 1], axis=1).astype(np.float32),
        "matrix": np.stack([np.stack([rows, rows]), np.stack([rows, -rows])]).transpose(2, 0, 1),
        "text": [f"row {row}" for row in rows],
        "bytes": [bytes([row % 256]) for row in rows],
        "flag": rows % 2 == 0,
        "maybe": pa.array([None if row % 2 else row for row in rows], pa.int64()),
        "a": rows.astype(np.float64),
        "b": rows.astype(np.float64) + 0.5,
    }


def large(columns: Columns) -> dict[str, Any]:
    """Rows that grow: the first ones say little about the others."""
    return {"ids": [[row] * (row // 2) for row in columns["row"].to_pylist()]}


def fails_late(columns: Columns) -> Columns:
    """Fails in each block that has row 100."""
    rows = columns["row"].to_pylist()
    if 100 in rows:
        raise ValueError(f"row {rows.index(100)} is not to my taste")
    return columns


def ends_late(columns: Columns) -> Columns:
    """Ends its process in each block that has row 100."""
    if 100 in columns["row"].to_pylist():
        os.kill(os.getpid(), 11)
    return columns


class Counted:
    """An object that is expensive to make: it counts how often that was done, in a file that the
    environment names.
    """

    reads = ("row",)

    def __init__(self) -> None:
        with Path(os.environ["COUNTED"]).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")

    def __call__(self, columns: Columns) -> Columns:
        """The columns that it got."""
        return {"row": columns["row"], "count": pa.array([len(columns)] * len(columns["row"]))}
