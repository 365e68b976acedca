"""The samples of the ranks of these tests, and the files in which ranks report what they saw."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import torch
from dataplane_torch import DataLoader

COUNT = 48
BATCH = 4
warnings.filterwarnings("ignore")


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"id": torch.tensor(index), "x": torch.ones(2)}


class Model(torch.nn.Module):
    """As a Trainer wants it; it knows the ids that it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def forward(self, id, x):  # noqa: A002 - the name of the column
        self.seen.append(id.tolist())
        return {"loss": self.layer(x).sum()}


def loader_of(source: str, batch: int = BATCH) -> DataLoader:
    """Over a Dataset, or over some rows of the shards at a url, with a map and a collate function."""
    if source == "dataset":
        return DataLoader(Samples(), batch, shuffle=True, num_workers=1)
    made = {"map": "rows_made:parsed", "collate": "rows_made:halved"}
    return DataLoader(source, batch, shuffle=True, seed=3, where=f"id < {COUNT}", **made)


def tell(out: str, name: str, found: object) -> None:
    (Path(out) / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
