"""Ranks of one launch, forked from a process that has imported what they need."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from torch.distributed import TCPStore
from warm import WarmPython

RANK_S = 280


def launch(
    python: WarmPython, script: Path, out: Path, *arguments: str, size: int = 2
) -> list[int]:
    """So many ranks with what torchrun's agent gives them, its store among it; their exit statuses.
    Their errors are in `out`.
    """
    out.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    launched = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": f"{out}/inductor",
    }  # fmt: skip
    ranks = []
    with (out / "errors").open("ab") as errors:
        for rank in map(str, range(size)):
            own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            environ = {**os.environ, **launched, **own}
            ranks.append(python.run([str(script), *arguments], environ, errors.fileno()))
    try:
        return [rank.wait(RANK_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
