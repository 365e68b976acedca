"""Advice about a dataset's folders when it is opened: on folders named "key=value", whose keys are
not read as columns, and on several series of shards in one folder, which other readers treat as
splits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from dataplane.model.errors import ConfigError
from dataplane.plan.manifest import Manifest
from dataplane.store.layouts import hive_keys, series_together

_SERIES_SHOWN = 5


def folder_keys(manifest: Manifest) -> list[str]:
    """Return the keys of this dataset's folders that are no columns of it. Since all shards lie in
    folders with the same keys, only the first and the last shard are examined.
    """
    return _without_columns(manifest, manifest.urls)


def _without_columns(manifest: Manifest, names: Sequence[str]) -> list[str]:
    urls = manifest.shards.urls
    keys = hive_keys((urls[0], urls[-1]), names)
    known = pa.ipc.read_schema(pa.py_buffer(manifest.schema)).names if keys else ()
    return [key for key in keys if key not in known]


def said_of_folders(manifest: Manifest) -> str:
    """Return the advice to give when the dataset is opened; "" if there is none."""
    return "; ".join(filter(None, (_said_of_keys(manifest), _said_of_series(manifest))))


def _said_of_keys(manifest: Manifest) -> str:
    keys = folder_keys(manifest)
    if not keys:
        return ""
    shown = " and ".join(f"{key}=…" for key in keys)
    is_one = len(keys) == 1
    return (
        f"the shards lie in folders {shown}, and {'this key is' if is_one else 'these keys are'} "
        f"not read as {'a column' if is_one else 'columns'}: if you need {_it(keys)}, write "
        f"{_it(keys)} into the shards"
    )


def _said_of_series(manifest: Manifest) -> str:
    urls = manifest.shards.urls
    if b"-of-" not in urls.content.data.tobytes():
        return ""
    together = series_together(list(urls), manifest.urls)
    if together is None:
        return ""
    folder, series = together
    shown = ", ".join(
        f"{folder}{start}* ({count} shard{'s' if count > 1 else ''})"
        for start, count in list(series.items())[:_SERIES_SHOWN]
    )
    more = f" and {len(series) - _SERIES_SHOWN} more" if len(series) > _SERIES_SHOWN else ""
    return (
        f"{len(series)} series of shards in one folder are read as one dataset: {shown}{more}. On "
        "the Hugging Face Hub, they are splits of their own: pass the pattern of the one that you "
        "want, or a list with the patterns of all that you want together"
    )


def _it(keys: list[str]) -> str:
    return "it" if len(keys) == 1 else "them"


@contextlib.contextmanager
def explaining_folders(manifest: Manifest) -> Iterator[None]:
    """Explain, in an error about a missing column, that the column is a key of folder names.

    Raises:  ConfigError: raised by the code within.
    """
    try:
        yield
    except ConfigError as error:
        keys = _without_columns(manifest, ())
        key = next((key for key in keys if repr(key) in str(error)), None)
        if key is None:
            raise
        raise type(error)(
            f"{error}. The shards lie in folders {key}=…, whose names are not read as columns: "
            f"write {key!r} into the shards, or pass the folders that you want",
            **error.nouns,
        ) from None
