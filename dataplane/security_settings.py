"""The settings of dataplane/security, and of connections between nodes: rows of the table in
settings.py.

They are here, and not in that room, since every process reads its settings, and only those that
listen or connect over TCP import what acts on these.
"""

from __future__ import annotations

from dataplane.rpc.address_kinds import DATA_ADDRESS
from dataplane.units import FILE_OR_NONE, SWITCH, WORDS, Setting, fixed

NEIGHBOUR_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "data_listen",
        DATA_ADDRESS,
        "where other nodes ask a served node for blocks; if not set, a free port at the address by "
        "which it reaches its coordinator, and none where blocks would cross the network in plain "
        "text without `insecure`",
        fixed(""),
    ),
    Setting(
        "peer_tls",
        SWITCH,
        "encrypt the connections over which nodes send each other blocks and slabs, with the files "
        "tls_cert, tls_key and tls_ca; the same on all nodes",
        fixed(value=False),
    ),
)

SECURITY_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "token_file",
        FILE_OR_NONE,
        "the file with the token that processes of a service show each other; if not set, the file "
        "`token` in state_dir. DATAPLANE_TOKEN, which holds the token itself, comes first",
        fixed(""),
    ),
    Setting(
        "tls_cert",
        FILE_OR_NONE,
        "the certificate of this process, and after it those that lead to its CA, in PEM; whatever "
        "listens with TLS needs one",
        fixed(""),
    ),
    Setting("tls_key", FILE_OR_NONE, "the key of tls_cert, in PEM", fixed("")),
    Setting(
        "tls_ca",
        FILE_OR_NONE,
        "the CA of the other side, in PEM: a coordinator with it asks for a client's certificate",
        fixed(""),
    ),
    Setting(
        "tls_peers",
        WORDS,
        "the URIs that certificates of clients may have; all that start with what is before a *; "
        "if not set, all of tls_ca",
        fixed(""),
    ),
    Setting(
        "jwt_key",
        FILE_OR_NONE,
        "the public key, in PEM, with which a coordinator checks JWTs of RS256 or ES256",
        fixed(""),
    ),
    Setting(
        "allowed_urls",
        WORDS,
        "prefixes of the urls that a served node opens, and that jobs of a coordinator may read; "
        "if not set, all",
        fixed(""),
    ),
    Setting(
        "allowed_functions",
        WORDS,
        "the functions of map= and collate= that workers of a served node, or a command, may call: "
        'modules such as "mypackage.text:", and single functions; if not set, none',
        fixed(""),
    ),
    Setting(
        "insecure",
        SWITCH,
        "allow to listen and to connect beyond this host without TLS, although anyone who can read "
        "the network's traffic learns the token",
        fixed(value=False),
    ),
)
