"""Texts in Parquet, and a tokenizer that was trained on some of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import BatchKind, ColumnType, Workload, WorkloadColumn
from dataplane_bench.workloads.recipe import Recipe, shards

LENGTH = 256
_WORDS_MEAN = 180
_SIGMA = 0.6
"""Of the logarithms of the texts' lengths in words."""
_WORDS = 30_000
_ZIPF = 1.05
_SYLLABLES = [
    consonant + vowel + end
    for consonant in ("b", "br", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t")
    for vowel in ("a", "e", "i", "o", "u", "ea", "ou")
    for end in ("", "n", "r", "s", "l")
]
_VOCABULARY = 16_000
_TRAINING_TEXTS = 4_000
_GROUP_ROWS = 2048
_FILE = "tokenizer.json"


def tokenizer_path(workload: Workload) -> Path:
    """The tokenizer of these texts, a file of Hugging Face's `tokenizers`."""
    return workload.source / _FILE


def _write(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    words = _words(random)
    # Few words are frequent and most are rare, as in any language.
    frequencies = 1 / np.arange(1, _WORDS + 1) ** _ZIPF
    bounds = np.cumsum(frequencies / frequencies.sum())
    first: list[str] = []
    for path, ids in shards(folder, count):
        texts = _texts(words, bounds, len(ids), random)
        first += texts[: _TRAINING_TEXTS - len(first)]
        table = pa.table({"id": pa.array(ids), "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=_GROUP_ROWS)
    _train(first, folder / _FILE)


def _words(random: np.random.Generator) -> NDArray[np.object_]:
    """Made of one to four syllables, each once. The shortest come first: they are frequent."""
    found: dict[str, None] = {}
    while len(found) < _WORDS:
        parts = random.integers(0, len(_SYLLABLES), random.integers(1, 5))
        found["".join(_SYLLABLES[part] for part in parts)] = None
    return np.array(sorted(found, key=len), dtype=object)


def _texts(
    words: NDArray[np.object_],
    bounds: NDArray[np.float64],
    count: int,
    random: np.random.Generator,
) -> list[str]:
    mean_of_log = math.log(_WORDS_MEAN) - _SIGMA**2 / 2
    lengths = np.maximum(np.exp(random.normal(mean_of_log, _SIGMA, count)).astype(np.int64), 1)
    drawn = np.minimum(bounds.searchsorted(random.random(int(lengths.sum()))), _WORDS - 1)
    parts = np.split(words[drawn], np.cumsum(lengths)[:-1])
    return [" ".join(part.tolist()).capitalize() + "." for part in parts]


def _train(texts: list[str], path: Path) -> None:
    """A byte-level BPE, as most language models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


RECIPE = Recipe(
    name="tokenise",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("text", ColumnType.STRING),
    ),
    sample_count=32_768,
    batch_size=64,
    step_ms=5.0,
    write=_write,
    delivery=BatchKind.TOKENISED,
    length=LENGTH,
)
