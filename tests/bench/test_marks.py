"""Readers with any colour vision can distinguish all systems, on light and on dark pages.

Source: G. M. Machado et al., A Physiologically-based Model for Simulation of Color Vision
Deficiency, 2009 (severity 1.0), and the CIE 1976 L*a*b* difference.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from dataplane_bench.peers.registry import HARNESS, OURS, PEERS
from dataplane_bench.report import marks

STYLE = Path(marks.__file__).with_name("web") / "page.css"
VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / np.array([[0.9505], [1.0], [1.089]])


def colours(theme):
    """The variables of the light page, or of the dark one."""
    part = STYLE.read_text().split("@media (prefers-color-scheme: dark)")[theme == "dark"]
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", part))


def linear(colour):
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light):
    xyz = TO_XYZ @ np.clip(light, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    """Source: WCAG 2.2, contrast ratio."""
    low, high = sorted(float((TO_XYZ @ linear(each))[1]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hues_can_be_told_apart_with_any_colour_vision(theme, vision):
    found = colours(theme)
    seen = {
        name: lab(np.array(VISION[vision]) @ linear(found[name]))
        for name in ("--ours", *marks.HUES)
    }
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 12, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_stands_out_from_the_page(theme):
    found = colours(theme)
    for name in ("--ours", *marks.HUES):
        assert contrast(found[name], found["--card"]) > 3, name
    for text, ground in (("--ink", "--card"), ("--muted", "--card"), ("--ink", "--warn-paper")):
        assert contrast(found[text], found[ground]) > 4.5, text


def test_every_system_looks_different_and_no_other_has_our_colour():
    found = marks.marks([*PEERS, "mine:Loader"])
    looks = {name: (one.colour, one.dash, one.pattern, one.symbol) for name, one in found.items()}
    assert len(set(looks.values())) == len(looks) == len(PEERS) + 3
    assert all(one.colour != found[OURS].colour for name, one in found.items() if name != OURS)
    assert found[HARNESS].dash == "dot"
    assert marks.marks([])["torch"] == found["torch"]
