"""Bytecode of nodes: where it is kept, for which source, and where it is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.base import bytecode
from dataplane.client.launch import node_command, start_node
from dataplane.rpc.messages import DatasetSource

IMPORT = """
import sys
from dataplane.base import bytecode
bytecode.keep_in(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import module
print(module.value)
"""


def _imported(folder: Path, source: str) -> str:
    """What a process sees that imports this module. Its file has the same time and size always."""
    path = folder / "module.py"
    path.write_text(source)
    os.utime(path, (0, 0))
    command = [sys.executable, "-B", "-c", IMPORT, str(folder / "kept"), str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_kept_bytecode_is_used_for_the_very_source_that_it_was_made_from(tmp_path):
    assert _imported(tmp_path, "value = 1") == "1"
    (kept,) = (tmp_path / "kept").rglob("module.*.pyc")
    content = kept.read_bytes()
    assert _imported(tmp_path, "value = 2") == "2"
    assert kept.read_bytes() != content
    kept.write_bytes(
        content[:16] + kept.read_bytes()[16:]
    )  # that of the other source, as if it fit
    assert _imported(tmp_path, "value = 1") == "2"
    assert not (tmp_path / "__pycache__").exists()


@pytest.fixture
def nothing_is_kept(tmp_path, monkeypatch):
    """A Python that has no bytecode and writes none."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "nowhere"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def test_a_folder_is_needed_only_where_python_keeps_nothing(nothing_is_kept, monkeypatch):
    assert bytecode.is_kept_nowhere()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert not bytecode.is_kept_nowhere()


def test_a_folder_that_another_user_can_change_is_not_used(tmp_path):
    mine = tmp_path / "mine"
    folder = bytecode.own_folder(str(mine))
    assert folder == str(mine / "bytecode")
    mine.chmod(0o770)
    assert not bytecode.own_folder(str(mine))
    mine.chmod(0o1777)  # as /tmp: nobody can rename what is ours
    assert bytecode.own_folder(str(mine)) == folder
    Path(folder).chmod(0o702)
    assert not bytecode.own_folder(str(mine))
    Path(folder).rmdir()
    (tmp_path / "elsewhere").mkdir()
    Path(folder).symlink_to(tmp_path / "elsewhere")
    assert not bytecode.own_folder(str(mine))
    (tmp_path / "file").touch()
    assert not bytecode.own_folder(str(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_not_used(tmp_path):
    folder = Path(bytecode.own_folder(str(tmp_path)))
    os.chown(folder, 4711, 4711)
    assert not bytecode.own_folder(str(tmp_path))
    os.chown(folder, 0, 0)
    os.chown(tmp_path, 4711, 4711)
    assert not bytecode.own_folder(str(tmp_path))


def test_an_embedded_node_keeps_its_bytecode_where_python_keeps_none(
    nothing_is_kept, tmp_path, monkeypatch
):
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # so it is started by exec
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{tmp_path}")
        listener.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trainer:
            trainer.connect(f"\0{tmp_path}")
            node = start_node(listener, node_command(), DatasetSource((str(tmp_path),)))
        assert node.process.wait() == 0  # its trainer has hung up
        node.close()
    own = Path(bytecode.__file__).parents[1]
    kept = tmp_path / "cache" / "bytecode" / own.relative_to("/") / "node"
    assert list(kept.glob("server.*.pyc"))
