"""One rank of DDP over a mixture, whose weights it sets in the run: see test_mixture_weights.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from dataplane_torch import DataLoader, Mixture, Source
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.distributed.init_process_group("gloo")
    train(json.loads(sys.argv[1]))
    torch.distributed.destroy_process_group()


def train(given: dict[str, Any]) -> None:
    """The model goes before its process group: it holds that, and frees it with its threads, which
    may wait for the interpreter lock.
    """
    rank, place = os.environ["RANK"], Path(given["out"])
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    sources = {
        name: Source(f"{given['folder']}/{name}.parquet", weight=weight)
        for name, weight in given["weights"].items()
    }
    mixture = Mixture(sources, exhausted="cycle", length=given["length"])
    with DataLoader(mixture, **given["options"]) as loader:
        if given["state"]:
            loader.load_state_dict(given["state"])
        with (place / f"{given['phase']}-{rank}.jsonl").open("w") as seen:
            for step, batch in enumerate(loader, 1):
                seen.write(json.dumps(batch["id"].tolist()) + "\n")
                seen.flush()
                model(batch["id"].float()[:, None]).mean().backward()  # ranks wait for each other
                optimizer.step()
                if step == given["set_at"]:
                    loader.set_weights(given["set_to"])
                if step == given["saved_at"]:
                    (place / f"state-{rank}.json").write_text(json.dumps(loader.state_dict()))
                if step == given["killed_at"]:
                    torch.distributed.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
