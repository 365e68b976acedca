"""Where the benchmark keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

from dataplane import settings
from dataplane.base.machine import this_machine


def bench_folder() -> Path:
    """Samples, environments of peers and reports: in the user's cache, beside our own.

    Raises:  ConfigError: the user has no home.
    """
    cache = settings.BY_NAME["cache_dir"].default(this_machine(), os.environ)
    return Path(str(cache), "bench")
