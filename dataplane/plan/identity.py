"""The identity of a dataset, independent of its location; resume compares it with the saved
state's.

A manifest's fingerprint includes urls, and estimates made by our code, because nodes share blocks
by it. Here, shards are named relative to their root, the longest common folder, so that a dataset
keeps its identity in another bucket or folder.
"""

from __future__ import annotations

import hashlib
import struct

from dataplane.model import DatasetIdentity
from dataplane.plan.manifest import Manifest
from dataplane.plan.texts import Piece, Texts, records
from dataplane.redact import unpinned


def identity_of(manifest: Manifest) -> DatasetIdentity:
    """Compute a dataset's identity. Linear in shards and blocks: about 0.5 s for 10^6 shards with 3
    * 10^6 blocks.
    """
    layout, etags = _hash(), _hash()
    for text in (manifest.format.encode(), manifest.schema):
        layout.update(struct.pack("<q", len(text)) + text)
    shards = manifest.shards
    layout.update(struct.pack("<qq", len(shards), manifest.block_count))
    names, tags = relative_names(shards.urls), shards.etags.piece()
    lengths = names.stops - names.starts
    for some in records((lengths, shards.size_bytes, shards.block_counts), (names,)):
        layout.update(some.data)
    for some in records((shards.etags.lengths,), (tags,)):
        etags.update(some.data)
    for numbers in (manifest.block_rows, manifest.block_offset, manifest.block_length):
        layout.update(numbers.astype("<i8", copy=False).data)
    etags.update(layout.digest())
    return DatasetIdentity(content=etags.hexdigest(), layout=layout.hexdigest())


def relative_names(urls: Texts) -> Piece:
    """Return each url without the longest common folder. If shards are in several buckets or
    stores, the names contain the bucket. Parts that change are left out: the query of a web
    address, since a presigned url gets a new one every day, and the commit of a Hub's repository.
    """
    paths = urls.changed(_lasting, b"?@")
    shared = paths.content[: paths.shared_prefix_bytes()].tobytes()
    return paths.piece(shared.rfind(b"/") + 1)


def _lasting(url: str) -> str:
    is_http = url.startswith(("http://", "https://"))
    return url.partition("?")[0] if is_http else unpinned(url)


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16, person=b"dp-identity-1")
