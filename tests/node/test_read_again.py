"""Blocks that are read again are told now and then, with how many and how large."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_run import Run, several, simulate

from dataplane.node.read_again import ReadAgain


def block(dataset_id: int = 1, index: int = 0) -> Any:
    manifest = SimpleNamespace(urls=("https://host/x?sig=secret",), block_length=np.array([7, 9]))
    return SimpleNamespace(
        dataset=SimpleNamespace(dataset_id=dataset_id, manifest=manifest), index=index
    )


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.msg.facts for record in caplog.records]  # type: ignore[attr-defined]


def test_a_line_comes_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    again = ReadAgain(1 << 20, lambda: now[0])
    for _ in range(3600):
        again.note([block(index=0), block(index=1)])
        now[0] += 1.0
    lines = told(caplog)
    assert [line["seconds"] for line in lines] == [10, 60, 120, 240, 480, 960]
    assert lines[1]["blocks"] == 120
    assert lines[1]["bytes"] == 60 * 16
    assert lines[0]["block_arena_bytes"] == 1 << 20
    assert lines[0]["dataset"] == "https://host/x?sig=***"


def test_a_few_are_not_worth_a_line_and_a_dataset_that_is_gone_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    again = ReadAgain(1, lambda: now[0])
    again.note([block()])
    again.forget(1)
    now[0] = 100.0
    again.note([block()])
    assert told(caplog) == []


def test_an_arena_that_holds_all_reads_nothing_again_and_a_tight_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []

    def note(_: ReadAgain, evicted: Any) -> None:
        counted.extend(evicted)

    monkeypatch.setattr(ReadAgain, "note", note)
    for seed in range(8):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=50), several)
    assert not counted
    for seed in range(8):
        simulate(lambda seed=seed: Run(random.Random(seed), tight=False, factor=1), several)
    assert counted
