"""All scenarios by name, in the order of tables."""

from __future__ import annotations

from dataplane_bench.scenarios import (
    compute,
    first_batch,
    images,
    jobs,
    mixture,
    packed,
    ranks,
    restart,
    resume,
    tabular,
    text,
    tokenise,
    tokens,
)

WORKLOADS = (tokens.SCENARIO, images.SCENARIO, tabular.SCENARIO, text.SCENARIO)
"""One workload each; the others load whichever they are told."""

MADE = (mixture.SCENARIO, packed.SCENARIO, tokenise.SCENARIO)
"""One workload each, whose batches are more than its samples. They load generated samples only."""

OTHERS = (
    ranks.SCENARIO,
    jobs.SCENARIO,
    first_batch.SCENARIO,
    resume.SCENARIO,
    restart.SCENARIO,
    compute.SCENARIO,
)
SCENARIOS = {scenario.name: scenario for scenario in (*WORKLOADS, *MADE, *OTHERS)}
