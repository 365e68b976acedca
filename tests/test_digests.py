"""Digests of specs are a promise to saved states: a state is refused where its job's digest is
another. A new option must leave the digest of every job that does not use it as it was. Those of
shuffled jobs contain the version of the order.
"""

import pytest
from msgspec import Struct, field, structs

from dataplane.model import config
from dataplane.model.changes import order_key
from dataplane.model.config import JobSpec, MixtureSpec, SourceSpec
from dataplane.model.records import (
    ColumnOptions,
    Cut,
    DatasetIdentity,
    Decoding,
    End,
    ImageSpec,
    ListPolicy,
    StackSpec,
    TruncationSide,
    View,
)

F = "0123456789abcdef" * 2
CROP = ImageSpec(
    "jpg",
    224,
    224,
    Cut.RANDOM,
    scale=(0.08, 1.0),
    ratio=(0.75, 1.25),
    flip=0.5,
    layout="CHW",
    dtype="float32",
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)
CENTER = ImageSpec("png", 64, 48, Cut.CENTER, resize=(72,))

# Saved states contain these. They may grow in number, and never change.
GOLDEN = {
    "plain": (JobSpec(F), "26bdbfdf71583f4f81b7f7295cf83b59"),
    "shuffled": (
        JobSpec(F, seed=(1 << 64) - 1, shuffle=True, lanes=64, window=4096),
        "494101611b37e198710daa5ce461c3da",
    ),
    "ramp": (
        JobSpec(F, seed=(1 << 64) - 1, shuffle=True, lanes=64, window=4096, ramp=3),
        "70ebacd6f28fdd2533fa0fcf27f635c3",
    ),
    "any global batch": (JobSpec(F, global_batch=256), "26bdbfdf71583f4f81b7f7295cf83b59"),
    "dropped end": (JobSpec(F, end=End.DROP), "e17ddef7a94bc22fcd316ce8bb104276"),
    "padded end": (JobSpec(F, end=End.PAD), "bbfe7d89bbd63a1e06cebb2ed0d9176a"),
    "columns": (
        JobSpec(F, column_options=ColumnOptions(("id", "text"))),
        "58c3b0df26024b57ac3160a214671599",
    ),
    "ragged": (
        JobSpec(F, column_options=ColumnOptions(lists=ListPolicy.RAGGED)),
        "132f4ea90baea784021140baa6d031cc",
    ),
    "fill_null": (
        JobSpec(F, column_options=ColumnOptions(fill_null=(("a", 0.0), ("b", -1.5)))),
        "608caa9336c8aa6e4819ab863b1b91ea",
    ),
    "random crops": (JobSpec(F, transforms=(CROP,)), "f39bcb0b4aa6bd0f736ef7208b77a516"),
    "image with defaults": (
        JobSpec(F, transforms=(ImageSpec("jpg", 1, 1, Cut.WHOLE),)),
        "b8c9eafd1a091d57a39632ecd9622ef2",
    ),
    "two images": (JobSpec(F, transforms=(CROP, CENTER)), "44fd1ff6169a8b555559867f8150b2c3"),
    "exact random crops": (
        JobSpec(F, transforms=(structs.replace(CROP, decode=Decoding.EXACT),)),
        "3c7d311b5f2e63039d7d54fe9b72a99d",
    ),
    "fast center crops": (
        JobSpec(F, transforms=(structs.replace(CENTER, decode=Decoding.FAST),)),
        "2347987e84b061fd3de0f60fb2e984c4",
    ),
    "stack": (
        JobSpec(F, column_options=ColumnOptions(stack=(StackSpec("x", ("a", "b")),))),
        "52358f284691bc9052bacbc4f5f3625e",
    ),
    "two stacks": (
        JobSpec(
            F,
            column_options=ColumnOptions(
                stack=(StackSpec("x", ("a", "b"), "float32"), StackSpec("y", ("c",)))
            ),
        ),
        "0e24050bb48e2e0d0f997ae5e7e44059",
    ),
    "padded with a value": (
        JobSpec(F, column_options=ColumnOptions(pad_value=(("t", -100.0),))),
        "66c8113a396856708c450d349ed89a58",
    ),
    "cut lists": (
        JobSpec(
            F,
            column_options=ColumnOptions(
                pad_value_all=1.0,
                max_length=(("t", 512),),
                max_length_all=64,
                truncation_side=TruncationSide.LEFT,
            ),
        ),
        "750c06a8696fe7d752b2c91df6a0b790",
    ),
    "codes": (
        JobSpec(F, column_options=ColumnOptions(codes=("country", "kind"))),
        "8ca5e30a871958ca8edc02d9d93505be",
    ),
    "converted columns": (
        JobSpec(F, column_options=ColumnOptions(dtype=(("tokens", "int64"), ("x", "float16")))),
        "bb3bb00db0ebe607450cc51722c9fa14",
    ),
    "condition": (
        JobSpec(F, view=View(where="lang == 'en' and score > 0.5")),
        "f9b14391d687cfcea9b8b5863e0db257",
    ),
    "sample": (JobSpec(F, view=View(sample=429496729)), "8902136a33a69abd82e2e4164d5c57ac"),
    "split": (
        JobSpec(F, view=View(split_from=4252017623, split_to=1 << 32)),
        "4acdad596ccf966a6fd5ea881ccdedfd",
    ),
    "limit": (JobSpec(F, view=View(limit=1000)), "8f1368491bdc69c07933afc8679906eb"),
    "all of them": (
        JobSpec(
            F,
            7,
            True,
            8,
            512,
            32,
            End.PAD,
            (CROP,),
            ColumnOptions(
                ("jpg", "a", "b", "tokens"),
                ListPolicy.RAGGED,
                (("a", 0.0),),
                (StackSpec("x", ("a", "b"), "float16"),),
            ),
        ),
        "47319b5528501ba73cb84efaf5fe062e",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_digest_of_a_spec_never_changes(name):
    spec, digest = GOLDEN[name]
    assert spec.digest() == digest


class Inner(Struct, frozen=True):
    """A value that a spec may contain one day."""

    name: str
    later: tuple[str, ...] = ()
    latest: dict[str, int] = field(default_factory=dict)


class Outer(Struct, frozen=True):
    """A spec that has grown since its digests were first saved."""

    seed: int = 0
    inner: tuple[Inner, ...] = ()
    option: Inner | None = None
    nested: Inner = field(default_factory=lambda: Inner("n"))


def test_a_later_field_is_left_out_at_every_level_while_it_has_its_default(monkeypatch):
    monkeypatch.setattr(
        config, "_FIRST_FIELDS", {Outer: frozenset(("seed",)), Inner: frozenset(("name",))}
    )
    assert config._digested(Outer()) == {"seed": 0}
    assert config._digested(Outer(1, (Inner("a"),))) == {"seed": 1, "inner": [{"name": "a"}]}
    assert config._digested(Outer(option=Inner("a", ("b",), {"c": 1}))) == {
        "seed": 0,
        "option": {"name": "a", "later": ["b"], "latest": {"c": 1}},
    }
    assert config._digested(Outer(nested=Inner("m"))) == {"seed": 0, "nested": {"name": "m"}}


@pytest.mark.parametrize("cls", config._FIRST_FIELDS)
def test_the_first_fields_of_a_class_are_still_there(cls):
    assert set(cls.__struct_fields__) >= config._FIRST_FIELDS[cls]


def test_what_becomes_of_bad_images_is_in_no_saved_digest_and_in_that_of_ranks():
    """A run that has met such an image may go on from its state; its ranks must still agree."""
    spec = JobSpec(F, transforms=(CROP,))
    other = JobSpec(F, transforms=(structs.replace(CROP, replaces=True),))
    assert spec.digest() == other.digest()
    assert spec.facts() == other.facts()
    assert spec.joint_digest == spec.slabs_digest == spec.digest()
    assert other.slabs_digest == other.joint_digest != spec.digest()
    assert spec.differences(other) == (("bad_images", "raise", "replace"),)


@pytest.mark.parametrize("view", [View(), View(where="x > 1")])
def test_what_becomes_of_bad_rows_is_in_no_digest_of_the_order(view):
    identity = DatasetIdentity("c", "l")

    def digests(view: View, other: View) -> list[tuple[str, str, str]]:
        mixture = MixtureSpec((SourceSpec("a", F, 1, view=view), SourceSpec("b", F, 1, view=other)))
        return [
            (spec.digest(), spec.rows_digest("l"), order_key(spec, identity))
            for spec in (JobSpec(F, shuffle=True, view=view), JobSpec(F, mixture=mixture))
        ]

    replaced = structs.replace(view, bad_max=0.001)
    assert digests(view, View()) == digests(replaced, View(bad_max=0.001))
    other = JobSpec(F, view=replaced)
    assert JobSpec(F, view=view).slabs_digest != other.slabs_digest
    assert JobSpec(F, view=view).facts() == other.facts()
