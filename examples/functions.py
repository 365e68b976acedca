"""Functions of the examples that a node's workers call: a light module, without torch."""

import io

import numpy as np
from PIL import Image

SIDE = 64


class Tokenise:
    """Bytes as tokens; in its place, a tokenizer that is loaded once in each worker."""

    reads = ("text",)
    version = "bytes 1"

    def __call__(self, columns):
        return {"tokens": [[*text.encode(), 256] for text in columns["text"].to_pylist()]}


class Chat:
    """Tokens of a prompt and its answer; only the answer has labels."""

    reads = ("prompt", "answer")
    version = "bytes 1"

    def __call__(self, columns):
        rows = zip(columns["prompt"].to_pylist(), columns["answer"].to_pylist(), strict=True)
        pairs = [([*prompt.encode()], [*answer.encode(), 0]) for prompt, answer in rows]
        return {
            "input_ids": [prompt + answer for prompt, answer in pairs],
            "labels": [[-100] * len(prompt) + answer for prompt, answer in pairs],
        }


def pad(batch):
    """Arrays of one width for a model of transformers."""
    shape = len(batch["labels"]), max(map(len, batch["labels"]))
    padded = {"input_ids": np.zeros(shape, np.int64), "labels": np.full(shape, -100, np.int64)}
    for name, rows in padded.items():
        for row, tokens in zip(rows, batch[name], strict=True):
            row[: len(tokens)] = tokens
    lengths = np.array([[len(tokens)] for tokens in batch["labels"]])
    return {**padded, "attention_mask": (np.arange(shape[1]) < lengths).astype(np.int64)}


def scene(batch, generator):
    """A random crop of each picture, and the centres of its boxes as a map of classes."""
    pictures, targets = [], []
    for file, boxes, classes in zip(batch["image"], batch["boxes"], batch["classes"], strict=True):
        picture = Image.open(io.BytesIO(file))
        x, y = (int(generator.integers(size - SIDE + 1)) for size in picture.size)
        pictures.append(np.asarray(picture.crop((x, y, x + SIDE, y + SIDE))))
        target = np.zeros((SIDE // 8, SIDE // 8), np.int64)  # 0: nothing
        for box, kind in zip(np.reshape(boxes, (-1, 4)), classes, strict=True):
            across, down = ((box[:2] + box[2:]) / 2 - (x, y)).astype(int) // 8
            if 0 <= across < SIDE // 8 and 0 <= down < SIDE // 8:
                target[down, across] = kind + 1
        targets.append(target)
    return {"image": np.stack(pictures), "target": np.stack(targets)}
