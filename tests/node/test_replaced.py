"""What a node tells of rows that have others in their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dataplane.base.trace import Trace
from dataplane.model.changes import ReplacedRow
from dataplane.node.delivery import ReplacedRows
from dataplane.rpc import tasks
from dataplane.rpc.membership import MemberProgress


def test_what_another_node_says_is_cut_and_without_secrets() -> None:
    rows = ReplacedRows(Trace("node"))
    delivery: Any = SimpleNamespace(job_id="j", is_for_nodes=False, bad_limit=None)
    signed = "https://h/a.parquet?X-Amz-Signature=abc&session=0123456789abcdef0123456789"
    made = tasks.Assembled(
        1, replaced=(ReplacedRow(signed, 0, 1, 2, "r" * 9999), ReplacedRow("u" * 9999, 0, 1, 2, ""))
    )
    rows.note(delivery, made)
    told = rows.report(MemberProgress("j", "m")).replaced
    assert [one.url for one in told] == ["https://h/a.parquet?session=***", "u" * 1024]
    assert told[0].reason == "r" * 1024
