"""Classes of pictures in tars, as on ImageNet: decoded, cropped and flipped by the node.

python examples/images.py, or torchrun --nproc-per-node 2 examples/images.py
"""

import io
import tarfile
from pathlib import Path

import numpy as np
import ranks
import torch
from dataplane_torch import (
    CenterCrop,
    DataLoader,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
    ToLayout,
)
from PIL import Image
from torch.nn import functional

SIDE, CLASSES = 64, 8


def make(folder: Path) -> None:
    """Pictures whose colour is their class."""
    draw = np.random.default_rng(0)
    for name, count in (("train-000", 320), ("train-001", 320), ("val-000", 100)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for number in range(count):
                colour = [255 * (number % CLASSES >> bit & 1) for bit in range(3)]
                noise = draw.integers(-90, 90, (96, 128, 3))
                sink = io.BytesIO()
                Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(sink, "JPEG")
                files = {".jpg": sink.getvalue(), ".cls": str(number % CLASSES).encode()}
                for suffix, content in files.items():
                    entry = tarfile.TarInfo(f"{number:06}{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def network() -> torch.nn.Module:
    """A few convolutions; put resnet50() here."""
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [
            torch.nn.Conv2d(before, after, 3, 2, 1),
            torch.nn.BatchNorm2d(after),
            torch.nn.ReLU(),
        ]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, CLASSES)]
    return torch.nn.Sequential(*layers, *head)


def main() -> None:
    given = ranks.arguments("images", steps=40)
    device = ranks.start(given.folder, make)
    data = given.data or given.folder
    last = [
        ToDtype("float32"),
        Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ToLayout("CHW"),
    ]
    options = {"columns": ["jpg", "cls"], "device": device}
    training = {"jpg": [RandomResizedCrop(SIDE), RandomHorizontalFlip(), *last]}
    evaluation = {"jpg": [Resize(SIDE + 8), CenterCrop(SIDE), *last]}
    with (
        DataLoader(
            f"{data}/train-*.tar",
            global_batch_size=32,
            shuffle=True,
            seed=1,
            transforms=training,
            **options,
        ) as train,
        DataLoader(f"{data}/val-*.tar", 32, transforms=evaluation, **options) as val,
    ):
        torch.manual_seed(0)
        model = ranks.wrapped(network(), device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step = ranks.load(given.folder, model, optimizer, train)
        while step < given.steps:
            model.train()
            for batch in train:
                loss = functional.cross_entropy(model(batch["jpg"]), batch["cls"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == given.steps:
                    break
            ranks.save(given.folder, model, optimizer, train, step)
            model.eval()
            right = torch.zeros(2, device=device)
            with torch.no_grad():
                for batch in val:
                    hits = model(batch["jpg"]).argmax(1) == batch["cls"]
                    right += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(right)
            ranks.say(
                f"step {step}: loss {loss.item():.3f}, {int(right[0])} of {int(right[1])} right"
            )


if __name__ == "__main__":
    main()
