"""What a node tells of rows that have others in their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dataplane.base.trace import Trace
from dataplane.model.changes import ReplacedRow
from dataplane.model.errors import CorruptShard
from dataplane.node.delivery import ReplacedRows
from dataplane.rpc import tasks
from dataplane.rpc.membership import MemberProgress


def delivery_of(incarnation: str, bad_limit: int | None) -> Any:
    launch = incarnation, "digest"
    return SimpleNamespace(job_id="j", is_for_nodes=False, launch=launch, bad_limit=bad_limit)


def test_rows_are_counted_for_one_launch() -> None:
    rows = ReplacedRows(Trace("node"))
    bad = tasks.Assembled(1, replaced=tuple(ReplacedRow("u", 0, at, 9, "") for at in range(2)))
    good, first = tasks.Assembled(1), delivery_of("i", 1)
    assert isinstance(rows.checked(first, bad), CorruptShard)
    assert isinstance(rows.checked(first, good), CorruptShard)
    assert rows.checked(delivery_of("i2", 1), good) is good
    rows.forget(first)
    assert rows.checked(first, good) is good
    assert len(rows.report(MemberProgress("j", "m")).replaced) == 2
    for number in range(2000):
        rows.note(delivery_of(f"launch {number}", 1), bad)
    assert rows.count("j") <= 2 * 64


def test_what_another_node_says_is_cut_and_without_secrets() -> None:
    rows = ReplacedRows(Trace("node"))
    delivery: Any = delivery_of("i", None)
    signed = "https://h/a.parquet?X-Amz-Signature=abc&session=0123456789abcdef0123456789"
    made = tasks.Assembled(
        1, replaced=(ReplacedRow(signed, 0, 1, 2, "r" * 9999), ReplacedRow("u" * 9999, 0, 1, 2, ""))
    )
    rows.note(delivery, made)
    told = rows.report(MemberProgress("j", "m")).replaced
    assert [one.url for one in told] == ["https://h/a.parquet?session=***", "u" * 1024]
    assert told[0].reason == "r" * 1024
