"""Shared by `dataplane skip` and `tombstone`: asking the coordinator, and telling what it said."""

from __future__ import annotations

import getpass
import json
import socket
from typing import TYPE_CHECKING

from dataplane.commands import output
from dataplane.commands.options import Settings
from dataplane.commands.traced import asked_coordinator

if TYPE_CHECKING:
    from dataplane.rpc.membership import ChangeRequest, ChangeResponse


def changed(settings: Settings, request: ChangeRequest) -> ChangeResponse:
    """The coordinator's answer.

    Raises:  ConfigError: the change is not possible.  PeerLost, AccessDenied: as the call.
    """
    return asked_coordinator(settings, lambda client: client.change(request))


def who() -> str:
    """Whoever runs this command, for the ledger."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return f"{name}@{socket.gethostname()}"[:256]


def tell(job: str, what: str, answer: ChangeResponse, *, as_json: bool) -> None:
    """Say what was changed, and when it takes effect."""
    if as_json:
        output.write_json({
            "job": job,
            "entry": json.loads(answer.entry.line),
            "is_running": answer.is_running,
            "epoch": answer.epoch,
            "cursor": answer.cursor,
        })  # fmt: skip
        return
    say = output.stdout().print
    say(f"job {job}: {what} (entry {answer.entry.seq})", markup=False, soft_wrap=True)
    step = -(-answer.cursor // answer.global_batch)
    at = f"epoch {answer.epoch}, step {step}"
    when = "when it is started the next time"
    if answer.is_running:
        text = f"it runs, at {at}, and goes on as it is: this takes effect {when}"
    else:
        text = f"this takes effect {when}; it had come to {at}"
    say(text, markup=False, soft_wrap=True)
