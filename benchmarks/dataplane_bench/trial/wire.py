"""Messages between the harness and a trial's process: one JSON object per line.

The process reads its order (a task and what to do with it) from stdin, later "go", "stop" and
"end"; it answers on what was its stdout. All times are of the system's monotonic clock, which all
processes share.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataplane_bench.model import (
    BatchKind,
    BenchCase,
    ColumnType,
    DatasetPlace,
    Mode,
    StorageKind,
    TrialTask,
    Workload,
    WorkloadColumn,
    WorkloadPart,
)


def line(value: object) -> str:
    """One line, with its end. Values of model.py and paths are written as what they hold."""
    return json.dumps(value, default=_plain) + "\n"


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"not JSON: {value!r}")


def task_of(told: Mapping[str, Any]) -> TrialTask:
    """A task as `line` wrote it."""
    return TrialTask(
        **{
            **told,
            "case": case_of(told["case"]),
            "workload": workload_of(told["workload"]),
            "place": DatasetPlace(**{**told["place"], "folder": Path(told["place"]["folder"])}),
            "cache": Path(told["cache"]),
        }
    )


def case_of(told: Mapping[str, Any]) -> BenchCase:
    """A case as `line` wrote it."""
    return BenchCase(**{**told, "mode": Mode(told["mode"]), "store": StorageKind(told["store"])})


def workload_of(told: Mapping[str, Any]) -> Workload:
    """A workload as `line` wrote it."""
    columns = tuple(
        WorkloadColumn(one["name"], ColumnType(one["kind"]), one["dtype"], tuple(one["shape"]))
        for one in told["columns"]
    )
    return Workload(
        **{
            **told,
            "columns": columns,
            "source": Path(told["source"]),
            "urls": tuple(told["urls"]),
            "delivery": BatchKind(told["delivery"]),
            "parts": tuple(WorkloadPart(**part) for part in told["parts"]),
        }
    )
