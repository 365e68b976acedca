"""A small GPT over packed documents of two sources, as nanoGPT trains one.

python examples/language_model.py, or torchrun --nproc-per-node 2 examples/language_model.py
"""

import json
import random
from pathlib import Path

import ranks
import torch
from dataplane_torch import DataLoader, Mixture, Pack, Source
from torch import nn
from torch.nn import functional

LENGTH, WIDTH, BATCH = 256, 64, 8


def make(folder: Path) -> None:
    """Two sources of text."""
    draw = random.Random(0)
    words = {
        "web": ["a", "model", "reads", "the", "page", "and", "learns"],
        "code": ["def", "return", "x", "=", "y", "+", "1"],
    }
    for name, known in words.items():
        rows = [{"text": " ".join(draw.choices(known, k=draw.randint(5, 90)))} for _ in range(4000)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


class Block(nn.Module):
    """Attention within each document, then a perceptron."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, within):
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*heads, attn_mask=within[:, None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Two blocks over bytes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(257, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch):
        ids = batch["document_ids"]
        within = (ids[:, :, None] == ids[:, None, :]).tril()
        x = self.tokens(batch["tokens"]) + self.places(batch["position_ids"])
        for block in self.blocks:
            x = block(x, within)
        logits = x @ self.tokens.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def main() -> None:
    given = ranks.arguments("language-model", steps=60)
    device = ranks.start(given.folder, make)
    data = given.data or given.folder
    mixture = Mixture(
        {
            "web": Source(f"{data}/web.jsonl", weight=0.7),
            "code": Source(f"{data}/code.jsonl", weight=0.3),
        },
        exhausted="cycle",
        length=4000,
    )
    outputs = ["document_ids", "position_ids", "labels"]
    with DataLoader(
        mixture, global_batch_size=BATCH, shuffle=True, seed=1, map="functions:Tokenise",
        pack=Pack("tokens", LENGTH, dtype="int64", outputs=outputs), device=device,
    ) as loader:  # fmt: skip
        torch.manual_seed(0)
        model = ranks.wrapped(GPT(), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = ranks.load(given.folder, model, optimizer, loader)
        while step < given.steps:
            for batch in loader:
                loss = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % 10 == 0 or step == given.steps:
                    ranks.say(f"step {step}: loss {loss.item():.3f}")
                    ranks.save(given.folder, model, optimizer, loader, step)
                if step == given.steps:
                    break


if __name__ == "__main__":
    main()
