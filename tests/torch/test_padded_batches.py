"""Padded batches over real nodes: rows of similar length, as many as fit into a budget of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader, Mixture, Pack, ShardedIterableDataset, Source
from shards import parquet_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dataplane.model.errors import ConfigError

pytestmark = pytest.mark.usefixtures("shared_node")
BUDGET, MULTIPLE = 64, 4
PACK = Pack(
    "tokens", BUDGET, "pad", carry=["mask"], outputs=["labels"], multiple=MULTIPLE, pad_value=-1
)
Batch = dict[str, torch.Tensor]


def documents(count: int) -> list[list[int]]:
    """Each token is unique."""
    lengths = np.ceil(np.random.default_rng(0).lognormal(2.0, 1.0, count)).astype(int)
    return [part.tolist() for part in np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])]


@pytest.fixture
def url(tmp_path: Path) -> str:
    rows = documents(300)
    table = pa.table({
        "tokens": pa.array(rows, pa.list_(pa.int32())),
        "mask": pa.array([[token % 2 for token in row] for row in rows], pa.list_(pa.uint8())),
    })  # fmt: skip
    for shard in range(2):
        part = parquet_bytes(table.slice(150 * shard, 150), row_group_size=60)
        (tmp_path / f"{shard}.parquet").write_bytes(part)
    return str(tmp_path)


def read(url: Any, pack: Pack = PACK, **given: Any) -> list[Batch]:
    """The batches of an epoch."""
    with DataLoader(url, batch_size=None, pack=pack, **given) as loader:
        batches = list(loader)
        assert len(batches) == len(loader)
    return batches


def same(first: list[Batch], second: list[Batch]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[c], b[c]) for c in a) for a, b in pairs)


def test_padded_batches_have_every_document_once_and_never_exceed_their_tokens(url: str) -> None:
    rows, found, orders = documents(300), [], set()
    with DataLoader(url, batch_size=None, shuffle=True, pack=PACK) as loader:
        described = {one.name: one.described for one in loader.schema}
        epochs = [list(loader) for _ in range(2)]
    assert described == {
        "tokens": "int32 [B, T]",
        "mask": "uint8 [B, T]",
        "lengths": "int32 [B]",
        "labels": "int64 [B, T]",
    }
    for epoch in (*epochs, read(url)):
        found = []
        for batch in epoch:
            tokens, lengths = batch["tokens"], batch["lengths"]
            longest = int(lengths.max())
            assert tokens.shape == (len(lengths), -(-longest // MULTIPLE) * MULTIPLE)
            assert tokens.numel() <= BUDGET
            inside = torch.arange(tokens.shape[1]) < lengths[:, None]
            assert torch.equal(tokens >= 0, inside)
            assert torch.equal(batch["mask"], torch.where(inside, tokens % 2, 0).to(torch.uint8))
            for row, length, labels in zip(tokens, lengths, batch["labels"], strict=True):
                own = row[:length].tolist()
                found.append(own)
                assert labels[: length - 1].tolist() == own[1:]
                assert (labels[length:] == -100).all()
        assert sorted(itertools.chain(*found)) == list(itertools.chain(*rows))
        assert sorted(row for row in found if len(row) < BUDGET and row in rows) == [
            row for row in rows if len(row) <= BUDGET
        ]
        orders.add(str(found))
    assert len(orders) == 3
    assert len({len(epoch) for epoch in epochs}) == 1
    shared = {tuple(b["tokens"].flatten().tolist()) for b in epochs[0]}
    assert sum(tuple(b["tokens"].flatten().tolist()) in shared for b in epochs[1]) < len(shared) / 2


def test_ranks_of_any_number_have_the_same_padded_batches_also_from_the_middle(url: str) -> None:
    asked = {"shuffle": True, "balance": "cost"}
    alone = read(url, **asked)
    ranks = [read(url, **asked, dp_rank=rank, dp_size=4, name="p") for rank in range(4)]
    steps = [batch for step in zip(*ranks, strict=True) for batch in step]
    extra = steps[len(alone) :]
    assert len(extra) == -len(alone) % 4
    assert same(steps[: len(alone)], alone)
    for empty in extra:
        shapes = {name: tuple(one.shape) for name, one in empty.items()}
        assert shapes == {"tokens": (0, 0), "mask": (0, 0), "lengths": (0,), "labels": (0, 0)}
    with DataLoader(url, None, pack=PACK, **asked, dp_rank=0, dp_size=2, name="q") as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
    with DataLoader(url, None, pack=PACK, **asked, name="r") as loader:
        loader.load_state_dict(state)
        assert same(list(loader), alone[10:])


def test_padded_batches_pass_through_torchs_workers_collate_and_mixtures(url: str) -> None:
    dataset = ShardedIterableDataset(url, None, True, pack=PACK)
    torchs = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    assert same(list(torchs), read(url, shuffle=True))
    totals = read(url, shuffle=True, collate="user_functions:shape_and_sum")
    for batch, whole in zip(totals, read(url, shuffle=True), strict=True):
        assert batch["shape"].tolist() == list(whole["tokens"].shape)
        assert batch["sum"] == whole["tokens"].sum()
    sources = {f"s{at}": Source(f"{url}/{at}.parquet", weight=0.5) for at in range(2)}
    mixed = read(Mixture(sources, source_column="of", exhausted="cycle"), shuffle=True)
    for source in range(2):
        own = documents(300)[150 * source :][:150]
        seen = {
            token for b in mixed if b["of"] == source for token in b["tokens"].flatten().tolist()
        }
        assert seen - {-1} == {token for row in own for token in row}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pack": PACK, "batch_size": 4}, "batch_size=4 .*Pass batch_size=None"),
        ({"pack": PACK}, "batch_size=1 .*Pass batch_size=None"),
        ({"pack": PACK, "batch_size": None, "global_batch_size": 8}, "global_batch_size=8 .*None"),
        ({"pack": Pack("tokens", BUDGET), "batch_size": None}, 'batch_size=None.*policy="pad"'),
        (
            {"pack": Pack("tokens", BUDGET, "pad", outputs=["max_seqlen"]), "batch_size": None},
            "outputs='max_seqlen'.*choose from lengths, labels",
        ),
        (
            {"pack": Pack("tokens", BUDGET, "pad", carry=["lengths"]), "batch_size": None},
            "carry='lengths'.*a column of its own",
        ),
    ],
)
def test_what_makes_no_sense_with_padded_batches_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said), DataLoader("nowhere/", **given) as loader:
        next(iter(loader))


SIZE, WORDS, WIDTH, HEADS = 64, 50, 32, 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two layers of causal attention, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SIZE, WIDTH)
        self.mixing = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.thinking = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        x = self.words(tokens) + self.places(position_ids)
        for mix, think in zip(self.mixing, self.thinking, strict=True):
            q, k, v = mix(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
            x = x + attention(q, k, v).transpose(1, 2).flatten(-2)
            x = x + torch.tanh(think(x))
        logits: Tensor = self.out(x)
        return logits


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def by_mask(batch: dict[str, Tensor]) -> Attention:
    ids = batch["document_ids"]
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=allowed)


def by_sequences(batch: dict[str, Tensor]) -> Attention:
    """Attend as FlashAttention's functions for sequences of different lengths do."""
    rows = len(batch["tokens"])
    cuts = (batch["cu_seqlens"][:, :-1] + SIZE * torch.arange(rows)[:, None]).flatten().tolist()
    ends = [*cuts, rows * SIZE]
    assert max(np.diff(ends)) == batch["max_seqlen"].max()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [each.transpose(1, 2).flatten(0, 1).transpose(0, 1) for each in (q, k, v)]
        found = [
            causal(*(each[None, :, a:b] for each in flat))[0]
            for a, b in itertools.pairwise(ends)
            if b > a
        ]
        return torch.cat(found, dim=1).unflatten(1, (rows, SIZE)).transpose(0, 1)

    return attention


