"""A model that is trained on packs has the losses and gradients of the same documents by themselves.

Each document is in one pack, attention stays within documents, and labels within rows: packing
changes how much of a batch is padding, and nothing that a model learns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from dataplane_torch import DataLoader, Pack
from shards import parquet_bytes
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("shared_node")
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


def by_flex_attention(batch: dict[str, Tensor]) -> Attention:
    ids = batch["document_ids"]
    mask = create_block_mask(
        lambda b, _, i, j: (ids[b, i] == ids[b, j]) & (i >= j), len(ids), None, SIZE, SIZE, "cpu"
    )
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def by_sequences(batch: dict[str, Tensor]) -> Attention:
    """As FlashAttention's functions for sequences of different lengths do."""
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


@pytest.mark.parametrize("attend", [by_mask, by_flex_attention, by_sequences])
def test_packs_give_the_loss_and_the_gradients_of_their_documents(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attend: Callable[[dict[str, Tensor]], Attention],
) -> None:
    # Without its compiler, which starts processes that stay, and with a folder that goes.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(f"{flex_attention.__module__}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
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
    # FlexAttention has gradients on accelerators only.
    learns = attend is not by_flex_attention
    total, packs = 0.0, 0
    with (
        DataLoader(tmp_path / "a.parquet", 4, True, pack=pack) as loader,
        torch.set_grad_enabled(learns),
    ):
        for batch in loader:
            logits = model(batch["tokens"], batch["position_ids"], attend(batch)).flatten(0, 1)
            loss = cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count
            if learns:
                loss.backward()
            total, packs = total + loss.item(), packs + len(batch["tokens"])
    assert packs < math.ceil(sum(sizes) / SIZE) * 1.1 < len(documents) / 2
    assert total == pytest.approx(expected.item(), rel=1e-9)
    if learns:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-12)
