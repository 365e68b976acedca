"""Error messages for bytes that are not an image."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.transforms.not_images import said_of


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (b"", "0 bytes"),
        (b"\0" * 5000, "5000 bytes that begin with 00 00 .* …, and all of them are zero"),
        (b"\n <!DOCTYPE html><html>", "HTML page"),
        (b"/9j/4AAQSkZJRg", "JPEG image in base64"),
        (b"train/n01/cat.JPEG\n", "is text: 'train/n01/cat.JPEG.*is it the path of an image"),
        (b"\0\0\0\x18ftypheic", "HEIC image, which is not supported"),
        (b"RIFF\0\0\0\0WAVE", "audio or video"),
        (b"\x80\x05\x95", "a Python pickle"),
        (b"\x01", "1 byte that is 01, of an unknown kind"),
    ],
)
def test_what_lies_there_is_named(found: bytes, said: str) -> None:
    assert re.search(said, said_of(found))


@given(st.binary(max_size=100))
def test_any_bytes_are_described_in_one_short_printable_line(found: bytes) -> None:
    said = said_of(found)
    assert said.isprintable()
    assert len(said) < 300
    assert "bytes" in said or "byte" in said
