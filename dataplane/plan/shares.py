"""Shares of the sources of a mixture as whole numbers, from what a user gives as weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from dataplane.errors import ConfigError
from dataplane.plan.counting import SHARES_SUM


def quantised(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Shares in proportion to these weights, with a sum of 2**32, by largest remainder; of equal
    remainders, the first. A weight above 0 gives 1 at least.

    Raises:  ConfigError: a weight is negative or not finite, or all are 0.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a weight of {weight}: choose a number, 0 or more", field="weight")
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if not total:
        raise ConfigError(
            "no source has a weight above 0, so there is nothing to read", field="weight"
        )
    wanted = [weight * SHARES_SUM / total for weight in exact]
    shares = [max(math.floor(share), 1) if share else 0 for share in wanted]
    left = SHARES_SUM - sum(shares)
    by_rest = sorted(range(len(shares)), key=lambda at: (shares[at] - wanted[at], at))
    for at in [at for at in by_rest if shares[at]][: max(left, 0)]:
        shares[at] += 1
    # Shares that were raised to 1 may make the sum too large: the largest one pays.
    shares[max(range(len(shares)), key=shares.__getitem__)] += min(left, 0)
    return tuple(shares)


def of_tokens(weights: Sequence[float], lengths: Sequence[float]) -> list[Fraction]:
    """Convert weights of tokens to weights of samples, given the average number of tokens in a
    sample of each source.

    Raises:  ConfigError: a length is not above 0.
    """
    for length in lengths:
        if not (math.isfinite(length) and length > 0):
            raise ConfigError(
                f"samples of {length} tokens on average: give the mean length of a source's samples"
                " as mean_length",
                field="mean_length",
            )
    pairs = zip(weights, lengths, strict=True)
    return [Fraction(weight) / Fraction(length) for weight, length in pairs]


def by_temperature(counts: Sequence[int], temperature: float) -> list[float]:
    """Return weights n**(1/T) of sources with n samples: T=1 is in proportion to their sizes, and
    the larger T is, the more equal they are.

    Raises:  ConfigError: the temperature is not above 0, or so small that a source has no weight.
    """
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature}: choose a number above 0; 1 weighs sources by their"
            " sizes, and math.inf weighs them equally",
            field="temperature",
        )
    largest = max(counts)
    # Rounded, since the last digits of a power depend on the machine's library.
    found = [float(f"{(count / largest) ** (1 / temperature):.9g}") for count in counts]
    if not all(found):
        raise ConfigError(
            f"temperature is {temperature}: a source of {min(counts)} samples would not be read"
            f" beside one of {largest}. Choose a larger one, or leave the source out",
            field="temperature",
        )
    return found
