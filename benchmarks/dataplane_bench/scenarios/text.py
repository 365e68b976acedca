"""How fast do texts of different lengths reach a training loop as padded batches?

Bound: one core gathering the lists of a batch into a zeroed buffer.
"""

from dataplane_bench.scenarios.base import Scenario, local_and_s3

SCENARIO = Scenario(
    "text",
    "How fast do token lists of different lengths reach a training loop as padded batches?",
    "one core gathering lists into a zeroed buffer; from S3, what the server delivers",
    local_and_s3,
)
