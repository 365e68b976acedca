"""Which functions the workers of a node call."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from dataplane.model.config import NodeConfig
from dataplane.model.errors import ConfigError
from dataplane.node.own_reads import FoundOnce, check_allowed

EXAMPLE = NodeConfig("/c", 1 << 26, 1 << 27, 1 << 24, 2, 16, 30.0, 120.0, 30.0)


@pytest.mark.parametrize(
    ("allowed", "name"),
    [
        ("mine.text:", "mine.text:tokenise"),
        ("other: mine.text:tokenise", "mine.text:tokenise"),
        ("mine.", "mine.text:tokenise"),
    ],
)
def test_a_served_node_calls_what_its_operator_lists(allowed: str, name: str) -> None:
    check_allowed(structs.replace(EXAMPLE, allowed_functions=allowed), "map", name)


@pytest.mark.parametrize(
    ("allowed", "told"),
    [
        ("", "this node runs no functions"),
        ("mine.text:pad", "only those that it lists: mine.text:pad."),
        ("ine.text:", "only those that it lists: ine.text:"),
    ],
)
def test_a_served_node_refuses_all_others_with_one_line_of_the_log(
    allowed: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_allowed(
            structs.replace(EXAMPLE, allowed_functions=allowed), "map", "mine.text:tokenise"
        )
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "function refused argument=map function=mine.text:tokenise"
    assert told in str(caught.value)
    assert '"mine.text:"' in str(caught.value)


def test_an_embedded_node_calls_what_its_trainer_could() -> None:
    check_allowed(structs.replace(EXAMPLE, embedded=True), "map", "mine.text:tokenise")


async def test_a_function_is_tried_for_as_long_as_somebody_waits() -> None:
    found, tries = FoundOnce[int]("map"), list[asyncio.Future[int]]()

    async def find() -> int:
        tries.append(asyncio.get_running_loop().create_future())
        return await tries[-1]

    async def given_up(*waiting: asyncio.Task[int]) -> None:
        for one in waiting:
            one.cancel()
        assert await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.sleep(0)

    def wait() -> asyncio.Task[int]:
        return asyncio.create_task(found.of("f", find))

    first, second = wait(), wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(tries) == 1
    await given_up(first)
    assert not tries[0].done()
    await given_up(second)
    assert tries[0].cancelled()
    third, fourth = wait(), wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tries[1].set_result(7)
    assert await asyncio.gather(third, fourth) == [7, 7]
    assert await found.of("f", find) == 7
    assert len(tries) == 2
