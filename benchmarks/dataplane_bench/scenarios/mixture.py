"""How fast do rows of four sources reach a training loop in given shares?

Bound: that of one source, one core copying random rows, since a mixture moves as many bytes.
"""

from dataplane_bench.model import BenchCase
from dataplane_bench.scenarios.base import Scale, Scenario


def cases(scale: Scale) -> tuple[BenchCase, ...]:
    """From the page cache."""
    return (BenchCase("local", scale.workload),)


SCENARIO = Scenario(
    "mixture",
    "How fast do rows of 2,048 tokens from four sources, 70, 20, 7 and 3 %, reach a training loop?",
    "one core's gather of random rows into a warm buffer, as without a mixture",
    cases,
)
