"""The credentials that a process presents to others over TCP, and requires from them.

A process makes one `Security` and hands it to every listener and channel. Nothing is required on a
Unix socket: its file has mode 0600, so that only processes of the same user (and root) can connect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from dataplane.model.errors import ConfigError
from dataplane.security import tokens
from dataplane.security.jwts import Jwts, is_jwt
from dataplane.security.tls import Certificates, TlsFiles, is_any_of
from dataplane.security.tokens import HOLDER_OF_SHARED, Caller, TokenSource, WrongTokenError

AUTHORIZATION = "authorization"
NODE_PROOF = "dataplane-node-bin"
"""The header by which a node proves that its id is its own (node_identity.py)."""
BEARER = "Bearer "
_HOW = (
    f"set {tokens.VARIABLE}, or --token-file to a file that has it. The coordinator's own is in "
    "its state directory (`dataplane config show`, state_dir), in the file `token`"
)


class Security(Struct, frozen=True):
    """The token; the certificates; the URIs that peers' certificates may have
    ("spiffe://cluster/ns/*" matches all that begin with the text before the "*"; () for all);
    whether plain text may cross the network; and the prefixes of the urls that jobs may read (()
    for all).
    """

    tokens: TokenSource | None = None
    insecure: bool = False
    tls: Certificates | None = None
    peers: tuple[str, ...] = ()
    jwts: Jwts | None = None
    allowed_urls: tuple[str, ...] = ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that a client sends with each call."""
        token = "" if self.tokens is None else self.tokens.first()
        return ((AUTHORIZATION, BEARER + token),) if token else ()

    def caller(self, metadata: Mapping[str, str | bytes]) -> Caller:
        """Return the caller of a call.

        Raises:  WrongTokenError.
        """
        assert self.tokens is not None, "`check_listener` refuses to listen without a token"
        shown = metadata.get(AUTHORIZATION)
        if shown is None:
            raise WrongTokenError("no token was sent")
        if not isinstance(shown, str) or not shown.startswith(BEARER):
            raise WrongTokenError("what was sent is not a bearer token")
        token = shown.removeprefix(BEARER)
        if self.tokens.accepts(token):
            return HOLDER_OF_SHARED
        if self.jwts is None or not is_jwt(token):
            raise WrongTokenError("the token is not the coordinator's")
        return self.jwts.caller(token)

    def knows(self, uris: Sequence[str]) -> bool:
        """Return whether one of these URIs of a certificate is permitted by `peers`."""
        return is_any_of(uris, self.peers)

    def advice(self) -> str:
        """Return the advice for a caller whose token was refused."""
        if self.tokens is None or not self.tokens.first():
            return f"This process has no token: {_HOW}"
        return f"This process sent the token of {self.tokens.told}: if it is another's, {_HOW}"

    def refresh(self) -> dict[str, str]:
        """Check all files now. Return the result of each check, by the name of the contents."""
        watched = [one.watched for one in (self.tokens, self.tls, self.jwts) if one is not None]
        return dict(one.refresh() for one in watched if one is not None)

    def check_listener(self, address: str, *, is_loopback: bool) -> None:
        """Check that listening on this address is allowed.

        Raises:  ConfigError: there is no token, or the token would cross the network in plain text;
        or settings of TLS contradict each other.
        """
        if self.tokens is None:
            raise ConfigError(
                f"{address} can be reached by other users, but there is no token to require from "
                f"them: set {tokens.VARIABLE} or --token-file, or listen on unix:/path",
                address=address,
            )
        if self.tls is not None and not self.tls.files.cert:
            raise ConfigError(
                "tls_ca is set, but a listener needs a certificate of its own: give --tls-cert and "
                "--tls-key, too",
                key="tls_cert",
            )
        if self.peers and (self.tls is None or not self.tls.files.ca):
            raise ConfigError(
                "tls_peers is set, but without --tls-ca clients present no certificates: give it",
                key="tls_ca",
            )
        if not is_loopback and self.tls is None and not self.insecure:
            raise ConfigError(
                f"{address} is open to the network, and tokens would cross it in plain text: "
                "give --tls-cert and --tls-key, listen on 127.0.0.1 or unix:/path, or pass "
                "--insecure on a network that nobody else can read",
                address=address,
            )

    def check_peer_tls(self) -> None:
        """Check that connections between nodes can be encrypted: both sides need certificates.

        Raises:  ConfigError: a file is missing.
        """
        files = TlsFiles() if self.tls is None else self.tls.files
        missing = [f"tls_{name}" for name in ("cert", "key", "ca") if not getattr(files, name)]
        if missing:
            raise ConfigError(
                f"peer_tls is set without {', '.join(missing)}: nodes present certificates to each "
                "other, so give --tls-cert, --tls-key and --tls-ca, or leave peer_tls out",
                key=missing[0],
            )

    def check_channel(self, address: str, *, is_loopback: bool) -> None:
        """Check that the token may be sent to this address.

        Raises:  ConfigError: the token would cross the network in plain text.
        """
        if not is_loopback and self.tls is None and not self.insecure:
            raise ConfigError(
                f"{address} is beyond this host, and the token would cross the network in plain "
                "text: give --tls-ca the CA of the coordinator, or pass --insecure "
                "(DATAPLANE_INSECURE=true) on a network that nobody else can read",
                address=address,
            )


def security_of(
    settings: Mapping[str, object], environ: Mapping[str, str] = os.environ, *, listens: bool
) -> Security:
    """Make the credentials from the settings and the environment. With `listens` (on TCP), a token
    is created if there is none.

    Raises:  ConfigError: the token or a certificate cannot be read.
    """
    files = TlsFiles(*(str(settings[name]) for name in ("tls_cert", "tls_key", "tls_ca")))
    source = tokens.find(
        environ, str(settings["token_file"]), str(settings["state_dir"]), makes=listens
    )
    return Security(
        source,
        bool(settings["insecure"]),
        Certificates(files) if files != TlsFiles() else None,
        tuple(str(settings["tls_peers"]).split()),
        Jwts(source, str(settings["jwt_key"])) if listens else None,
        tuple(str(settings["allowed_urls"]).split()),
    )
