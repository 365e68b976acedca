"""Clicks from a wide table: stacked numbers, codes of categories, and two splits by hash.

python examples/recommender.py, or torchrun --nproc-per-node 2 examples/recommender.py
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ranks
import torch
from dataplane_torch import DataLoader
from torch import nn
from torch.nn import functional

FEATURES, USERS = [f"f{i:02d}" for i in range(13)], 10_000


def make(folder: Path) -> None:
    """Four days; people of one country click more often."""
    draw = np.random.default_rng(0)
    for day in range(4):
        count = 20_000
        columns = {name: draw.normal(size=count).astype(np.float32) for name in FEATURES}
        columns["age"] = pa.array(
            [None if i % 9 == 0 else i % 80 for i in range(count)], pa.int32()
        )
        columns["user"] = draw.integers(0, 1 << 40, count)
        country = columns["country"] = draw.choice(["at", "de", "fr", "it"], count)
        columns["clicked"] = (
            columns["f00"] + 2 * (country == "at") > draw.normal(size=count)
        ).astype(np.int8)
        pq.write_table(pa.table(columns), folder / f"day-{day}.parquet", row_group_size=5000)


class Model(nn.Module):
    """Embeddings of country and user beside the numbers."""

    def __init__(self, countries: int):
        super().__init__()
        self.countries, self.users = nn.Embedding(countries, 8), nn.Embedding(USERS, 8)
        self.top = nn.Sequential(nn.Linear(len(FEATURES) + 17, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        parts = [batch["x"], self.countries(batch["country"]), self.users(batch["user"] % USERS)]
        return self.top(torch.cat([*parts, batch["age"][:, None] / 80], 1)).squeeze(1)


def main() -> None:
    given = ranks.arguments("recommender", steps=100)
    device = ranks.start(given.folder, make)
    data = given.data or f"{given.folder}/day-*.parquet"
    options = {
        "columns": [*FEATURES, "age", "user", "country", "clicked"], "stack": {"x": FEATURES},
        "codes": ["country"], "fill_null": {"age": -1},
        "dtype": {"clicked": "float32", "age": "float32"},
        "device": device,
    }  # fmt: skip
    with (
        DataLoader(
            data, global_batch_size=1024, shuffle=True, seed=1, split=("train", 0.9), **options
        ) as train,
        DataLoader(data, 4096, split=("validation", 0.1), **options) as validation,
    ):
        torch.manual_seed(0)
        model = ranks.wrapped(Model(len(train.categories("country"))), device)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        step = ranks.load(given.folder, model, optimizer, train)
        while step < given.steps:
            for batch in train:
                loss = functional.binary_cross_entropy_with_logits(model(batch), batch["clicked"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == given.steps:
                    break
            ranks.save(given.folder, model, optimizer, train, step)
            with torch.no_grad():
                right = [(model(batch) > 0) == batch["clicked"].bool() for batch in validation]
            share = torch.cat(right).float().mean()  # of the rows that this rank got
            ranks.say(f"step {step}: loss {loss.item():.3f}, {share:.1%} right")


if __name__ == "__main__":
    main()
