"""Mixtures of datasets over a real node."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, Pack, Source

from dataplane.model.errors import ConfigError, CorruptShard, SpecMismatch
from dataplane.model.records import View

COUNTS = {"web": 400, "code": 150, "math": 40}
WEIGHTS = {"web": 0.7, "code": 0.2, "math": 0.1}
SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 5, "lanes": 4, "global_batch_size": 24}


def written(folder: Path, name: str, count: int, first: int, **more: Any) -> None:
    """Two shards of samples whose ids tell the source."""
    for shard, ids in enumerate(np.array_split(np.arange(first, first + count), 2)):
        columns = {"id": ids, "text": [f"{name} {one}" for one in ids.tolist()]}
        columns |= {key: [value] * len(ids) for key, value in more.items()}
        folder.joinpath(name).mkdir(exist_ok=True)
        table = pa.table(columns)
        pq.write_table(table, folder / name / f"{shard}.parquet", row_group_size=16)


@pytest.fixture
def folder(tmp_path: Path, shared_node: None) -> Path:
    for at, (name, count) in enumerate(COUNTS.items()):
        written(tmp_path, name, count, 10_000 * at)
    return tmp_path


def mixed(folder: Path, weights: dict[str, float] | None = None, **options: Any) -> Mixture:
    weights = weights or WEIGHTS
    sources = {name: Source(folder / name, weight=weight) for name, weight in weights.items()}
    return Mixture(sources, **options)


def test_errors_name_the_source_and_its_url(folder) -> None:
    for options, said in [
        ({"columns": ["txt"]}, r"there is no column 'txt'; did you mean 'text'\?"),
        ({"where": "cots > 1"}, "where: there is no column 'cots'"),
    ]:
        named = rf"^source '(\w+)' \(/.*/\1\): {said}"
        with DataLoader(mixed(folder), **options) as loader:  # noqa: SIM117
            with pytest.raises(ConfigError, match=named):
                len(loader)
    (folder / "code" / "1.parquet").write_bytes(b"PAR1")
    with (
        DataLoader(mixed(folder)) as loader,
        pytest.raises(CorruptShard, match=r"^source .code.: file:"),
    ):
        len(loader)


def test_batches_have_the_weights_share_of_each_source(folder) -> None:
    with DataLoader(mixed(folder, source_column="from"), **SHUFFLED) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
        assert loader.sources == ("web", "code", "math")
    sources = torch.cat([batch["from"] for batch in batches])
    assert sources.dtype == torch.int32
    ids = torch.cat([batch["id"] for batch in batches])
    assert torch.equal(ids // 10_000, sources)
    for batch in batches:
        names = [text.split()[0] for text in batch["text"]]
        assert names == [loader.sources[one] for one in batch["from"].tolist()]
    assert len(ids.unique()) == len(ids)
    # The epoch ends when the third source is exhausted.
    counts = sources.bincount().tolist()
    assert counts[2] == 40
    assert np.abs(np.array(counts) - len(ids) * np.array([0.7, 0.2, 0.1])).max() < 4 * 3.4
    for batch in batches[:-1]:
        assert abs((batch["from"] == 0).sum() - 0.7 * 24) < 4


def test_shares_may_follow_from_sizes_passes_and_lengths(folder) -> None:
    def counted(mixture: Mixture) -> np.ndarray:
        with DataLoader(mixture, batch_size=50) as loader:
            ids = np.concatenate([batch["id"].numpy() for batch in loader])
        return np.bincount(ids // 10_000, minlength=3)

    urls = {name: folder / name for name in COUNTS}
    cycled = {"exhausted": "cycle", "length": 590}
    assert np.abs(counted(Mixture(urls, temperature=1, **cycled)) - [400, 150, 40]).max() < 4
    passes = {"web": 0.25, "code": 1, "math": 2}
    sources = {name: Source(urls[name], passes=count) for name, count in passes.items()}
    found = counted(Mixture(sources))
    assert np.abs(found - [100, 150, 80]).max() < 4
    sources = {
        name: Source(urls[name], weight=1, mean_length=length)
        for name, length in {"web": 100, "code": 200, "math": 400}.items()
    }
    # As many tokens of each source: 58,800 of all.
    found = counted(Mixture(sources, unit="tokens", exhausted="cycle", length=58_800))
    assert np.abs(found - [196, 98, 49]).max() < 4


def test_a_pack_has_as_many_tokens_as_it_is_long(tmp_path, shared_node) -> None:
    """Documents of the sources differ in length, and their packs do not."""
    for at, (name, tokens) in enumerate({"short": 3, "long": 16}.items()):
        table = pa.table({"tokens": pa.array([[at] * tokens] * 200, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=50)
    sources = {name: Source(tmp_path / f"{name}.parquet", weight=1) for name in ("short", "long")}
    length = "0.64K tokens"
    mixture = Mixture(
        sources, unit="tokens", exhausted="cycle", length=length, source_column="from"
    )
    with DataLoader(mixture, 4, pack=Pack("tokens", 16)) as loader:
        batches = list(loader)
    assert [batch["tokens"].shape for batch in batches] == [(4, 16)] * 10
    assert sum(int(batch["from"].sum()) for batch in batches) == 20


def test_too_many_sources_and_entries_are_refused_before_any_is_read() -> None:
    urls = {f"s{at}": f"/nowhere/{at}" for at in range(1025)}
    with pytest.raises(ConfigError, match="a mixture has 1 to 1024 sources, not 1025"):
        Mixture(urls, temperature=1)
    weights = {f"s{at}": 1 for at in range(20)}
    sources = {name: Source(urls[name], weight=1) for name in weights}
    for names, most in ((["s0", "s1"], 4096), (list(sources), 3276)):
        some, entry = {name: sources[name] for name in names}, dict.fromkeys(names, 1)
        Mixture(some, schedule=[(1 + step, entry) for step in range(most)])
        with pytest.raises(ConfigError, match=f"more than {most} entries for {len(names)} sources"):
            Mixture(some, schedule=((1 + step, entry) for step in range(10**9)))


def test_sources_with_other_columns_are_refused_with_a_table(folder) -> None:
    written(folder, "odd", 20, 50_000, lang="en")
    pq.write_table(
        pa.table({"id": np.arange(5, dtype=np.int32), "text": ["a"] * 5}), folder / "small.parquet"
    )
    weights = {"web": 1.0, "odd": 1.0}
    with (
        closing(DataLoader(mixed(folder, weights), batch_size=4)) as loader,
        pytest.raises(ConfigError, match="different columns") as caught,
    ):
        len(loader)
    assert [line.split() for line in str(caught.value).splitlines()[1:3]] == [
        ["column", "web", "odd"],
        ["lang", "(none)", "string"],
    ]
    with DataLoader(mixed(folder, weights), batch_size=4, columns=["id", "text"]) as loader:
        assert next(iter(loader)).keys() == {"id", "text"}
    sources = {"web": Source(folder / "web", 1), "small": Source(folder / "small.parquet", 1)}
    with (
        closing(DataLoader(Mixture(sources), batch_size=4)) as loader,
        pytest.raises(ConfigError, match=r"id +int64 +int32"),
    ):
        len(loader)


def test_more_lanes_than_a_round_can_have_are_refused(folder) -> None:
    urls = {name: folder / name for name in COUNTS}
    for shuffle in (True, False):
        with pytest.raises(ConfigError, match=f"lanes={1 << 30}: {1 << 20} are possible"):
            len(DataLoader(Mixture(urls, temperature=1), 8, shuffle, lanes=1 << 30))


def test_a_dataset_that_is_two_sources_is_refused(folder) -> None:
    sources = {"a": Source(folder / "web", weight=1), "b": Source(folder / "web", weight=2)}
    with (
        closing(DataLoader(Mixture(sources), batch_size=4)) as loader,
        pytest.raises(ConfigError, match="make one source"),
    ):
        len(loader)


def test_a_state_of_other_sources_is_refused(folder) -> None:
    with DataLoader(mixed(folder), **SHUFFLED) as loader:
        state = loader.state_dict()
    with (
        closing(DataLoader(mixed(folder, {"web": 0.5, "code": 0.5}), **SHUFFLED)) as loader,
        pytest.raises(SpecMismatch, match=r"sources: .*math"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "sources"),
        ({"a": Source("x")}, "weight"),
        ({"a": Source("x", weight=1), "b": Source("y", passes=1)}, "weight"),
        ({"a": Source("x", weight=1, passes=1)}, "weight"),
        ({"a": Source("x", weight=-1)}, "weight"),
        ({"a": Source("x", weight=float("nan"))}, "weight"),
        ({"a": Source("x", weight=10**400)}, "weight"),
        ({"a": Source("x", passes=0)}, "passes"),
        ({"a": Source("x", passes=1e300)}, "passes"),
        ({"a": Source("x", weight=1, max_passes=0)}, "max_passes"),
        ({"": Source("x", weight=1)}, "sources"),
        ({1: Source("x", weight=1)}, "sources"),
    ],
)
def test_mixtures_that_are_none_are_refused(given: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture(given)
    assert caught.value.nouns["field"] == field
    assert "max_passes" not in field or "source 'a': max_passes=0" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"unit": "bytes"}, {"exhausted": "never"}, {"length": 0}, {"temperature": 0},
     {"temperature": 1.0}, {"exhausted": ["stop"]}, {"source_column": 3}, {"length": "10B"},
     {"length": "0 tokens", "unit": "tokens"}, {"length": "1.5 samples"}, {"length": "9 tokens"}],
)  # fmt: skip
def test_options_of_mixtures_that_are_none_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Mixture({"a": Source("x", weight=1)}, **options)


@pytest.mark.parametrize(
    ("length", "count"),
    [("10B tokens", 10**10), ("1.5 t TOKENS", 15 * 10**11), ("1_000tokens", 1000), (7, 7)],
)
def test_a_length_may_be_a_number_of_tokens_in_words(length: Any, count: int) -> None:
    assert Mixture({"a": Source("x", weight=1)}, unit="tokens", length=length).length == count


def test_numbers_of_numpy_are_weights() -> None:
    weights = {"a": np.float32(0.5), "b": np.int64(2)}
    mixture = Mixture({name: Source(name, weight=weight) for name, weight in weights.items()})
    urls = dict.fromkeys(weights, ("x",))
    asked = mixture.asked(urls, dict.fromkeys(weights, View()))
    assert [source.weight for source in asked.sources] == [0.5, 2.0]


def test_sources_without_a_url_are_named(folder) -> None:
    with pytest.raises(ConfigError, match="source 'b'"):
        DataLoader(Mixture({"a": Source(folder, weight=1), "b": Source([], weight=1)}))
