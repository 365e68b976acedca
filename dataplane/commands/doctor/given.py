"""Parses a job on the command line into a DataLoader's arguments."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.errors import ConfigError
from dataplane.transforms.stacks import Stack
from dataplane.transforms.steps import registry
from dataplane.transforms.steps.registry import Transform

_STEPS = ", ".join(sorted(kind.name for kind in registry.STEPS))
_EXAMPLE = '--transform "jpg=RandomResizedCrop(224), RandomHorizontalFlip()"'


def transforms_of(told: Sequence[str]) -> dict[str, Sequence[Transform]]:
    """Parse each COLUMN=STEP(…), STEP(…) into the form of `DataLoader(transforms=…)`.

    Raises:  ConfigError: it cannot be read; says what is allowed.
    """
    found: dict[str, Sequence[Transform]] = {}
    for one in told:
        column, equals, steps = one.partition("=")
        if not equals or not column.strip():
            raise ConfigError(f"--transform {one!r} does not name a column: {_EXAMPLE}")
        found[column.strip()] = [_step(call, one) for call in _calls(steps, one)]
    return found


def stacks_of(told: Sequence[str]) -> dict[str, Stack]:
    """Parse each NAME=COLUMN,COLUMN or NAME=COLUMN,COLUMN:DTYPE for `DataLoader(stack=…)`.

    Raises:  ConfigError: it cannot be read.
    """
    found = {}
    for one in told:
        name, equals, rest = one.partition("=")
        columns, _, dtype = rest.partition(":")
        if not equals or not name or not columns:
            raise ConfigError(f'--stack {one!r} is not NAME=A,B,…: --stack "x=age,price:float32"')
        found[name] = Stack(columns.split(","), dtype)
    return found


def _calls(steps: str, told: str) -> Sequence[ast.expr]:
    try:
        return ast.parse(f"[{steps}]", mode="eval").body.elts  # type: ignore[attr-defined, no-any-return]
    except SyntaxError as error:
        raise _unreadable(told) from error


def _step(call: ast.expr, told: str) -> Transform:
    known: Mapping[str, Any] = {kind.name: kind.step for kind in registry.STEPS}
    name = call.func if isinstance(call, ast.Call) else call
    if not isinstance(name, ast.Name) or name.id not in known:
        raise _unreadable(told)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    try:
        if isinstance(call, ast.Call):
            positional = [ast.literal_eval(value) for value in call.args]
            named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        made: Transform = known[name.id](*positional, **named)
    except (TypeError, ValueError) as error:
        raise _unreadable(told) from error
    return made


def _unreadable(told: str) -> ConfigError:
    return ConfigError(
        f"--transform {told!r} is not COLUMN=STEP(…), STEP(…): {_EXAMPLE}; steps are {_STEPS}",
        allowed=_STEPS,
    )
