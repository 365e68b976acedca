"""How fast do documents reach a training loop as packs of whole documents?

Bound: one core copying the tokens of the packs, and nothing that tells the documents apart.
"""

from dataplane_bench.model import BenchCase
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """From the page cache."""
    return (BenchCase("local", scale.workload),)


SCENARIO = Scenario(
    "packed",
    "How fast do documents of 616 tokens on average become packs of 2,048 tokens?",
    "one core's gather of the tokens into a warm buffer; positions and document ids not counted",
    cases,
)
