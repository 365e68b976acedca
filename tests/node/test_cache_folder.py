"""The folder of a node's blocks on disk: who may have it, and what is refused when a node starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from dataplane.base.trace import Trace
from dataplane.model.errors import ConfigError
from dataplane.node.stored import FolderTakenError, folder_of, open_cache_folder
from dataplane.settings import default_node_config

MIB = 1 << 20


def test_one_node_has_the_folder_at_a_time(tmp_path: Path) -> None:
    first = open_cache_folder(str(tmp_path / "cache"), MIB)
    with pytest.raises(FolderTakenError, match=f"process {os.getpid()}.*cache_dir of its own"):
        open_cache_folder(str(tmp_path / "cache"), MIB, patience_s=0.0)
    first.close()
    first.close()
    open_cache_folder(str(tmp_path / "cache"), MIB).close()
    assert (tmp_path / "cache" / "blocks").stat().st_mode & 0o777 == 0o700


def test_the_folder_is_free_when_the_last_process_that_has_the_lock_is_gone(tmp_path: Path) -> None:
    folder = open_cache_folder(str(tmp_path), MIB)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[folder.lock]
    )
    os.close(folder.lock)  # as if this process had been killed
    with pytest.raises(FolderTakenError):
        open_cache_folder(str(tmp_path), MIB, patience_s=0.0)
    child.kill()
    child.wait(60)
    assert child.stdin is not None
    child.stdin.close()
    open_cache_folder(str(tmp_path), MIB).close()


def test_an_embedded_node_does_without_a_folder_that_another_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = structs.replace(
        default_node_config(), cache_dir=str(tmp_path), cache_bytes=MIB, embedded=True
    )
    trace = Trace("node")
    first = folder_of(config, trace)
    assert first is not None
    assert folder_of(config, trace, 0.0) is None
    assert "another node" in caplog.text
    with pytest.raises(FolderTakenError):
        folder_of(structs.replace(config, embedded=False), trace, 0.0)
    first.close()
    assert folder_of(structs.replace(config, cache_bytes=0), trace) is None


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "blocks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        open_cache_folder(str(tmp_path), MIB)


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users \\(mode 755\\)"):
        open_cache_folder(str(tmp_path), MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir(mode=0o700)
    os.chown(tmp_path / "blocks", 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        open_cache_folder(str(tmp_path), MIB)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    open_cache_folder(str(tmp_path / "link"), MIB).close()  # a link of one's own is followed
    os.lchown(tmp_path / "link", 12345, 12345)
    with pytest.raises(ConfigError, match="symbolic link of another user"):
        open_cache_folder(str(tmp_path / "link"), MIB)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another one with cache_dir"):
        open_cache_folder(str(tmp_path / "file"), MIB)


def test_a_full_disk_does_not_keep_a_node_from_its_folder(tmp_path: Path) -> None:
    first = open_cache_folder(str(tmp_path), MIB)
    first.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow
    try:
        again = open_cache_folder(str(tmp_path), MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again.close()
    assert again.disk_id == first.disk_id


def test_more_than_the_whole_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower cache_bytes"):
        open_cache_folder(str(tmp_path), 1 << 60)


def test_a_folder_has_the_same_id_as_long_as_it_is_there(tmp_path: Path) -> None:
    ids = []
    for folder in ("one", "one", "other"):
        opened = open_cache_folder(str(tmp_path / folder), MIB)
        ids.append(opened.disk_id)
        opened.close()
    assert ids[0] == ids[1] != ids[2]
    (tmp_path / "one" / "blocks" / "id").write_text("nonsense")
    opened = open_cache_folder(str(tmp_path / "one"), MIB)
    opened.close()
    assert opened.disk_id not in ids
