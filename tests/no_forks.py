"""A real fork server whose machine starts no process, as long as a file is there."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

NO_MORE = os.strerror(errno.EAGAIN)


def no_forks(
    monkeypatch: pytest.MonkeyPatch, folder: Path, while_there: Path, number: int = errno.EAGAIN
) -> None:
    """The next fork server's fork() fails with this error, as it does at a limit of processes:
    those limits do not bind root, who may run these tests.
    """
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys\n"
        "from dataplane.node import fork_server\n"
        f"mark, fork = pathlib.Path({str(while_there)!r}), os.fork\n"
        "def refused():\n"
        "    if mark.exists():\n"
        f"        raise OSError({number}, os.strerror({number}))\n"
        "    return fork()\n"
        "os.fork = refused\n"
        "fork_server.main(int(sys.argv[-1]))\n"
    )
    program.chmod(0o700)
    while_there.touch()
    monkeypatch.setattr(sys, "executable", str(program))
