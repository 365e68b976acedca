"""How fast do texts become tokens on their way to a training loop?

Bound: the tokenizer alone on all cores. A loader that keeps tokens for later epochs can pass it.
"""

import dataclasses

from dataplane_bench.model import BenchCase, Mode
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """The first epoch, where every text must be tokenised; and the next one."""
    first = BenchCase("first-epoch", scale.workload, Mode.EPOCH, cold=True)
    return first, dataclasses.replace(first, label="second-epoch", epoch=1)


SCENARIO = Scenario(
    "tokenise",
    "How fast do texts become 256 tokens each, in the loader's own processes?",
    "the tokenizer alone on all cores; a loader that keeps the tokens can pass it in later epochs",
    cases,
)
