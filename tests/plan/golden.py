"""Golden vectors of version 2 of the order: order_vectors.json, which says what each one is. They
never change.

A change of any of these numbers means that a resumed run would silently repeat and lose samples.
"""

from __future__ import annotations

import json
from pathlib import Path

VECTORS = json.loads(Path(__file__).with_name("order_vectors.json").read_text())


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _of(section):
    return {_frozen(given): _frozen(result) for given, result in VECTORS[section]["vectors"]}


MIX, KEYS, PERMUTATIONS = _of("mix"), _of("keys"), _of("permutations")
SAMPLE_KEYS, SHARE_KEYS = _of("sample_keys"), _of("share_keys")
MAP_GENERATORS, COLLATE_GENERATORS = _of("map_generators"), _of("collate_generators")
ORDERS, FAR, TRAILS = _of("orders"), _of("far"), _of("trails")
COUNTS, MIXTURES, FAR_MIXTURES = _of("counts"), _of("mixtures"), _of("far_mixtures")
CHANGED_MIXTURES = _of("changed_mixtures")
PACKS, PACKS_WITHOUT, BALANCED = _of("packs"), _of("packs_without"), _of("balanced")
SUBSTITUTES = _of("substitutes")
