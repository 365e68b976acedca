"""What a dataset is, wherever it lies: what a saved state is compared with at resume.

A manifest's fingerprint contains urls, and estimates that our code makes, because nodes share
blocks by it. Here shards are named relative to their root, the longest folder that all of them have
in common, so that a dataset keeps its identity in another bucket or folder.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

from dataplane.model import DatasetIdentity
from dataplane.plan.manifest import Manifest


def identity_of(manifest: Manifest) -> DatasetIdentity:
    """Linear in shards and blocks: about 0.2 s for 50,000 shards with 2.5 million blocks."""
    layout, etags = _hash(), _hash()
    for text in (manifest.format.encode(), manifest.schema):
        layout.update(struct.pack("<q", len(text)) + text)
    layout.update(struct.pack("<qq", len(manifest.shards), manifest.block_count))
    names = relative_names([shard.url for shard in manifest.shards])
    for name, shard in zip(names, manifest.shards, strict=True):
        text, etag = name.encode(), shard.etag.encode()
        layout.update(struct.pack("<qqq", len(text), shard.size_bytes, shard.block_count) + text)
        etags.update(struct.pack("<q", len(etag)) + etag)
    for numbers in (manifest.block_rows, manifest.block_offset, manifest.block_length):
        layout.update(numbers.astype("<i8", copy=False).data)
    etags.update(layout.digest())
    return DatasetIdentity(content=etags.hexdigest(), layout=layout.hexdigest())


def relative_names(urls: Sequence[str]) -> list[str]:
    """Each url without the longest folder that all of them have in common. Of shards in several
    buckets or stores the names contain the bucket. The query of a web address is left out: a
    presigned url gets a new one every day.
    """
    paths = [
        url.partition("?")[0] if url.startswith(("http://", "https://")) else url for url in urls
    ]
    first, last = min(paths), max(paths)
    root = os.path.commonprefix([first, last]).rfind("/") + 1  # noqa: RUF071 - cut at a slash
    return [path[root:] for path in paths]


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, person=b"dp-identity-1")
