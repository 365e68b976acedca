"""How fast do shuffled rows of a 40-column table reach a training loop?

Bound: one core gathering rows whose 40 columns lie side by side.
"""

from dataplane_bench.scenarios.base import Scenario, local_and_s3

SCENARIO = Scenario(
    "tabular",
    "How fast do shuffled rows of a 40-column table reach a training loop?",
    "one core's gather of whole rows from memory; from S3, what the server delivers",
    local_and_s3,
)
