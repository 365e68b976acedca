"""Loaders over fake nodes."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dataplane_torch import DataLoader
from fake_device import FakeDevice, FakeTarget
from fake_node import FakeNode, Script, serving
from shards import arrow_bytes
from small_nodes import LAUNCHED, alone_and_small

from dataplane.rpc.address import served_name


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNode]]:
    """Start a fake node; loaders find it as the service that DATAPLANE_SERVICE names."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with contextlib.ExitStack() as stack:

        def start(**script: Any) -> FakeNode:
            address = f"fake-{uuid.uuid4().hex[:8]}:1"
            monkeypatch.setenv("DATAPLANE_SERVICE", address)
            return stack.enter_context(serving(Script(**script), served_name(os.getuid(), address)))

        yield start


@pytest.fixture
def small_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real embedded node, without other jobs, with budgets that a test can fill."""
    alone_and_small(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def shared_node(run_mark: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real embedded node for all tests of a module, as `small_node` has it: a loader keeps it.
    For tests that read, and neither end nodes nor count what one does.
    """
    folder = tmp_path_factory.mktemp("node")
    (folder / "kept.arrow").write_bytes(arrow_bytes(pa.table({"x": [1]}), rows=1))
    with pytest.MonkeyPatch.context() as patch:
        alone_and_small(patch, folder)
        with DataLoader(f"{folder}/kept.arrow", batch_size=1, name="kept") as kept:
            assert len(list(kept)) == 1
            yield


@pytest.fixture
def own_node(small_node: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of this test alone, in a module whose other tests share one."""
    launch = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def onto(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDevice]:
    """Loaders that are asked for a device get this one."""

    def use(seed: int = 0) -> FakeDevice:
        device = FakeDevice(seed)
        monkeypatch.setattr(
            "dataplane_torch.device.find_target",
            lambda given: None if given is None else FakeTarget(device),
        )
        return device

    return use
