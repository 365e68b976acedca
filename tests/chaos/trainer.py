"""One rank of a run, as a process: reads orders from stdin, writes every batch to a file.

Orders, one a line: `go N` (take N more steps, then answer), `end` (take all that are left). The
answer is one JSON line: steps taken so far, the loader's state, and whether the epoch is over.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dataplane_torch import DataLoader

from dataplane.model.records import Topology


def rows_of(batch: dict[str, Any]) -> list[list[Any]]:
    """Every value of a batch, one list per row."""
    names = sorted(batch)
    columns = [
        batch[name] if isinstance(batch[name], list) else batch[name].tolist() for name in names
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def main() -> None:
    given = json.loads(sys.argv[1])
    rank, size = given["rank"], given["size"]
    loader = DataLoader(
        given["url"],
        topology=Topology(rank, size, rank, size, rank, size),
        **given["options"],
    )
    with loader, Path(given["out"]).open("w", encoding="utf-8") as out:
        if given["state"]:
            loader.load_state_dict(given["state"])
        iterator, steps, over = iter(loader), 0, False
        for order in sys.stdin:
            count = int(order.split()[1]) if order.startswith("go") else sys.maxsize
            while count and not over:
                batch = next(iterator, None)
                if batch is None:
                    over = True
                    break
                out.write(json.dumps(rows_of(batch)) + "\n")
                out.flush()
                steps, count = steps + 1, count - 1
            told = {"steps": steps, "state": loader.state_dict(), "over": over, "pid": os.getpid()}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
