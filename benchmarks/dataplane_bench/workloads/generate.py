"""Samples that look like what people train on, made from a seed: Parquet shards of each workload.

The same name and scale give the same rows on every machine (JPEGs: with the same libjpeg).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataplane_bench.model import (
    TOKENIZER,
    BatchKind,
    ColumnType,
    Workload,
    WorkloadColumn,
    WorkloadPart,
)
from dataplane_bench.workloads import images

SHARD_COUNT = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """How samples of one kind are made. Raise `version` whenever the output bytes change.

    `write` puts so many samples as Parquet shards into an empty folder; one thread of it at a time.
    `parts` are those of a mixture with so many samples. `s3_scale` times as many take the fastest
    loader ten seconds or so to read from S3, on two cores.
    """

    name: str
    version: int
    columns: tuple[WorkloadColumn, ...]
    sample_count: int
    batch_size: int
    step_ms: float
    write: Callable[[Path, int], None]
    delivery: BatchKind = BatchKind.STORED
    length: int = 0
    parts: Callable[[int], tuple[WorkloadPart, ...]] = lambda _: ()
    s3_scale: float = 1.0


def shards(
    folder: Path, count: int, first: int = 0, files: int = SHARD_COUNT
) -> Iterator[tuple[Path, NDArray[np.int64]]]:
    """The file of each shard, and the ids of its samples.

    Shapes:  int64[n], which count up from `first` over all shards.
    """
    every = np.arange(first, first + count, dtype=np.int64)
    for index, ids in enumerate(np.array_split(every, files)):
        yield folder / f"shard-{index:05d}.parquet", ids


_LIST_GROUP_ROWS = 2048

# Rows of tokens, all of one length, as a language model is trained on them.
ROW_TOKENS = 2048
VOCABULARY = 50_000
_TOKEN_GROUP_ROWS = 512


def _write_token_rows(
    files: Iterable[tuple[Path, NDArray[np.int64]]],
    seed: int = 0,
    names: Sequence[str] = ("id", "tokens"),
) -> None:
    """Write rows of random tokens, for these ids, to each of these files."""
    random = np.random.default_rng(seed)
    for path, ids in files:
        values = random.integers(0, VOCABULARY, (len(ids), ROW_TOKENS), dtype=np.int32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), ROW_TOKENS)
        table = pa.table({"id": pa.array(ids), "tokens": column}).select(names)
        pq.write_table(table, path, row_group_size=_TOKEN_GROUP_ROWS, compression="NONE")


TOKENS = Recipe(
    name="tokens",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("tokens", ColumnType.FIXED, "int32", (ROW_TOKENS,)),
    ),
    sample_count=65_536,
    batch_size=32,
    step_ms=2.0,
    write=lambda folder, count: _write_token_rows(shards(folder, count)),
    s3_scale=8,
)

# The same rows alone, as formats of token sequences have them.
ROWS = dataclasses.replace(
    TOKENS,
    name="rows",
    version=2,
    columns=TOKENS.columns[1:],
    write=lambda folder, count: _write_token_rows(shards(folder, count), names=["tokens"]),
)

# Rows of tokens from four sources, in shares that are not those of their sizes.
_SHARES = {"web": (0.70, 70), "code": (0.20, 25), "books": (0.07, 10), "maths": (0.03, 5)}
"""Weight in a batch, and relative size: the first source to be exhausted is web."""


def _parts(count: int) -> tuple[WorkloadPart, ...]:
    whole = sum(size for _, size in _SHARES.values())
    sizes = {name: count * size // whole for name, (_, size) in _SHARES.items()}
    sizes["web"] += count - sum(sizes.values())
    return tuple(WorkloadPart(name, weight, sizes[name]) for name, (weight, _) in _SHARES.items())


def _write_mixture(folder: Path, count: int) -> None:
    first = 0
    for seed, part in enumerate(_parts(count)):
        below = folder / part.name
        below.mkdir()
        files = max(round(SHARD_COUNT * part.sample_count / count), 1)
        _write_token_rows(shards(below, part.sample_count, first, files), seed)
        first += part.sample_count


MIXTURE = Recipe(
    name="mixture",
    version=1,
    columns=TOKENS.columns,
    sample_count=TOKENS.sample_count,
    batch_size=TOKENS.batch_size,
    step_ms=TOKENS.step_ms,
    write=_write_mixture,
    delivery=BatchKind.MIXED,
    parts=_parts,
)

# Documents of the web as lists of tokens, to be packed into rows of one length.
_DOCUMENT_MEAN = 616
PACK_LENGTH = 2048
_DOCUMENT_SIGMA = 1.0
"""Of the lengths' logarithms: half of the documents are shorter than 374 tokens, and one in 22 is
longer than a pack."""


def _offsets(
    random: np.random.Generator, count: int, mean: int, sigma: float, most: int | None = None
) -> NDArray[np.int32]:
    """Where lists of random lengths begin and end: lognormal ones of this mean, from 1 to `most`.

    Shapes:  result: int32[count + 1].
    """
    lengths = np.exp(random.normal(math.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int32)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.clip(lengths, 1, most), out=offsets[1:])
    return offsets


def _write_documents(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for path, ids in shards(folder, count):
        offsets = _offsets(random, len(ids), _DOCUMENT_MEAN, _DOCUMENT_SIGMA)
        # 0 is left to padding.
        tokens = random.integers(1, VOCABULARY, offsets[-1], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
        table = pa.table({"id": pa.array(ids), "tokens": lists})
        pq.write_table(table, path, row_group_size=_LIST_GROUP_ROWS, compression="NONE")


PACKED = Recipe(
    name="packed",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    ),
    sample_count=131_072,
    batch_size=32,
    step_ms=2.0,
    write=_write_documents,
    delivery=BatchKind.PACKED,
    length=PACK_LENGTH,
)

# Texts as lists of tokens of very different lengths, with a label each.
_TEXT_MEAN = 200
_TEXT_MAX = 2048
_LABELS = 20
_TEXT_SIGMA = 0.8
"""Of the lengths' logarithms: half of the texts are shorter than 145 tokens, one in 20 has 540."""


