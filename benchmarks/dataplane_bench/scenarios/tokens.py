"""How fast do fixed rows of tokens reach a training loop in random order?

Bound: one core copying random rows from memory into a warm buffer, since every row must be moved
once; from S3, what the server itself delivers.
"""

from dataplane_bench.scenarios.base import Scenario, local_and_s3

SCENARIO = Scenario(
    "tokens",
    "How fast do fixed rows of 2,048 tokens reach a training loop in random order?",
    "one core's gather of random rows into a warm buffer; from S3, what the server delivers",
    local_and_s3,
)
