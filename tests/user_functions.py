"""Functions as users write them for map= and collate=; workers import this module."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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


def noted(columns: Columns) -> dict[str, Any]:
    """Texts as tokens. Notes each call in the file that a column names: the first row's number, and
    how many rows there are. Fails at a row whose text is the name of a file.
    """
    first, count = columns["row"][0].as_py(), len(columns["row"])
    with Path(columns["file"][0].as_py()).open("a") as notes:
        notes.write(f"{first} {count}\n")
    texts = columns["txt"].to_pylist()
    bad = [text for text in texts if text.startswith("/") and Path(text).exists()]
    if bad:
        raise ValueError(f"{bad[0]} is a file")
    return {"tokens": [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]}


def slow(columns: Columns) -> Columns:
    """Return its argument, after most of a second."""
    threading.Event().wait(0.7)
    return columns


def same(columns: Columns) -> Columns:
    """Return its argument."""
    return columns


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


def rejects(columns: Columns) -> Columns:
    """Fails in each block that has one of these rows, as a tokenizer."""
    if {3, 17, 18, 40, 70, 119} & set(columns["id"].to_pylist()):
        raise ValueError("no such token")
    return columns


def of_tokens(columns: Columns) -> dict[str, Any]:
    """The first token of each row as its number. Fails as `rejects` does."""
    return rejects({"id": pa.array([tokens[0] for tokens in columns["tokens"].to_pylist()])})


def of_names(columns: Columns) -> dict[str, Any]:
    """The images of files, beside the numbers that name them."""
    names = columns["__key__"].to_pylist()
    return {"id": pa.array([int(Path(name).stem) for name in names]), "image": columns["image"]}


def collates(columns: dict[str, Any]) -> dict[str, Any]:
    """Fails at each batch that has one of these rows, which it does not name."""
    assert not {3, 17, 18, 40, 70, 119} & set(columns["id"].tolist())
    return {"id": columns["id"], "letters": np.array([len(text) for text in columns["text"]])}


def refuses(columns: dict[str, Any]) -> dict[str, Any]:
    """Takes no batch."""
    raise ValueError(f"never {len(columns)}")


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


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """The code points of the texts, padded to a multiple of eight, and numbers of other shapes."""
    texts = [text or "" for text in batch["txt"]]
    width = -(-max(map(len, texts)) // 8) * 8
    ids = np.zeros((len(texts), width), np.int32)
    for at, text in enumerate(texts):
        ids[at, : len(text)] = [ord(letter) for letter in text]
    total = int(batch["row"].sum())
    return {"ids": ids, "row": batch["row"], "total": total, "cube": ids[None, :2, :, None] + 0.5}


def noisy_batch(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Random numbers beside the rows' numbers."""
    return {"row": batch["row"], "noise": generator.random(3)}


