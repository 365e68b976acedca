"""The function that workers of a node call over the rows of these tests."""

from __future__ import annotations

from typing import Any

import numpy as np


def parsed(columns: Any) -> dict[str, Any]:
    """Numbers of texts."""
    vectors = [np.array(text.split(), np.float32) for text in columns["text"].to_pylist()]
    return {"id": columns["id"], "x": np.stack(vectors)}


def halved(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with smaller numbers."""
    return {**batch, "x": batch["x"] / 2}
