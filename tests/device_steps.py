"""Shared by tests of devices: a training loop on a fake device, and the expected bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from fake_device import FakeDevice
from fleet import wait_until


def leaves(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if not isinstance(batch, tuple | list):
        return []
    return [leaf for one in batch for leaf in leaves(one)]


def content(batch: Any) -> list[bytes]:
    """A copy of their current bytes."""
    return [leaf.cpu().contiguous().numpy().tobytes() for leaf in leaves(batch)]


def step(device: FakeDevice, batches: Iterator[Any], expected: list[bytes]) -> None:
    """One step of a loop, in any stream; the batch is dropped when the step was only submitted."""
    device.current = device.random.choice(device.streams[1:])
    for tensor, want in zip(leaves(next(batches)), expected, strict=True):
        device.read(tensor, want)
    device.tick()


def expect_nothing_left(device: FakeDevice) -> None:
    """Check that no wrong byte was read, and that neither side holds memory."""
    device.finish()
    gc.collect()
    wait_until(lambda: not device.pinned)
    left = sum(block.memory.nbytes for block in device.live.values())
    assert not device.failures, device.failures[:3]
    assert not left, f"{left} bytes of the device are held"
