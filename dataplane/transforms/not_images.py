"""Guess the content of bytes that no decoder recognizes as an image."""

from __future__ import annotations

from typing import Final

# The first bytes of a file, and the content that they indicate. The first match counts.
_BEGINNINGS: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\xff\xd8\xff", "a damaged JPEG image"),
    (b"\x89PNG\r\n\x1a\n", "a damaged PNG image"),
    (b"GIF8", "a damaged GIF image"),
    (b"BM", "a damaged BMP image"),
    (b"II*\0", "a damaged TIFF image"),
    (b"MM\0*", "a damaged TIFF image"),
    (b"\xff\x0a", "a JPEG XL image, which is not supported: convert it"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image, which is not supported: convert it"),
    (b"8BPS", "a Photoshop file, which is not supported: convert it"),
    (b"<svg", "an SVG drawing, which is not supported: convert it"),
    (b"<?xml", "XML, such as an SVG drawing, which is not supported: convert it"),
    (b"<!doctype", "an HTML page, as servers send in place of an image"),
    (b"<html", "an HTML page, as servers send in place of an image"),
    (b"<head", "an HTML page, as servers send in place of an image"),
    (b"{", "JSON"),
    (b"PK\x03\x04", "a zip file"),
    (b"\x1f\x8b", "gzip: unpack it before it is stored"),
    (b"\x93NUMPY", "a numpy array (.npy)"),
    (b"\x89HDF", "an HDF5 file"),
    (b"%PDF", "a PDF file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
    (b"OggS", "Ogg audio or video"),
    (b"ID3", "MP3 audio"),
    (b"fLaC", "FLAC audio"),
    (b"/9j/", "a JPEG image in base64: decode that before it is stored"),
    (b"iVBORw0KGgo", "a PNG image in base64: decode that before it is stored"),
    (b"data:image", "a data: url: store the bytes of its image"),
)
_BRANDS: Final = {
    b"avif": "a damaged AVIF image, or one that this Pillow cannot decode",
    b"heic": "a HEIC image, which is not supported: convert it",
    b"heix": "a HEIC image, which is not supported: convert it",
    b"mif1": "a HEIF image, which is not supported: convert it",
}
_SHOWN_BYTES = 16
_SHOWN_LETTERS = 40


def said_of(found: bytes) -> str:
    """Describe bytes that are not an image: their count, the first of them, and a guess."""
    if not found:
        return "0 bytes, where an image should be"
    size = "1 byte that is" if len(found) == 1 else f"{len(found)} bytes that begin with"
    more = " …" if len(found) > _SHOWN_BYTES else ""
    begin = f"{found[:_SHOWN_BYTES].hex(' ')}{more}"
    return f"not an image that can be read: {size} {begin}, {_like(found)}"


def _like(found: bytes) -> str:
    start = found[:512].lstrip()
    lower = start[:16].lower()
    for beginning, name in _BEGINNINGS:
        if found.startswith(beginning) or (beginning[:1] == b"<" and lower.startswith(beginning)):
            return f"which looks like {name}"
    if found[:4] == b"RIFF":
        return (
            "which looks like a damaged WebP image"
            if found[8:12] == b"WEBP"
            else "which looks like audio or video (RIFF)"
        )
    if found[4:8] == b"ftyp":
        return f"which looks like {_BRANDS.get(found[8:12], 'a video (MP4 or MOV)')}"
    if not any(found):
        return "and all of them are zero"
    text = found[:_SHOWN_LETTERS].decode("ascii", errors="replace")
    if text.isascii() and all(letter.isprintable() or letter.isspace() for letter in text):
        path = "; is it the path of an image?" if _is_path(found) else ""
        return f"which is text: {text!r}{path}"
    return "of an unknown kind"


def _is_path(found: bytes) -> bool:
    ends = (b".jpg", b".jpeg", b".png", b".webp", b".gif", b".bmp", b".tif", b".tiff")
    return len(found) < 4096 and found.strip().lower().endswith(ends)
