"""Compressed shards: members, damage, truncation, bombs."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.formats import source
from dataplane.formats.source import inflate
from dataplane.model.errors import CorruptShard


def whole(content: bytes, piece: int = 1000) -> bytes:
    pieces = [content[at : at + piece] for at in range(0, len(content), piece)]
    return b"".join(inflate("u", pieces))


@given(
    parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=4),
    piece=st.integers(1, 500),
    padding=st.integers(0, 40),
)
def test_members_one_after_the_other_are_one_text(
    parts: list[bytes], piece: int, padding: int
) -> None:
    content = b"".join(gzip.compress(part, mtime=0) for part in parts) + bytes(padding)
    assert whole(content, piece) == b"".join(parts)


def test_zlib_data_is_read() -> None:
    assert whole(zlib.compress(b"text" * 1000)) == b"text" * 1000


def test_large_data_comes_in_bounded_pieces() -> None:
    content = gzip.compress(bytes(20 << 20), mtime=0)
    sizes = [len(piece) for piece in inflate("u", [content])]
    assert sum(sizes) == 20 << 20
    assert max(sizes) <= source.PIECE_BYTES


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 20])
def test_truncation_is_named(cut: int) -> None:
    with pytest.raises(CorruptShard, match="truncated"):
        whole(gzip.compress(bytes(range(256)) * 10, mtime=0)[:-cut])


def test_damage_and_garbage_are_named() -> None:
    content = gzip.compress(b"text" * 1000, mtime=0)
    with pytest.raises(CorruptShard, match="damaged compressed data"):
        whole(content[:-6] + b"\x00\x01" + content[-4:])
    with pytest.raises(CorruptShard, match="damaged compressed data"):
        whole(content + b"garbage")


def test_a_bomb_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "RATIO_FLOOR_BYTES", 4 << 20)
    content = gzip.compress(bytes(64 << 20), mtime=0)
    made: list[int] = []
    with pytest.raises(CorruptShard, match=r"inflate to more than .* write smaller shards"):
        made.extend(len(piece) for piece in inflate("u", [content]))
    assert sum(made) <= 6 << 20
