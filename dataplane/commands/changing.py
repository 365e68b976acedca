"""Shared by commands that change a job: send the request to the coordinator, and print its
answer.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
from typing import TYPE_CHECKING

from dataplane.commands import output
from dataplane.commands.options import Settings
from dataplane.commands.traced import asked_coordinator
from dataplane.rpc.bounds import NAME_LENGTH_MAX
from dataplane.trace import printable

if TYPE_CHECKING:
    from dataplane.ledger import LedgerEntry
    from dataplane.rpc.calls import CoordinatorClient
    from dataplane.rpc.membership import ChangeRequest, ChangeResponse

_PAUSE_S = 0.25


def changed(settings: Settings, request: ChangeRequest) -> tuple[LedgerEntry, ChangeResponse]:
    """Return the entry that the coordinator has made, and its answer. The request is repeated until
    the ranks of the job have agreed.

    Raises:  ConfigError: the change is not possible.  PeerLost, AccessDenied: as the call.
    """

    async def until_decided(client: CoordinatorClient) -> tuple[LedgerEntry, ChangeResponse]:
        while True:
            answer = await client.change(request)
            if answer.entry is not None:
                return answer.entry, answer
            await asyncio.sleep(_PAUSE_S)

    return asked_coordinator(settings, until_decided)


def who() -> str:
    """Return the user who runs this command, for the ledger."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return printable(f"{name}@{socket.gethostname()}")[:NAME_LENGTH_MAX]


def told_as_json(job: str, entry: LedgerEntry, answer: ChangeResponse) -> None:
    """Print the change as JSON."""
    output.write_json({
        "job": job,
        "entry": json.loads(entry.line),
        "is_running": answer.is_running,
        "epoch": answer.epoch,
        "cursor": answer.cursor,
    })  # fmt: skip


def tell(
    job: str, what: str, entry: LedgerEntry, answer: ChangeResponse, *, as_json: bool
) -> None:  # fmt: skip
    """Print the change, and when it takes effect."""
    if as_json:
        told_as_json(job, entry, answer)
        return
    say = output.stdout().print
    said = printable(f"job {job}: {what} (entry {entry.seq})")
    say(said, markup=False, soft_wrap=True)
    step = -(-answer.cursor // answer.global_batch)
    at = f"epoch {answer.epoch}, step {step}"
    when = "when it is started the next time"
    if answer.is_running:
        text = f"it runs, at {at}, and goes on as it is: this takes effect {when}"
    else:
        text = f"this takes effect {when}; it had come to {at}"
    say(text, markup=False, soft_wrap=True)
