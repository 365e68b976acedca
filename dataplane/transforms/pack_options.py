"""Parse and check a user's description of packs of documents. Pure: a trainer imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from dataplane.base.units import one_of, whole_from
from dataplane.model.errors import ConfigError
from dataplane.model.records import PACK_OUTPUTS, PAD_OUTPUTS, LongPolicy, PackPolicy, PackSpec

LENGTH_MAX = 1 << 21
_LABELS: Final = "labels"
_DTYPES: Final = ("", "int32", "int64")
_OUTPUTS: Final = {
    PackPolicy.BEST_FIT: PACK_OUTPUTS,
    PackPolicy.WRAP: PACK_OUTPUTS,
    PackPolicy.PAD: PAD_OUTPUTS,
}
_EXAMPLE = 'pack=Pack("tokens", length=4096)'
_PAD_MAX = (1 << 63) - 1
_ON_COMMAND_LINES: Final = ("length", "policy", "long", "multiple", "documents")


class Pack(Struct, frozen=True):
    """Samples of `length` tokens, each made of several rows of the list column `column`.

    - `policy`: "best_fit" puts whole rows side by side and pads the rest of a pack. "wrap" joins
      all rows and cuts the result every `length` tokens. "pad" makes padded batches (see below).
    - `long`: what happens to a row of more than `length` tokens. "fragment" cuts the row into
      several packs, "truncate" keeps its start, and "drop" leaves the row out.
    - `carry`: other list columns with one value per token.
    - `outputs`: columns that are made for each pack. "position_ids" and "document_ids" are
      int32[length], "cu_seqlens" is int32[documents + 2], "max_seqlen" is int32, and "labels" is
      int64[length]. A label is the next token, or -100 at the end of a row and in padding.
    - `multiple`: each row starts at a multiple of this number of tokens.
    - `documents`: the maximum number of rows in a pack, by default an eighth of `length`.
    - `pad_value`: the token in padding.
    - `loss_mask`: a list column with one value per token, which is 0 or false for tokens without a
      loss. Such tokens have the label -100.
    - `dtype`: the type of tokens, "int32" or "int64"; by default the stored type.

    With `policy="pad"`, each sample is a padded batch of rows of similar length. Tokens and `carry`
    have the shape [rows, width]. The width is the length of the longest row, rounded up to
    `multiple`, and rows * width is at most `length`. Batches also have a column "lengths",
    int32[rows], and on request "labels".
    """

    column: str
    length: int
    policy: str = PackPolicy.BEST_FIT.value
    long: str = LongPolicy.FRAGMENT.value
    carry: Sequence[str] = ()
    outputs: Sequence[str] | None = None
    multiple: int = 1
    documents: int | None = None
    pad_value: int = 0
    loss_mask: str | None = None
    dtype: str | None = None


def pack_of_text(text: str) -> PackSpec:
    """Parse the text of a command line, such as "tokens,length=4096": a column, and arguments of
    Pack.

    Raises:  ConfigError: as `pack_spec`, or the text has another form.
    """
    column, *parts = text.split(",")
    given: dict[str, str | int] = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in _ON_COMMAND_LINES or not value:
            raise ConfigError(
                f"pack {text!r}: {part!r} is not one of {', '.join(_ON_COMMAND_LINES)} with a"
                ' value: write "tokens,length=4096"',
                field="pack",
            )
        given[name] = int(value) if value.isdecimal() else value
    spec = pack_spec(Pack(column, given.pop("length", 0), **given))  # type: ignore[arg-type]
    assert spec is not None
    return spec


def pack_spec(given: object) -> PackSpec | None:
    """Convert this argument of a DataLoader to a spec.

    Raises:  ConfigError: `given` is not a Pack, or a value is invalid; says what is allowed.
    """
    if given is None:
        return None
    if not isinstance(given, Pack):
        raise ConfigError(f"pack={given!r:.80}: pass a Pack: {_EXAMPLE}", field="pack")
    column, carry = _names("column", [given.column])[0], _names("carry", given.carry)
    length = _count("length", given.length, 1, LENGTH_MAX)
    multiple = _count("multiple", given.multiple, 1, length)
    policy = one_of("policy", given.policy, PackPolicy, _said("policy", given.policy))
    documents = 0 if given.documents is None else _count("documents", given.documents, 1, length)
    if length % multiple:
        raise _wrong("multiple", multiple, f"choose one that divides length={length}")
    if policy is PackPolicy.WRAP and documents:
        raise _wrong("documents", documents, 'leave it out with policy="wrap", which cuts anywhere')
    mask, dtype = given.loss_mask or "", given.dtype or ""
    if mask:
        _names("loss_mask", [mask])
        if mask == column:
            raise _wrong("loss_mask", mask, "name another column, with one value a token")
    if dtype not in _DTYPES:
        raise _wrong("dtype", given.dtype, 'pass "int32" or "int64", or leave it out')
    outputs = _outputs(given.outputs, policy, (column, *carry))
    if mask and _LABELS not in outputs:
        if given.outputs is not None:
            advice = f"only labels have a loss: add {_LABELS!r} to outputs=, or leave that out"
            raise _wrong("loss_mask", mask, advice)
        outputs = (*outputs, _LABELS)
    return PackSpec(
        column,
        length,
        policy,
        one_of("long", given.long, LongPolicy, _said("long", given.long)),
        carry,
        outputs,
        multiple,
        documents,
        _count("pad_value", given.pad_value, -_PAD_MAX, _PAD_MAX),
        loss_mask=mask,
        dtype=dtype,
    )


def balanced(
    pack: PackSpec | None, given: object, *, shuffle: bool, mixes: bool
) -> PackSpec | None:
    """Return the packs of a job, balanced if this argument of a DataLoader requests it. `mixes`
    means that a global batch may have packs of several sources.

    Raises:  ConfigError: the value is not "cost", or this job cannot be balanced.
    """
    if given is None:
        return pack
    if given != "cost":
        raise _refused(given, 'pass "cost", or leave it out')
    if mixes:
        raise _refused(
            given,
            "ranks have packs of different sources at a step of this mixture: pass "
            'Mixture(…, unit="batch"), which takes each global batch from one source, or leave it '
            "out",
        )
    if pack is None:
        raise _refused(given, f"only packs have such costs: pass {_EXAMPLE}, too")
    if not shuffle:
        raise _refused(given, "it is an order of packs: pass shuffle=True, too")
    return replace(pack, balanced=True)


def _refused(given: object, advice: str) -> ConfigError:
    return ConfigError(f"balance={given!r:.80}: {advice}", field="balance")


def _outputs(given: object, policy: PackPolicy, columns: Sequence[str]) -> tuple[str, ...]:
    usual = _OUTPUTS[policy]
    asked, known = usual if given is None else _names("outputs", given), (*usual, _LABELS)
    for name in asked:
        if name not in known:
            choices = f"choose from {', '.join(known)} with policy={policy.value!r}"
            raise _wrong("outputs", name, choices)
    if policy is PackPolicy.PAD:
        asked = (*usual, *asked)
        if usual[0] in columns:
            raise _wrong("carry", usual[0], "a padded batch has a column of its own of this name")
    for name in columns:
        if name in asked or columns.count(name) > 1:
            raise _wrong(
                "carry", name, "a pack has two columns of this name: name each column once, and"
                " leave out of outputs= what the dataset has",
            )  # fmt: skip
    return tuple(name for name in known if name in asked)


def _names(name: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise _wrong(name, given, "pass a list of names")
    if not all(isinstance(each, str) and each for each in given):
        raise _wrong(name, given, "pass names of columns")
    return tuple(given)


def _count(name: str, given: object, least: int, most: int) -> int:
    return whole_from(name, given, least, most, _said(name, given))


def _said(name: str, given: object) -> str:
    return f"{name}={given!r:.80} in Pack(…)"


def _wrong(name: str, given: object, advice: str) -> ConfigError:
    return ConfigError(f"{_said(name, given)}: {advice}", field=name)
