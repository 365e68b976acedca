"""The table of `dataplane plan` with what each host takes, for 1 to 1,024 hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataplane.commands import output

if TYPE_CHECKING:
    from dataplane.plan.shuffled import HostFigures


def show_host_counts(figures: Sequence[HostFigures]) -> None:
    """Show the table."""
    output.stdout().print()
    headings = ("hosts", "ranks", "lanes a rank", "open windows", "reads", "times its share")
    rows = [_row(each) for each in figures]
    output.write_table(headings, rows, "what each host takes, for so many hosts")


def _row(each: HostFigures) -> tuple[str, ...]:
    size = output.approximate_bytes
    return (
        f"{each.host_count:,}",
        f"{each.dp_size:,}",
        f"{each.lanes_per_rank:,}",
        size(each.open_window_bytes_per_host),
        size(each.bytes_read_per_host),
        f"{each.reads_times_share:.2f}",
    )
