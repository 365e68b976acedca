"""Packs over real nodes: batches of documents side by side, the same on any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, Pack, Source
from plan import plain
from shards import arrow_bytes, parquet_bytes

from dataplane.model.errors import ConfigError, CorruptShard, FunctionError, SpecMismatch
from dataplane.model.records import PACK_OUTPUTS

pytestmark = pytest.mark.usefixtures("shared_node")
SIZE, BLOCK = 32, 60
SUFFIXES = {
    "parquet": lambda table: parquet_bytes(table, row_group_size=BLOCK),
    "arrow": lambda table: arrow_bytes(table, rows=BLOCK),
}
Batch = dict[str, torch.Tensor]


def documents(count: int, seed: int = 0) -> list[list[int]]:
    """Each token is unique."""
    rng = np.random.default_rng(seed)
    lengths = np.ceil(rng.lognormal(2.0, 1.0, count)).astype(int).tolist()
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)
    ]


def written(folder: Path, rows: list[list[int]], suffix: str = "arrow", shards: int = 2) -> str:
    folder.mkdir()
    for shard in range(shards):
        some = rows[shard * len(rows) // shards : (shard + 1) * len(rows) // shards]
        table = pa.table({
            "tokens": pa.array(some, pa.list_(pa.int32())),
            "mask": pa.array([[token % 2 for token in row] for row in some], pa.list_(pa.uint8())),
            "text": ["x"] * len(some),
            "number": range(shard * len(rows) // shards, shard * len(rows) // shards + len(some)),
        })  # fmt: skip
        (folder / f"{shard}.{suffix}").write_bytes(SUFFIXES[suffix](table))
    return str(folder)


def read(url: Any, pack: Pack, **given: Any) -> list[Batch]:
    """The batches of an epoch."""
    size = {} if "global_batch_size" in given else {"batch_size": 4}
    with DataLoader(url, pack=pack, **size, **given) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
    return batches


def test_labels_have_no_loss_where_the_mask_of_their_token_has_none(tmp_path: Path) -> None:
    """Also across the pieces of a document that is longer than a pack."""
    rows = [*documents(100), list(range(10_000, 10_000 + 5 * SIZE))]
    url = written(tmp_path / "d", rows, "parquet")
    pack = Pack("tokens", SIZE, loss_mask="mask", dtype="int64", pad_value=-1)
    seen: set[int] = set()
    for batch in read(url, pack, shuffle=True):
        assert set(batch) == {"tokens", *PACK_OUTPUTS, "labels"}
        assert batch["tokens"].dtype == torch.int64
        labels, tokens = batch["labels"].flatten().tolist(), batch["tokens"].flatten().tolist()
        assert all(label in (-100, token + 1) for token, label in zip(tokens, labels, strict=True))
        assert not any(label % 2 == 0 for label in labels if label != -100)
        seen.update(label for label in labels if label != -100)
    assert seen == {token for row in rows for token in row[1:] if token % 2}


def test_packs_are_those_of_the_specification(tmp_path: Path) -> None:
    rows = documents(4 * BLOCK)
    url = written(tmp_path / "d", rows, "parquet")
    pack = Pack("tokens", SIZE, carry=["mask"], outputs=[])
    for epoch in (0, 3):
        with DataLoader(url, 1, True, seed=7, pack=pack, window=1000) as loader:
            loader.set_epoch(epoch)
            batches = list(loader)
        found = [batch["tokens"][0].tolist() for batch in batches]
        assert all(torch.equal(batch["mask"], batch["tokens"] % 2) for batch in batches)
        expected = []
        for block in range(4):
            own = rows[block * BLOCK : (block + 1) * BLOCK]
            key = plain.key(7, plain.PACK, epoch, block)
            for made in plain.packs([len(row) for row in own], SIZE, key):
                tokens = [own[row][begin + at] for row, begin, n, _ in made for at in range(n)]
                expected.append(tokens + [0] * (SIZE - len(tokens)))
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("policy", ["best_fit", "wrap"])
def test_global_batches_of_packs_are_the_same_for_any_number_of_ranks(
    tmp_path: Path, policy: str
) -> None:
    url = written(tmp_path / "d", documents(300))
    pack = Pack("tokens", SIZE, policy)
    balance = "cost" if policy == "wrap" else None
    asked = {"global_batch_size": 24, "shuffle": True, "end": "drop", "balance": balance}
    alone = [batch["tokens"] for batch in read(url, pack, **asked)]
    for size in (2, 3, 8) if policy == "best_fit" else (3,):
        ranks = [
            read(url, pack, dp_rank=r, dp_size=size, name=f"x{size}", **asked) for r in range(size)
        ]
        for step, whole in enumerate(alone):
            parts = [rank[step]["tokens"] for rank in ranks]
            assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)


def test_a_run_is_resumed_within_an_epoch_of_packs(tmp_path: Path) -> None:
    url = written(tmp_path / "d", documents(300))
    asked = {"batch_size": 4, "shuffle": True, "pack": Pack("tokens", SIZE)}
    whole = read(url, asked["pack"], shuffle=True)
    with DataLoader(url, **asked) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with DataLoader(url, **asked) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert [batch["tokens"].tolist() for batch in rest] == [b["tokens"].tolist() for b in whole[5:]]
    for other, said in (
        ({"pack": Pack("tokens", 2 * SIZE)}, r"loader: pack: .*64\} here"),
        ({"balance": "cost"}, r'loader: pack: .*"balanced":true.* here'),
    ):
        with (
            DataLoader(url, **{**asked, **other}) as loader,
            pytest.raises(SpecMismatch, match=said),
        ):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("long", "kept"), [("fragment", 3 * SIZE + 5), ("truncate", SIZE), ("drop", 0)]
)
def test_long_documents_are_cut_shortened_or_left_out(tmp_path: Path, long: str, kept: int) -> None:
    rows = [*documents(20)[:-1], list(range(10_000, 10_000 + 3 * SIZE + 5))]
    batches = read(written(tmp_path / "d", rows), Pack("tokens", SIZE, long=long, pad_value=-1))
    assert sum(int((batch["tokens"] >= 10_000).sum()) for batch in batches) == kept


@pytest.mark.parametrize(
    "view", [{"sample": 0.5}, {"where": "number % 2 == 1"}, {"limit": 100}], ids=str
)
def test_packs_of_a_view_have_only_its_rows(tmp_path: Path, view: dict[str, Any]) -> None:
    url = written(tmp_path / "d", documents(300))
    with DataLoader(url, 8, columns=["tokens"], lists="ragged", **view) as loader:
        expected = sorted(torch.cat([batch["tokens"].values for batch in loader]).tolist())
    batches = read(url, Pack("tokens", SIZE, pad_value=-1), shuffle=True, **view)
    tokens = torch.cat([batch["tokens"] for batch in batches])
    assert sorted(tokens[tokens >= 0].tolist()) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pack": Pack("tokens", SIZE), "columns": ["tokens"]}, r"columns=.*Pack\(column, carry"),
        ({"pack": Pack("text", SIZE)}, "'text' is text: tokenise it, with map="),
        ({"pack": Pack("nothing", SIZE)}, "nothing"),
        ({"pack": "tokens"}, "pass a Pack"),
        ({"pack": Pack("tokens", 0)}, "length=0"),
        ({"pack": Pack("tokens", 1, long="drop"), "where": "length(tokens) > 1"}, "longer length"),
        ({"pack": Pack("tokens", 1 << 20, "wrap")}, "shorter length"),
        ({"pack": Pack("tokens", SIZE), "fill_null": 0}, "to fill nulls, write a map="),
        ({"pack": Pack("tokens", SIZE, "first_fit")}, "best_fit, wrap"),
        ({"pack": Pack("tokens", SIZE, pad_value=1 << 40)}, "does not fit into int32"),
        ({"pack": Pack("tokens", SIZE, outputs=["mask"])}, "choose from position_ids"),
        ({"pack": Pack("tokens", SIZE, loss_mask="msk")}, "no column 'msk'"),
        ({"pack": Pack("tokens", SIZE, loss_mask="tokens")}, "name another column"),
        (
            {"pack": Pack("tokens", SIZE, loss_mask="mask", outputs=["document_ids"])},
            "only labels have a loss",
        ),
        ({"pack": Pack("tokens", SIZE, dtype="int16")}, 'pass "int32" or "int64"'),
        ({"pack": Pack("tokens", SIZE), "balance": "cost"}, "balance='cost': .*shuffle=True"),
        ({"pack": Pack("tokens", SIZE), "balance": True, "shuffle": True}, 'pass "cost"'),
        ({"balance": "cost", "shuffle": True}, "balance='cost': only packs"),
    ],
)
def test_packs_that_cannot_be_made_are_refused(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    url = written(tmp_path / "d", documents(20))
    with pytest.raises(ConfigError, match=said), DataLoader(url, 4, **given) as loader:
        next(iter(loader))


@pytest.mark.parametrize(
    ("where", "place"),
    [(None, "row 33"), ("id >= 32", "row 1 of those of the view from row 30 on")],
)
def test_a_document_whose_columns_differ_in_length_is_named_as_it_is_stored(
    tmp_path: Path, where: str | None, place: str
) -> None:
    tokens = [[] if 5 <= row < 10 else [row] * 3 for row in range(50)]  # a block has no packs
    masks = [row[1:] if at == 33 else row for at, row in enumerate(tokens)]
    kind = pa.list_(pa.int32())
    table = {"id": range(50), "tokens": pa.array(tokens, kind), "mask": pa.array(masks, kind)}
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(pa.table(table), row_group_size=5))
    counted = read(tmp_path / "a.parquet", Pack("tokens", 16), where=where)
    assert len(counted) > 0
    with pytest.raises(CorruptShard, match=rf"{place}: column 'mask' has 2 .*length\(mask\) =="):
        read(tmp_path / "a.parquet", Pack("tokens", 16, carry=["mask"]), where=where)


def test_packs_of_several_sources_in_a_batch_are_not_balanced() -> None:
    mixture = Mixture({"a": Source("a/", weight=1), "b": Source("b/", weight=1)})
    with pytest.raises(ConfigError, match=r"balance='cost': .*unit=.batch."):
        DataLoader(mixture, 4, True, pack=Pack("tokens", SIZE), balance="cost")


def test_batches_of_one_source_each_have_balanced_packs(tmp_path: Path) -> None:
    """The same for any number of ranks, and resumed; each source has all of its packs."""
    chance = np.random.default_rng(1)
    counts = {"a": 8000, "b": 5000}
    urls = {
        name: written(
            tmp_path / name, [[at] * int(chance.integers(1, SIZE)) for at in range(count)]
        )
        for name, count in counts.items()
    }
    mixture = Mixture(
        {name: Source(url, weight=counts[name]) for name, url in urls.items()},
        unit="batch", source_column="source", exhausted="renormalise",
    )  # fmt: skip
    asked = {"global_batch_size": 16, "shuffle": True, "window": 10**6, "lanes": 1}
    spread = []
    for balance in (None, "cost"):
        pack, asked["balance"] = Pack("tokens", SIZE), balance
        batches = read(mixture, pack, **asked)
        assert all(len(set(batch["source"].tolist())) == 1 for batch in batches)
        costs = torch.stack(
            [batch["cu_seqlens"].diff(dim=1).double().square().sum(1) for batch in batches]
        )
        spread.append(float(costs.amax(1).sum() / costs.mean(1).sum()) - 1)
    assert spread[1] < spread[0] / 3
    ranks = [read(mixture, pack, dp_rank=r, dp_size=2, name="two", **asked) for r in range(2)]
    for step, whole in enumerate(batches):
        parts = [rank[step]["tokens"] for rank in ranks]
        assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole["tokens"])
    with DataLoader(mixture, pack=pack, **asked) as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
    with DataLoader(mixture, pack=pack, **asked) as loader:
        loader.load_state_dict(state)
        assert torch.equal(next(iter(loader))["tokens"], batches[7]["tokens"])
    plain = {**asked, "balance": None}
    with DataLoader(mixture, pack=pack, **plain) as loader, pytest.raises(SpecMismatch):
        loader.load_state_dict(state)


@pytest.mark.usefixtures("own_node")
def test_packs_over_a_map_are_counted_once_and_refused_if_it_returns_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"txt": [f"{number}" for number in range(200)]})
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(table, row_group_size=50))
    times = tmp_path / "times.txt"
    monkeypatch.setenv("TIMES_FILE", str(times))
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    options = {"map": "user_functions:as_a_file_says", "pack": Pack("ids", 16, outputs=[])}
    times.write_text("4")
    # A file that another node has just removed.
    (tmp_path / "cache" / "packs").mkdir(parents=True)
    (tmp_path / "cache" / "packs" / "gone.counts").symlink_to(tmp_path / "nothing")
    made = []
    for _ in range(2):
        with DataLoader(tmp_path / "a.parquet", 4, **options) as loader:
            assert len(torch.cat([batch["ids"] for batch in loader])) == 52
            files = (tmp_path / "cache" / "packs").glob("*.counts")
            (counted,) = (one for one in files if not one.is_symlink())
            made.append(counted.stat().st_mtime_ns)
    assert made[0] == made[1]
    times.write_text("8")
    with (
        pytest.raises(CorruptShard, match=r"make 25 packs, and made 13 .*`version`"),
        DataLoader(tmp_path / "a.parquet", 4, **options) as loader,
    ):
        list(loader)


def test_packs_of_a_mixture_have_every_document_of_a_pass_once(tmp_path: Path) -> None:
    rows = documents(150)
    large, small = rows[:120], rows[120:]
    urls = [
        written(tmp_path / "large", large, shards=1),
        written(tmp_path / "small", small, shards=1),
    ]
    pack = Pack("tokens", SIZE, pad_value=-1, outputs=["document_ids"])

    def sources() -> Mixture:
        large, small = (Source(url, weight=0.5) for url in urls)
        return Mixture({"large": large, "small": small}, exhausted="cycle", source_column="of")

    asked = {"pack": pack, "shuffle": True}
    counts = [len(torch.cat([b["tokens"] for b in read(url, pack)])) for url in urls]
    with DataLoader(sources(), 4, **asked) as loader:
        epochs = [list(loader) for _ in range(2)]
    of = torch.cat([batch["of"] for epoch in epochs for batch in epoch])
    tokens = torch.cat([batch["tokens"] for epoch in epochs for batch in epoch])
    for source, own in enumerate((large, small)):
        some = tokens[of == source]
        seen = Counter(some[some >= 0].tolist())
        assert set(seen) == {token for row in own for token in row}
        times = len(some) // counts[source]  # these passes are complete, and maybe one more begun
        assert times >= 2
        assert set(seen.values()) <= {times, times + 1}


def noted(folder: Path, texts: list[str]) -> str:
    """Two shards of blocks of 100 rows for user_functions.noted."""
    folder.mkdir()
    for shard in range(2):
        rows = range(shard * len(texts) // 2, (shard + 1) * len(texts) // 2)
        some = [texts[row] for row in rows]
        files = [str(folder / "calls")] * len(rows)
        table = pa.table({"row": list(rows), "txt": some, "file": files})
        (folder / f"{shard}.parquet").write_bytes(parquet_bytes(table, row_group_size=100))
    return f"{folder}/*.parquet"


def calls(folder: Path) -> Counter[int]:
    """How often the function was called over each block, by its first row; not over the first rows
    alone, which says what columns there are. The next call starts from zero.
    """
    notes = [line.split() for line in (folder / "calls").read_text().splitlines()]
    (folder / "calls").unlink()
    return Counter(int(first) for first, count in notes if int(count) == 100)


def test_a_map_is_called_once_over_each_block_for_counting_and_all_epochs(tmp_path: Path) -> None:
    # Later blocks are much larger than the first rows let expect.
    url = noted(tmp_path / "d", [f"{row}" * (1 + row // 40) for row in range(800)])
    once = Counter(dict.fromkeys(range(0, 800, 100), 1))
    asked = {"shuffle": True, "map": "user_functions:noted"}
    with DataLoader(url, 4, pack=Pack("tokens", 64), **asked) as loader:
        tokens = [sum(int((b["document_ids"] >= 0).sum()) for b in loader) for _ in range(2)]
    assert tokens == [sum(len(f"{row}") * (1 + row // 40) for row in range(800))] * 2
    assert calls(tmp_path / "d") == once
    with DataLoader(url, 4, **asked) as loader:
        assert sum(len(batch["tokens"]) for batch in loader) == 800
    assert calls(tmp_path / "d") == once


def test_a_count_that_was_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.touch()
    url = noted(tmp_path / "d", ["some text" if row != 777 else str(bad) for row in range(800)])
    loader = DataLoader(url, 4, map="user_functions:noted", pack=Pack("tokens", 64))
    with pytest.raises(FunctionError, match="is a file"):
        len(loader)
    assert calls(tmp_path / "d")[0] == 1
    bad.unlink()
    with loader:
        assert len(loader)
        left = calls(tmp_path / "d")
        assert left[700] == 1
        assert not left[0]
