"""A transformer over bytes, small enough to learn something on two CPU cores in a minute."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Layer(nn.Module):
    """Causal attention, then a feed-forward network, each on normalized input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_net = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes:  x, result: float32[batch, length, width]."""
        batch, length, width = x.shape
        mixed = self.attention_in(self.before_attention(x))
        split = mixed.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.net(self.before_net(x))
        return result


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, context: int, width: int = 64, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(context, width))
        nn.init.normal_(self.token.weight, std=0.02)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes:  tokens: int[batch, length], length <= context.
        result: float32[batch, length, VOCABULARY], logits.
        """
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        result: Tensor = self.out(self.layers(x))
        return result