def _write_texts(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for path, ids in shards(folder, count):
        offsets = _offsets(random, len(ids), _TEXT_MEAN, _TEXT_SIGMA, _TEXT_MAX)
        # Few tokens are frequent and most are rare, as in any language.
        tokens = (random.random(offsets[-1], np.float32) ** 3 * VOCABULARY).astype(np.int32)
        labels = random.integers(0, _LABELS, len(ids), dtype=np.int32)
        table = pa.table(
            {
                "id": pa.array(ids),
                "label": pa.array(labels),
                "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
            }
        )
        pq.write_table(table, path, row_group_size=_LIST_GROUP_ROWS)


TEXT = Recipe(
    name="text",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("label", ColumnType.FIXED, "int32"),
        WorkloadColumn("tokens", ColumnType.RAGGED, "int32"),
    ),
    sample_count=100_000,
    batch_size=64,
    step_ms=5.0,
    write=_write_texts,
    s3_scale=20,
)

# A table of 40 columns, as click logs and sensor readings are: measurements, prices, shares,
# categories, times and keys.
_CATEGORY_COUNTS = (2, 10, 100, 1_000, 10_000, 100_000)
_TIME_START_MS, _TIME_SPAN_MS = 1_700_000_000_000, 90 * 24 * 3600 * 1000
_TABLE_GROUP_ROWS = 65_536
_DTYPES = (
    *((f"f{index:02d}", "float32") for index in range(29)),
    *((f"f{index:02d}", "float64") for index in range(29, 31)),
    *((f"i{index:02d}", "int32") for index in range(6)),
    *((f"i{index:02d}", "int64") for index in range(6, 8)),
)
_OF_FEW_VALUES = [*(f"f{index:02d}" for index in range(24, 29)), *(f"i{i:02d}" for i in range(5))]
"""Columns that are worth a dictionary in Parquet."""


