"""Texts to tokens, the same code for all loaders: they call it where their documentation says.

Hugging Face's tokenizer encodes a list of texts at once, with a thread a core if it may; where
several worker processes call it, each has one thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataplane_bench.model import Workload

THREADS = "TOKENIZERS_PARALLELISM"
"""The library's variable: "false" means one thread a process."""

_PATH, _LENGTH = "BENCH_TOKENIZER", "BENCH_TOKENS"

Rows = dict[str, NDArray[np.int32]]


class Tokenising:
    """A tokenizer that each process loads when it first needs it."""

    def __init__(self, path: Path, length: int) -> None:
        self._path, self._length = str(path), length
        self._tokenizer: Any = None

    def __call__(self, texts: Sequence[str]) -> Rows:
        """The first tokens of each text.

        Shapes:  tokens: int32[n, length], padded with 0.   token_count: int32[n].
        """
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(self._path)
            self._tokenizer.enable_truncation(self._length)
        tokens = np.zeros((len(texts), self._length), np.int32)
        count = np.zeros(len(texts), np.int32)
        for index, encoding in enumerate(self._tokenizer.encode_batch_fast(texts)):
            ids = encoding.ids
            count[index] = len(ids)
            tokens[index, : len(ids)] = ids
        return {"tokens": tokens, "token_count": count}


class BlockTokenising:
    """The same for the columns of a block of Arrow arrays, in a process that gets no arguments."""

    reads = ("id", "text")

    def __init__(self) -> None:
        self._tokenise = Tokenising(Path(os.environ[_PATH]), int(os.environ[_LENGTH]))

    def __call__(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": columns["id"], **self._tokenise(columns["text"].to_pylist())}


def variables(workload: Workload) -> dict[str, str]:
    """The environment that BlockTokenising needs."""
    path = str(workload.tokenizer)
    return {_PATH: path, _LENGTH: str(workload.length), THREADS: "false"}


def tokenising(workload: Workload) -> Tokenising:
    """The tokenizer of these texts."""
    return Tokenising(workload.tokenizer, workload.length)


def tokenised(tokenise: Tokenising, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with tokens in the place of its texts, as tensors."""
    import torch

    made = tokenise(batch.pop("text"))
    return batch | {name: torch.from_numpy(array) for name, array in made.items()}


def set_threads(workers: int) -> None:
    """Before this process and its worker processes tokenise anything."""
    os.environ[THREADS] = "false" if workers else "true"
