"""Failures of background tasks. Failures that end a process: chaos/test_defects.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane.base import background


def test_a_librarys_callback_that_raises_is_logged_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def play() -> None:
        background.end_process_on_failure()
        asyncio.get_running_loop().call_soon(json.loads, "no json")
        await asyncio.sleep(0)

    asyncio.run(play())
    assert "JSONDecodeError" in caplog.text


def test_a_callback_of_ours_that_raises_ends_the_process() -> None:
    """Run code in a process, since that is what ends."""
    code = (
        "import asyncio\n"
        "from dataplane.base import background, units\n"
        "async def play():\n"
        "    background.end_process_on_failure()\n"
        "    asyncio.get_running_loop().call_soon(units.BYTES.parse, 'nonsense')\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(play())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == background.EXIT_DEFECT
    assert "task failed: this process exits" in done.stderr
    assert "ValueError" in done.stderr


def test_a_failed_task_is_reported_at_once_and_a_cancelled_one_is_not() -> None:
    told: list[dict[str, object]] = []

    async def fail() -> None:
        raise KeyError("gone")

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        failing = background.start("failing", fail())
        hanging = background.start("hanging", asyncio.Event().wait())
        await asyncio.wait([failing])
        hanging.cancel()
        await asyncio.wait([hanging])

    asyncio.run(play())
    (context,) = told
    assert "'failing'" in str(context["message"])
    assert isinstance(context["exception"], KeyError)


def test_what_fails_in_a_thread_that_nobody_waits_for_is_told_on_the_loop() -> None:
    async def play() -> dict[str, object]:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[dict[str, object]] = loop.create_future()
        loop.set_exception_handler(lambda _, context: told.set_result(context))
        with ThreadPoolExecutor(1) as threads:
            background.watch("fetch", threads.submit({}.__getitem__, "gone"))
            async with asyncio.timeout(60):
                return await told

    context = asyncio.run(play())
    assert "'fetch'" in str(context["message"])
    assert isinstance(context["exception"], KeyError)