@pytest.mark.parametrize("attend", [by_mask, by_sequences])
def test_packs_give_the_loss_and_the_gradients_of_their_documents(
    tmp_path: Path,
    attend: Callable[[dict[str, Tensor]], Attention],
) -> None:
    draw = np.random.default_rng(3)
    sizes = np.minimum(np.ceil(draw.lognormal(2.5, 0.8, 40)), SIZE).astype(int)
    documents = [draw.integers(0, WORDS, size).astype(np.int32) for size in sizes]
    table = pa.table({"tokens": documents})
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(table, row_group_size=40))
    torch.manual_seed(5)
    model = Model().double()

    expected, count = torch.zeros((), dtype=torch.float64), sum(sizes) - len(sizes)
    for document in documents:
        tokens = torch.tensor(document[None].astype(np.int64))
        logits = model(tokens, torch.arange(tokens.shape[1])[None], causal)[0, :-1]
        expected = expected + cross_entropy(logits, tokens[0, 1:], reduction="sum") / count
    expected.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    pack = Pack(
        "tokens",
        SIZE,
        outputs=["position_ids", "document_ids", "labels", "cu_seqlens", "max_seqlen"],
    )
    total, packs = 0.0, 0
    with DataLoader(tmp_path / "a.parquet", 4, True, pack=pack) as loader:
        for batch in loader:
            logits = model(batch["tokens"], batch["position_ids"], attend(batch)).flatten(0, 1)
            loss = cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count
            loss.backward()
            total, packs = total + loss.item(), packs + len(batch["tokens"])
    assert packs < math.ceil(sum(sizes) / SIZE) * 1.1 < len(documents) / 2
    assert total == pytest.approx(expected.item(), rel=1e-9)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-12)
