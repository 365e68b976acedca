"""The manifest of a dataset whose samples are made of the rows of blocks: packs, or what a map
returns.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
from msgspec import structs

from dataplane.model.errors import ConfigError
from dataplane.model.records import View
from dataplane.plan import texts
from dataplane.plan.manifest import Manifest
from dataplane.plan.packs import PACK_BITS, Packing
from dataplane.plan.texts import Int64

NUMBERS = len(Packing.__struct_fields__)


def made(manifest: Manifest, view: View, counts: Int64) -> Manifest:
    """Return the manifest of a view's samples, from that of its rows, of which the blocks make this
    many samples.

    Shapes:  counts: int64[K].
    Raises:  As `packed`.
    """
    samples = packed(manifest, counts)
    return (
        samples
        if view.pack is not None
        else replace(samples, documents=None, given=samples.documents)
    )


def packed(manifest: Manifest, counts: Int64) -> Manifest:
    """Return the manifest with this many packs of each block as samples. Blocks without packs are
    left out.

    Shapes:  counts: int64[K].
    Raises:  ConfigError: there are no packs, or too many in one block.
    """
    kept = np.flatnonzero(counts)
    most = int(counts.max(initial=0))
    if most >> PACK_BITS:
        raise ConfigError(
            f"a block has {most} packs, but at most {(1 << PACK_BITS) - 1} are possible: choose"
            " longer packs",
            field="pack",
        )
    return replace(
        manifest,
        shards=manifest.shards.keeping(kept),
        block_shard=manifest.block_shard[kept],
        block_rows=counts[kept],
        block_offset=manifest.block_offset[kept],
        block_length=manifest.block_length[kept],
        block_decoded=manifest.block_decoded[kept],
        column_places=None,
        whole=manifest.whole or manifest,
        kept=kept if manifest.kept is None else manifest.kept[kept],
        documents=manifest.block_rows[kept],
    )


def row_counts(manifest: Manifest) -> Int64:
    """Return the rows of each block, which are its samples unless these are packs.

    Shapes:  result: int64[K].
    """
    return manifest.block_rows if manifest.documents is None else manifest.documents


def given_counts(manifest: Manifest) -> Int64:
    """Return the rows of each block from which its samples are made.

    Shapes:  result: int64[K].
    """
    return row_counts(manifest) if manifest.given is None else manifest.given


def counts_name(manifest: Manifest, view: View, seed: int, code: str) -> str:
    """Return the name under which counted packs of a view of this dataset are kept: 32 hex digits.
    The seed is 0 if the view's map takes no random numbers, and `code` is the hash of the map's
    file; "" without one. Rows that a map makes are counted like packs.
    """
    recipe = structs.asdict(structs.replace(view, collate="", pack=None))
    if view.pack is not None:
        # Leave out the options that have no effect on the counts.
        pack = structs.replace(view.pack, carry=(), outputs=(), pad_value=0, balanced=False)
        recipe["pack"] = structs.asdict(pack)
        del recipe["pack"]["loss_mask"], recipe["pack"]["dtype"]
    del recipe["per_epoch"]  # never of views that are counted
    if not recipe["resizes"]:
        del recipe["resizes"]
    recipe |= {"seed": seed, "code": code}
    recipe |= {"replaces": True} if recipe.pop("bad_max") else {}
    text = f"packs-2 {manifest.fingerprint} {json.dumps(recipe, sort_keys=True)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def with_counts(manifest: Manifest, name: str, counts: Int64) -> Manifest:
    """Return the manifest with counted packs added.

    Shapes:  counts: int64[K, NUMBERS], the Packing of each block of a view that has K blocks.
    """
    return replace(
        manifest, pack_counts={**manifest.pack_counts, name: texts.numbers(counts.reshape(-1))}
    )


def known_counts(manifest: Manifest, name: str) -> Int64 | None:
    """Return the counted packs of all blocks of this manifest of a view; None if they were not
    counted.

    Shapes:  result: int64[K, NUMBERS].
    """
    found = manifest.pack_counts.get(name)
    if found is None or len(found) != manifest.block_count * NUMBERS:
        return None
    return np.asarray(found.to_numpy(), np.int64).reshape(-1, NUMBERS)


def packing_in(counts: Int64) -> Packing:
    """Sum up the Packing of all blocks.

    Shapes:  counts: int64[K, NUMBERS].
    """
    return Packing(*counts.sum(axis=0).tolist())
