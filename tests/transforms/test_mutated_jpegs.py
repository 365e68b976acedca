"""Damaged JPEGs by the hundred; `make sanitize` passes a hundred thousand, and sees every access."""

from __future__ import annotations

import collections

from kernels import without
from mutated_jpegs import Outcomes, Sources, mutant, pass_through
from pictures import drawn, encoded

from dataplane.transforms.pixels_library import maker

COUNT = 150
SOURCES = Sources.of([encoded(drawn(120, 160), quality=90)])


def test_damaged_jpegs_are_refused_or_become_pixels() -> None:
    if maker().missing:
        without(maker().missing)
    outcomes: Outcomes = collections.Counter()
    for number in range(COUNT):
        outcomes += pass_through(*mutant(SOURCES, 0, number), number)
    assert min(outcomes["made"], outcomes["refused"], outcomes["header refused"]) > 0


def test_a_mutant_is_made_of_its_number_alone() -> None:
    made = [mutant(SOURCES, 0, number) for number in range(COUNT)]
    assert made == [mutant(SOURCES, 0, number) for number in range(COUNT)]
    assert len({image for image, _ in made}) > COUNT * 0.9
