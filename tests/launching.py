"""Ranks of one launch, forked from a process that has imported what they need."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from torch.distributed import TCPStore
from warm import WarmProcess, WarmPython

RANK_S = 280


def start(
    python: WarmPython, script: Path, errors: Path, *arguments: str, size: int = 2, **environ: str
) -> tuple[TCPStore, list[WarmProcess]]:
    """Start as many ranks with what torchrun's agent gives them, and its store, which they need.
    No other process can take the store's port meanwhile.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    launched = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", **environ,
    }  # fmt: skip
    ranks = []
    with errors.open("ab") as stderr:
        for rank in map(str, range(size)):
            own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            given = {**os.environ, **launched, **own}
            ranks.append(python.run([str(script), *arguments], given, stderr.fileno()))
    return store, ranks


def ended(ranks: list[WarmProcess]) -> tuple[list[int], str]:
    """Wait for the ranks; return their exit statuses and what they printed."""
    printed, statuses = "", []
    try:
        for rank in ranks:
            assert rank.stdin is not None
            assert rank.stdout is not None
            rank.stdin.close()
            statuses.append(rank.wait(RANK_S))
            printed += rank.stdout.read()
        return statuses, printed
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def launch(
    python: WarmPython, script: Path, out: Path, *arguments: str, size: int = 2
) -> list[int]:
    """Return the exit statuses of as many ranks. Their errors are in `out`."""
    out.mkdir(exist_ok=True)
    cache = f"{out}/inductor"
    _store, ranks = start(
        python, script, out / "errors", *arguments, size=size, TORCHINDUCTOR_CACHE_DIR=cache
    )
    return ended(ranks)[0]
