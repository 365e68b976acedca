"""Samples that look like what people train on, made from a seed: Parquet shards of each workload.

The same name and scale give the same rows on every machine (JPEGs: with the same libjpeg).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from dataplane_bench.model import Workload
from dataplane_bench.workloads import images, numbers, tokenise

RECIPES = {recipe.name: recipe for recipe in (*numbers.RECIPES, images.RECIPE, tokenise.RECIPE)}
BATCHES_MIN = 4
"""However small the scale, so many whole batches are there."""


def generated(name: str, root: Path, scale: float = 1.0) -> Workload:
    """A workload of this name, its shards in a folder of `root`; written if it is not there yet."""
    recipe = RECIPES[name]
    count = max(int(recipe.sample_count * scale), BATCHES_MIN * recipe.batch_size)
    fingerprint = f"{name}-{count}-v{recipe.version}"
    folder = root / fingerprint
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{fingerprint}-", dir=root))
        try:
            recipe.write(new, count)
            new.chmod(0o755)
            # Another process was faster: its folder exists and is equally valid.
            with contextlib.suppress(OSError):
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return Workload(
        name,
        recipe.columns,
        recipe.batch_size,
        count,
        folder,
        fingerprint,
        recipe.step_ms,
        delivery=recipe.delivery,
        length=recipe.length,
        parts=recipe.parts(count),
    )
