"""`dataplane doctor --security`: what others could do to a service with these settings.

It starts nothing, and creates no token.
"""

from __future__ import annotations

import datetime as dt
import stat
from collections.abc import Iterator
from pathlib import Path

from dataplane.commands.doctor.checks import Check
from dataplane.commands.options import Settings, security_given
from dataplane.errors import ConfigError
from dataplane.rpc.address import TcpAddress, UnixAddress, is_this_host, parse
from dataplane.rpc.address_kinds import NO_NEIGHBOURS
from dataplane.security.jwts import INSTALL
from dataplane.security.security import Security
from dataplane.security.tls import Pems

_SOON = dt.timedelta(days=2)


def checks(settings: Settings) -> list[Check]:
    """Every check. Advice means that something should be changed."""
    values = {name: one.value for name, one in settings.items()}
    try:
        security = security_given(settings, listens=False)
    except ConfigError as error:
        return [Check("settings", "cannot be used", str(error))]
    listen = parse(str(values["listen"]))
    is_open = isinstance(listen, TcpAddress) and not is_this_host(listen)
    return [
        _token(security, str(values["state_dir"])),
        _listener(security, listen, is_open=is_open),
        _neighbours(security, str(values["data_listen"]), peer_tls=bool(values["peer_tls"])),
        *_certificates(security),
        *_key(security),
        _peers(security, is_open=is_open),
        _jwt_key(str(values["jwt_key"])),
        _urls(security),
    ]


def _token(security: Security, state_dir: str) -> Check:
    if security.tokens is None or not security.tokens.first():
        return Check("token", f"none yet: the first coordinator creates {state_dir}/token")
    found, told = security.tokens.current()[0], security.tokens.told
    path = Path(told)
    if told.startswith("/") and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o007:
        advice = f"every user of this host can read it: chmod o-rwx {path}"
        return Check("token", f"{told}, mode {mode:04o}", advice)
    if len(found) > 1:
        advice = "remove the old ones once every host has the new one"
        return Check("token", f"{told}, {len(found)} tokens", advice)
    return Check("token", f"{told}, {len(found[0])} characters")


def _listener(security: Security, listen: TcpAddress | UnixAddress, *, is_open: bool) -> Check:
    if isinstance(listen, UnixAddress):
        return Check("coordinator", f"{listen.target}: processes of the same user")
    has_own = security.tls is not None and bool(security.tls.files.cert)
    how = "TLS and a token" if has_own else "a token"
    if not is_open:
        return Check("coordinator", f"{listen.target}: users of this host, with {how}")
    if has_own:
        return Check("coordinator", f"{listen.target}: the network, with {how}")
    if security.insecure:
        advice = (
            "anyone who can read the network's traffic learns the token: give tls_cert and tls_key"
        )
        return Check("coordinator", f"{listen.target}: the network, in plain text", advice)
    advice = "give tls_cert and tls_key, or listen on 127.0.0.1"
    return Check("coordinator", f"{listen.target}: does not start without TLS", advice)


def _neighbours(security: Security, wanted: str, *, peer_tls: bool) -> Check:
    if wanted == NO_NEIGHBOURS:
        return Check("neighbours", "none")
    if peer_tls:
        try:
            security.check_peer_tls()
        except ConfigError as error:
            return Check("neighbours", "a node does not start", str(error))
    elif not wanted and security.tls is not None and not security.insecure:
        found = "none beyond this host: blocks would cross the network in plain text"
        return Check("neighbours", f"{found}; peer_tls encrypts them, data_listen allows it")
    where = "a free port" if wanted in ("", ":0") else wanted.removeprefix(":")
    found = f"a node that joins over TCP lends blocks at {where}: to nodes with the key of the job"
    return Check("neighbours", f"{found}, {'with TLS' if peer_tls else 'in plain text'}")


def _certificates(security: Security) -> Iterator[Check]:
    if security.tls is None:
        return
    try:
        from cryptography import x509
    except ImportError:
        yield Check("certificates", "not looked at", f"to see when they end: {INSTALL}")
        return
    pems: Pems = security.tls.current()[0]
    for name, pem in (("tls_cert", pems.cert), ("tls_ca", pems.ca)):
        if pem is None:
            continue
        first = x509.load_pem_x509_certificates(pem)[0]
        now = dt.datetime.now(dt.UTC)
        left = first.not_valid_after_utc - now
        uris = _uris(first) if name == "tls_cert" else []
        found = ", ".join([f"until {first.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", *uris])
        late = "it has ended: renew it" if left < dt.timedelta(0) else "it ends soon: renew it"
        if now < first.not_valid_before_utc:
            late = f"it begins at {first.not_valid_before_utc:%Y-%m-%d %H:%M} UTC: check the clock"
        yield Check(name, found, late if left < _SOON or now < first.not_valid_before_utc else "")


def _uris(certificate: object) -> list[str]:
    from cryptography import x509

    assert isinstance(certificate, x509.Certificate)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _key(security: Security) -> Iterator[Check]:
    if security.tls is None or not security.tls.files.key:
        return
    path = Path(security.tls.files.key)
    mode = stat.S_IMODE(path.stat().st_mode)
    advice = f"every user of this host can read it: chmod o-rwx {path}" if mode & 0o007 else ""
    yield Check("tls_key", f"{path}, mode {mode:04o}", advice)


def _peers(security: Security, *, is_open: bool) -> Check:
    if security.peers:
        return Check("clients", f"certificates with {', '.join(security.peers)}, and a token")
    if security.tls is not None and security.tls.files.ca:
        advice = "tls_peers can name the URIs that may call" if is_open else ""
        return Check("clients", "any certificate of tls_ca, and a token", advice)
    return Check("clients", "a token")


def _jwt_key(path: str) -> Check:
    if not path:
        return Check("JWTs", "signed with the shared token (HS256)")
    from dataplane.security.jwts import public_key

    try:
        return Check("JWTs", f"{public_key(path)[0]}, {path}; and HS256 with the shared token")
    except ConfigError as error:
        return Check("JWTs", "cannot be checked", str(error))


def _urls(security: Security) -> Check:
    if security.allowed_urls:
        return Check("allowed_urls", ", ".join(security.allowed_urls))
    advice = "list prefixes if trainers may not read all that the node's credentials can"
    return Check("allowed_urls", "every url, but no address of a cloud's metadata", advice)
