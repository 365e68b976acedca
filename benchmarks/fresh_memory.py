"""What it costs to use the memory of an arena for the first time, with small and with huge pages.

    python benchmarks/fresh_memory.py [--mib 512] [--rounds 3]

CPU seconds to allocate and map an arena, as a fetcher does, and to map it in a second process, as
each worker does. The kernel decides which pages it takes: as root,
`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` gives Dataplane huge ones, `never`
small ones. On a virtual machine whose host takes back free memory, the first round is slower.
"""

from __future__ import annotations

import argparse
import os
import time

from dataplane.arena import pages
from dataplane.arena.memfd import Arena

BLOCK_BYTES = 4 << 20


def cpu_s(arena: Arena) -> float:
    """CPU seconds until all of it is allocated and mapped, a block at a time."""
    began = time.process_time()
    for at in range(0, arena.size_bytes, BLOCK_BYTES):
        arena.prepare(at, BLOCK_BYTES)
    return time.process_time() - began


def main() -> None:
    """Print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"huge pages for shared memory: {pages.shared_huge_pages()}")
    for _ in range(given.rounds):
        arena = Arena.create("benchmark", given.mib << 20)
        first = cpu_s(arena)
        again = Arena.attach(os.dup(arena.fd), arena.size_bytes)
        second = cpu_s(again)
        print(f"{given.mib} MiB: new {first:.3f} s, mapped once more {second:.3f} s")
        again.close()
        arena.close()


if __name__ == "__main__":
    main()
