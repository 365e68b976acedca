"""Centres of boxes in pictures, cropped together with their boxes by a function of the node.

python examples/detection.py, or torchrun --nproc-per-node 2 examples/detection.py
"""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ranks
import torch
from dataplane_torch import DataLoader
from PIL import Image
from torch.nn import functional

CLASSES = 3


def make(folder: Path) -> None:
    """Squares of three colours on grey; a box is x0, y0, x1, y1 in pixels."""
    draw, rows = np.random.default_rng(0), []
    for number in range(512):
        picture = np.full((96, 128, 3), 128, np.uint8)
        boxes, classes = [], []
        for _ in range(number % 4):
            x, y, kind = (
                int(draw.integers(112)),
                int(draw.integers(80)),
                int(draw.integers(CLASSES)),
            )
            picture[y : y + 16, x : x + 16] = 255 * np.eye(3, dtype=np.uint8)[kind]
            boxes += [x, y, x + 16, y + 16]
            classes.append(kind)
        sink = io.BytesIO()
        Image.fromarray(picture).save(sink, "PNG")
        rows.append({"image": sink.getvalue(), "boxes": boxes, "classes": classes})
    kinds = [
        ("image", pa.binary()),
        ("boxes", pa.list_(pa.int32())),
        ("classes", pa.list_(pa.int64())),
    ]
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    pq.write_table(table, folder / "scenes.parquet", row_group_size=64)


def network() -> torch.nn.Module:
    """A class for each cell of 8 x 8 pixels."""
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Conv2d(64, 1 + CLASSES, 1))


def main() -> None:
    given = ranks.arguments("detection", steps=60)
    device = ranks.start(given.folder, make)
    with DataLoader(
        given.data or f"{given.folder}/scenes.parquet", global_batch_size=16, shuffle=True, seed=1,
        lists="ragged", collate="functions:scene", device=device,
    ) as loader:  # fmt: skip
        torch.manual_seed(0)
        model = ranks.wrapped(network(), device)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        step = ranks.load(given.folder, model, optimizer, loader)
        while step < given.steps:
            for batch in loader:
                cells = model(batch["image"].permute(0, 3, 1, 2).float() / 255)
                weight = torch.tensor(
                    [0.05] + [1.0] * CLASSES, device=device
                )  # most cells are empty
                loss = functional.cross_entropy(cells, batch["target"], weight)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % 20 == 0 or step == given.steps:
                    ranks.say(f"step {step}: loss {loss.item():.3f}")
                    ranks.save(given.folder, model, optimizer, loader, step)
                if step == given.steps:
                    break


if __name__ == "__main__":
    main()