def _write_table(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for path, ids in shards(folder, count):
        columns = {"id": ids}
        for (name, dtype), values in zip(_DTYPES, _table_columns(random, len(ids)), strict=True):
            columns[name] = values.astype(dtype)
        pq.write_table(
            pa.table(columns),
            path,
            row_group_size=_TABLE_GROUP_ROWS,
            compression="snappy",
            use_dictionary=_OF_FEW_VALUES,
        )


def _table_columns(random: np.random.Generator, count: int) -> Iterator[NDArray[Any]]:
    """In the order of _DTYPES.   Shapes:  result: [count] each."""
    for index in range(16):  # measurements
        yield random.standard_normal(count, np.float32) * np.float32(10.0 ** (index % 4))
    for _ in range(8):  # prices, in cents
        yield np.round(np.exp(random.normal(3.0, 1.0, count)), 2)
    for _ in range(5):  # shares
        yield np.round(random.random(count, np.float32), 3)
    for edge in (90.0, 180.0):  # latitude, longitude
        yield random.uniform(-edge, edge, count)
    for categories in _CATEGORY_COUNTS:
        yield random.random(count) ** 2 * categories
    yield _TIME_START_MS + np.sort(random.integers(0, _TIME_SPAN_MS, count))
    yield random.integers(0, 1 << 62, count)


TABULAR = Recipe(
    name="tabular",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        *(WorkloadColumn(name, ColumnType.FIXED, dtype) for name, dtype in _DTYPES),
    ),
    sample_count=1_000_000,
    batch_size=8192,
    step_ms=5.0,
    write=_write_table,
    s3_scale=10,
)


_TOKENISED_LENGTH = 256
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
_TOKENIZER_VOCABULARY = 16_000
_TRAINING_TEXTS = 4_000
_STRING_GROUP_ROWS = 2048


def _write_words(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    words = _random_words(random)
    # Few words are frequent and most are rare, as in any language.
    frequencies = 1 / np.arange(1, _WORDS + 1) ** _ZIPF
    bounds = np.cumsum(frequencies / frequencies.sum())
    first: list[str] = []
    for path, ids in shards(folder, count):
        texts = _random_texts(words, bounds, len(ids), random)
        first += texts[: _TRAINING_TEXTS - len(first)]
        table = pa.table({"id": pa.array(ids), "text": pa.array(texts, pa.string())})
        pq.write_table(table, path, row_group_size=_STRING_GROUP_ROWS)
    _train(first, folder / TOKENIZER)


def _random_words(random: np.random.Generator) -> NDArray[np.object_]:
    """Made of one to four syllables, each once. The shortest come first: they are frequent."""
    words: dict[str, None] = {}
    while len(words) < _WORDS:
        parts = random.integers(0, len(_SYLLABLES), random.integers(1, 5))
        words["".join(_SYLLABLES[part] for part in parts)] = None
    return np.array(sorted(words, key=len), dtype=object)


def _random_texts(
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
        vocab_size=_TOKENIZER_VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


TOKENISE = Recipe(
    name="tokenise",
    version=1,
    columns=(
        WorkloadColumn("id", ColumnType.FIXED, "int64"),
        WorkloadColumn("text", ColumnType.STRING),
    ),
    sample_count=32_768,
    batch_size=64,
    step_ms=5.0,
    write=_write_words,
    delivery=BatchKind.TOKENISED,
    length=_TOKENISED_LENGTH,
)


IMAGES = Recipe(
    name="images",
    version=1,
    columns=images.COLUMNS,
    sample_count=1_024,
    batch_size=64,
    step_ms=100.0,
    write=lambda folder, count: images.write(shards(folder, count)),
    s3_scale=12,
)
RECIPES = {
    recipe.name: recipe
    for recipe in (TOKENS, ROWS, TABULAR, TEXT, MIXTURE, PACKED, IMAGES, TOKENISE)
}
BATCHES_MIN = 4
"""However small the scale, so many whole batches are there."""


def generated(name: str, root: Path, scale: float = 1.0) -> Workload:
    """A workload of this name, its shards in a folder of `root`; written if it is not there yet."""
    recipe = RECIPES[name]
    count = max(int(recipe.sample_count * scale), BATCHES_MIN * recipe.batch_size)
    fingerprint = f"{name}-{count}-v{recipe.version}"
    folder = root / fingerprint
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{fingerprint}-", dir=root))
        try:
            recipe.write(new, count)
            new.chmod(0o755)
            # Another process was faster: its folder exists and is equally valid.
            with contextlib.suppress(OSError):
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return Workload(
        name,
        recipe.columns,
        recipe.batch_size,
        count,
        folder,
        fingerprint,
        recipe.step_ms,
        delivery=recipe.delivery,
        length=recipe.length,
        parts=recipe.parts(count),
    )
