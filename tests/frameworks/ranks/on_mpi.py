"""One rank of a real mpirun: reads an epoch, and writes where it was and what it got."""

import json
import sys
from pathlib import Path

from dataplane_torch import DataLoader, Topology

url, out = sys.argv[1:]
place = Topology.auto()
with DataLoader(url, 4, shuffle=True, seed=7) as loader:
    ids = [i for batch in loader for i in batch["id"].tolist()]
told = {
    "rank": place.rank, "dp_rank": place.dp_rank, "dp_size": place.dp_size, "ids": ids,
    "local": [place.local_rank, place.local_world_size], "source": place.source,
}  # fmt: skip
Path(out, f"{place.rank}.json").write_text(json.dumps(told))
