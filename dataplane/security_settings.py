"""The settings of dataplane/security: rows of the table in settings.py.

They are here, and not in that room, since every process reads its settings, and only those that
listen or connect over TCP import what acts on these.
"""

from __future__ import annotations

from dataplane.units import FILE_OR_NONE, SWITCH, Setting, fixed

SECURITY_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "token_file",
        FILE_OR_NONE,
        "the file with the token that processes of a service show each other; if not set, the file "
        "`token` in state_dir. DATAPLANE_TOKEN, which holds the token itself, comes first",
        fixed(""),
    ),
    Setting(
        "insecure",
        SWITCH,
        "allow to listen and to connect beyond this host without TLS, although whoever reads along "
        "there learns the token",
        fixed(value=False),
    ),
)
