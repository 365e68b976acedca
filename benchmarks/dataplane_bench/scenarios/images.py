"""How fast do photographs become random crops of 224 x 224?

Bound: the JPEG decode and resize of all cores, since reading and copying take far less.
A loader that decodes only what a crop needs can pass it.
"""

from dataplane_bench.scenarios.base import Scenario, local_and_s3

SCENARIO = Scenario(
    "images",
    "How fast do 97 KB photographs become random resized crops of 224 x 224, half of them flipped?",
    "full JPEG decode and resize on all cores; decoding only the crop can pass it",
    local_and_s3,
)
