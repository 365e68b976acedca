"""Recognize the kind of target on a command line: a ledger, urls of a dataset, or a job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dataplane import suffixes
from dataplane.errors import ConfigError
from dataplane.ledger import MARK
from dataplane.store.urls import exists


def is_a_ledger(target: Sequence[str]) -> bool:
    """Whether this is one file that begins like a ledger.

    Raises:  ConfigError: the name looks like a file's path, but the file does not exist.
    """
    if len(target) != 1:
        return False
    _expect_file(target[0])
    if not os.path.isfile(target[0]):  # noqa: PTH113 - Path.is_file() raises if it is too long
        return False
    with Path(target[0]).open("rb") as file:
        return file.read(len(MARK)) == MARK


def _expect_file(name: str) -> None:
    """Refuse names that look like a missing file.

    Raises:  ConfigError: the name looks like a file's path, but the file does not exist.
    """
    is_one = "://" not in name and not any(mark in name for mark in "*?{")
    is_path = name.startswith(("/", "./", "../")) or suffixes.suffix_of(name)
    if is_one and is_path and not exists(name):
        raise ConfigError(
            f"there is no file {name}: check the path; `dataplane ledger export JOB` writes the"
            " ledger of a job, and loader.ledger() that of a run without a service"
        )


def names_urls(target: Sequence[str]) -> bool:
    """Whether these are urls or paths, and not the name of a job."""
    return any("://" in one or exists(one) or _is_a_path(one) for one in target)


def _is_a_path(text: str) -> bool:
    return any(mark in text for mark in "/*?{") or bool(suffixes.suffix_of(text))
