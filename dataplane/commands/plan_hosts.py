"""The table of `dataplane plan` with what each host takes, for 1 to 1,024 hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataplane.commands import output

if TYPE_CHECKING:
    from dataplane.plan.shuffled import HostFigures


def show_host_counts(figures: Sequence[HostFigures], *, are_reads_counted: bool) -> None:
    """Show the table. Open windows are estimated from mean sizes. Reads are estimated, too, unless
    `are_reads_counted` over all blocks.
    """
    output.stdout().print()
    reads = "reads" if are_reads_counted else "reads, about"
    headings = (
        *("hosts", "ranks", "lanes a rank", "open windows, about"),
        *(reads, "times its share"),
    )
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