def noisy_x(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """A column, and random numbers in two dimensions."""
    return {"x": batch["x"], "noise": generator.random((2, len(batch["x"])))}


def grows(batch: dict[str, Any]) -> dict[str, Any]:
    """Batches of very different sizes: the first one says little about the others."""
    width = int(batch["row"][0]) * 20
    return {"row": batch["row"], "wide": np.full((2, width), int(batch["row"][0]), np.int16)}


def too_large(batch: dict[str, Any]) -> dict[str, Any]:
    """A megabyte for each row, from row 128 on."""
    size = 1 << 20 if 128 in batch["row"] else 1
    return {"row": batch["row"], "much": np.zeros((len(batch["row"]), size), np.uint8)}


def mixes(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Each image mixed with another one of its batch."""
    other = generator.permutation(len(batch["jpg"]))
    pixels = batch["jpg"].astype(np.float32)
    return {"jpg": (pixels + pixels[other]) / 2, "other": other, "shape": batch["jpg"].shape}


def sums(batch: dict[str, Any]) -> dict[str, Any]:
    """The sum of every column of numbers, by its name."""
    return {name: column.sum() for name, column in batch.items()}


def waits_at_a_gate(batch: dict[str, Any]) -> dict[str, Any]:
    """Takes long: with row 0, as long as a task of a worker must take to count as long; with the
    others, until there is a file `open` in the folder that the rows name.
    """
    folder = Path(batch["folder"][0])
    threading.Event().wait(0.6)
    while 0 not in batch["row"] and not (folder / "open").exists():
        (folder / f"at_gate-{os.getpid()}").touch()
        threading.Event().wait(0.02)
    return only_row(batch)


def only_row(batch: dict[str, Any]) -> dict[str, Any]:
    return {"row": batch["row"]}


def fails_at_a_row(batch: dict[str, Any]) -> dict[str, Any]:
    """Fails for the batch that has row 100."""
    rows = batch["row"].tolist()
    if 100 in rows:
        raise ValueError(f"row {rows.index(100)} is not to my taste")
    return {"row": batch["row"]}


def shape_and_sum(batch: dict[str, Any]) -> dict[str, Any]:
    """The shape of a batch's tokens, and what they add up to."""
    tokens = batch["tokens"]
    return {"shape": np.array(tokens.shape), "sum": tokens.sum()}


def hangs_later(columns: dict[str, Any]) -> dict[str, Any]:
    """Never returns where it sees row 200, and writes in which process to a pipe that the
    environment names.
    """
    if 200 in [int(row) for row in columns["row"].tolist()]:
        Path(os.environ["HUNG"]).write_text(str(os.getpid()))
        threading.Event().wait()
    return {"row": columns["row"]}


def pauses(columns: Columns) -> Columns:
    """Wait for a twentieth of a second."""
    threading.Event().wait(0.05)
    return columns


def doubles_ids(columns: Columns) -> dict[str, Any]:
    """Twice the ids, beside them."""
    ids = columns["id"].to_numpy()
    return {"id": ids, "twice": 2 * ids}


def hangs_from_30(columns: Columns) -> Columns:
    """Wait at ids from 30 on, until there is a file that an environment variable names."""
    while columns["id"][0].as_py() >= 30 and not Path(os.environ["GO_ON"]).exists():
        threading.Event().wait(0.01)
    return columns


def repeats(columns: Columns) -> dict[str, Any]:
    """Each row as often as it says, numbered; rows that say 0 are dropped."""
    rows = [
        (row, copy)
        for row, times in zip(columns["id"].to_pylist(), columns["times"].to_pylist(), strict=True)
        for copy in range(times)
    ]
    ids, copies = ([pair[at] for pair in rows] for at in (0, 1))
    return {"id": pa.array(ids, pa.int64()), "copy": pa.array(copies, pa.int64())}


def returns_as_a_file_says(columns: Columns) -> Columns:
    """The first rows, as many as the file says that an environment variable names."""
    count = int(Path(os.environ["ROWS_FILE"]).read_text())
    return {name: column[:count] for name, column in columns.items()}


def repeats_but_3(columns: Columns) -> dict[str, Any]:
    """Repeat rows like `repeats`, but fail at row 3."""
    if 3 in columns["id"].to_pylist():
        raise ValueError("not 3")
    return repeats(columns)


def doubles_even_dozens(columns: Columns) -> dict[str, Any]:
    """Repeat the rows of every second dozen."""
    return _doubles(columns, 0)


def doubles_odd_dozens(columns: Columns) -> dict[str, Any]:
    """Repeat the other rows: as many of all together, and not of each dozen."""
    return _doubles(columns, 1)


def _doubles(columns: Columns, parity: int) -> dict[str, Any]:
    ids = columns["id"].to_pylist()
    times = pa.array([1 + (row // 12 % 2 == parity) for row in ids])
    return repeats({**columns, "times": times})


def labels_by_length(columns: Columns) -> Columns:
    """Replace labels by numbers."""
    return {**columns, "label": pc.utf8_length(columns["label"])}
