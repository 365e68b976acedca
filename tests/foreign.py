"""Files by other writers, and mutants of files: Dataplane against pyarrow and Python's own readers.

    DATAPLANE_FOREIGN=parquet-testing:arrow-testing python tests/foreign.py files
    DATAPLANE_FOREIGN=… python tests/foreign.py files --node
    python tests/foreign.py mutants [--count 1000] [--seed 0] [--kind parquet …]

Every file is read as a node and a trainer read it, and by others; every value is compared. Printed
are counts of verdicts (see foreign_read.verdict), and everything that is not simply equal. The exit
status is 1 if there is a fault of ours: an error that is not ours, another value, a process that
was killed, or one that hangs. Files are read in one process that takes the way of a node and a trainer,
or, with --node, by DataLoader and a node that it starts, which takes minutes. The files of apache/parquet-testing take a minute, a thousand mutants
of one kind about as long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mutants

_DEADLINE_S = 120.0
_MEMORY_BYTES = 2 << 30
_SHOWN = 5
_BAD = ("RAW", "DIFFERS", "KILLED", "HANGS")
_SUFFIXES = {".parquet": "parquet", ".arrow_file": "arrow", ".stream": "arrow"}
_ARROW_FUZZ = re.compile(r"arrow-ipc-(file|stream)")

Case = tuple[str, Path, str, Path | None]


class Reader:
    """A process that reads files one by one; a file may kill it."""

    def __init__(self, *, by_node: bool) -> None:
        self._how = "read-by-node" if by_node else "read"
        self._process: subprocess.Popen[str] | None = None

    def verdict(self, path: Path, format_name: str, original: Path | None) -> tuple[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        asked = [str(path), format_name, None if original is None else str(original)]
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _DEADLINE_S)
        answer = process.stdout.readline() if ready else ""
        if answer:
            word, detail = json.loads(answer)
            return word, detail
        status = self.close()
        return ("KILLED", f"status {status}") if ready else ("HANGS", f"{_DEADLINE_S:g} s")

    def close(self) -> int:
        """End the process; its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.stdin is not None:
            process.stdin.close()
        try:
            return process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"MIMALLOC_ARENA_EAGER_COMMIT": "0", "OPENBLAS_NUM_THREADS": "1", **os.environ},
        )
        return self._process


def read_forever(*, by_node: bool) -> None:
    """The process: a file a line, a verdict a line."""
    import foreign_read
    import pyarrow as pa

    from dataplane.base.machine import limit_memory

    pa.set_cpu_count(1)
    read_by = foreign_read.by_node
    if not by_node:  # a node limits its workers
        read_by = foreign_read.ours
        limit_memory(_MEMORY_BYTES)
    for line in sys.stdin:
        path, format_name, original = json.loads(line)
        known = None if original is None else Path(original)
        found = foreign_read.verdict(Path(path), format_name, known, read_by)
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def foreign_files(roots: Iterable[Path], folder: Path) -> Iterator[Case]:
    """The files of checkouts that claim to be Parquet or Arrow; gzipped ones are unpacked."""
    import gzip

    for root in roots:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            if ".git" in path.parts:
                continue
            name, content_path = str(path.relative_to(root.parent)), path
            if path.suffix == ".gz" and Path(path.stem).suffix in _SUFFIXES:
                content_path = folder / name.replace("/", "_").removesuffix(".gz")
                content_path.write_bytes(gzip.decompress(path.read_bytes()))
            format_name = _SUFFIXES.get(content_path.suffix, "")
            fuzz = next(map(str, path.parts[::-1]), "")
            if not format_name and (
                _ARROW_FUZZ.search(fuzz) or _ARROW_FUZZ.search(str(path.parent.name))
            ):
                format_name = "arrow"
            if not format_name and "parquet" in path.parent.parts[-2:] and "fuzz" in path.name:
                format_name = "parquet"
            if format_name:
                yield name, content_path, format_name, None


def mutant_files(kinds: Iterable[str], count: int, seed: int, folder: Path) -> Iterator[Case]:
    """Mutants of all shards of these kinds, `count` a kind."""
    for kind in kinds:
        whole = mutants.write_whole(folder, kind)
        for at, (name, path) in enumerate(whole.items()):
            share = count // len(whole) + (at < count % len(whole))
            changed = path.with_suffix(".mutant")
            yield f"{kind}/{name}/whole", path, mutants.FORMATS[kind], path
            for number, content in enumerate(
                mutants.mutants(path.read_bytes(), kind, name, share, seed)
            ):
                changed.write_bytes(content)
                yield f"{kind}/{name}/{seed}/{number}", changed, mutants.FORMATS[kind], path


def compare(cases: Iterable[Case], keep: Path | None, *, by_node: bool = False) -> int:
    """Read all files, print the results, return the number of faults."""
    reader = Reader(by_node=by_node)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    told: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    try:
        for name, path, format_name, original in cases:
            word, detail = reader.verdict(path, format_name, original)
            group = name.partition("/")[0]
            counts[group][word] += 1
            if word != "equal":
                told[word, _kind_of(detail)].append(f"{name}: {detail}")
            if word in _BAD and keep is not None:
                shutil.copyfile(path, keep / name.replace("/", "_"))
    finally:
        reader.close()
    _print(counts, told)
    return sum(count for found in counts.values() for word, count in found.items() if word in _BAD)


def _kind_of(detail: str) -> str:
    """An error without its details, so that similar errors are counted together."""
    return re.sub(r"\(.*\)|'[^']*'|\d+|\S*/\S*", "…", detail)[:160]


def _print(counts: dict[str, Counter[str]], told: dict[tuple[str, str], list[str]]) -> None:
    for (word, _), names in sorted(told.items(), key=lambda one: (one[0][0], -len(one[1]))):
        sys.stdout.write(f"{word}, {len(names)} times\n")
        for name in names[: len(names) if word in _BAD else _SHOWN]:
            sys.stdout.write(f"    {name}\n")
    for group, found in counts.items():
        listed = ", ".join(f"{word} {count}" for word, count in sorted(found.items()))
        sys.stdout.write(f"{group}: {sum(found.values())} files: {listed}\n")


def main(given: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("files", "mutants", "read", "read-by-node"))
    parser.add_argument("--count", type=int, default=1000, help="mutants a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*mutants.WHOLE], help="of mutants")
    parser.add_argument("--keep", type=Path, help="a folder for copies of what is a fault")
    parser.add_argument("--node", action="store_true", help="read by DataLoader and its node")
    asked: Any = parser.parse_args(given)
    if asked.what.startswith("read"):
        read_forever(by_node=asked.what == "read-by-node")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if asked.what == "mutants":
            kinds = asked.kind or [*mutants.WHOLE]
            cases = mutant_files(kinds, asked.count, asked.seed, Path(folder))
        else:
            checkouts = os.environ.get("DATAPLANE_FOREIGN", "")
            if not checkouts:
                parser.error("DATAPLANE_FOREIGN names no checkouts: set it to folders, A:B")
            roots = [Path(root) for root in checkouts.split(":")]
            cases = foreign_files(roots, Path(folder))
        return min(1, compare(cases, asked.keep, by_node=asked.node))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
