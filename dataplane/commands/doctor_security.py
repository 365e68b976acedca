"""`dataplane doctor --security`: what strangers could do to a service with these settings.

The checks start nothing, and create no token.
"""

from __future__ import annotations

import datetime as dt
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.commands.doctor_checks import Check
from dataplane.commands.options import Settings, security_given
from dataplane.model.errors import ConfigError
from dataplane.rpc.address import NO_NEIGHBOURS, TcpAddress, UnixAddress, is_this_host, parse
from dataplane.security import node_identity, private_file
from dataplane.security.jwts import INSTALL, outline, public_key
from dataplane.security.security import Security
from dataplane.security.tls import Pems

if TYPE_CHECKING:
    from cryptography import x509


_SOON = dt.timedelta(days=2)
_TOLD_MAX = 3
_OF_PYTHON = sys.stdlib_module_names


def checks(settings: Settings) -> list[Check]:
    """Run every check. A check with advice means that something should be changed."""
    values = {name: resolved.value for name, resolved in settings.items()}
    try:
        security = security_given(settings, listens=False)
    except ConfigError as error:
        return [Check("settings", "cannot be used", str(error))]
    listen = parse(str(values["listen"]))
    is_open = _is_far(str(values["listen"]))
    is_far = is_open or any(_is_far(str(values[name])) for name in ("join", "data_listen"))
    shown = str(values["metrics_listen"])
    return [
        _token(security, str(values["state_dir"])),
        _listener("coordinator", security, listen, is_open=is_open),
        *([_listener("metrics", security, parse(shown), is_open=_is_far(shown))] if shown else []),
        _neighbours(
            security, str(values["data_listen"]), peer_tls=bool(values["peer_tls"]), is_far=is_far
        ),
        _neighbour_keys(Path(str(values["state_dir"]), node_identity.OWN_NAME)),
        *_certificates(security),
        *_key(security),
        _peers(security, is_open=is_open),
        _jwt_key(str(values["jwt_key"])),
        _urls(security),
        _functions(str(values["allowed_functions"]).split()),
    ]


def _token(security: Security, state_dir: str) -> Check:
    if security.tokens is None or not security.tokens.first():
        return Check("token", f"none yet: the first coordinator creates {state_dir}/token")
    tokens, origin = security.tokens.current()[0], security.tokens.told
    what = f"{len(tokens[0])} characters" if len(tokens) == 1 else f"{len(tokens)} tokens"
    advice, path = [], Path(origin)
    if origin.startswith("/") and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o007:
        what += f", mode {mode:04o}"
        advice.append(f"every user of this host can read it: chmod o-rwx {path}")
    for number, (says, why) in enumerate((outline(token, time.time()) for token in tokens), 1):
        line = f"line {number}: " if len(tokens) > 1 else ""
        what += f", {line}{says}" if says else ""
        advice += [f"{line}{why}"] if why else []
    if len(tokens) > 1:
        advice.append("remove the old ones once every host has the new one")
    return Check("token", f"{origin}, {what}", "; ".join(advice))


def _listener(
    what: str, security: Security, listen: TcpAddress | UnixAddress, *, is_open: bool
) -> Check:
    if isinstance(listen, UnixAddress):
        return Check(what, f"{listen.target}: processes of the same user")
    has_own = security.tls is not None and bool(security.tls.files.cert)
    how = "TLS and a token" if has_own else "a token"
    if not is_open:
        return Check(what, f"{listen.target}: users of this host, with {how}")
    if has_own:
        return Check(what, f"{listen.target}: the network, with {how}")
    if security.insecure:
        advice = (
            "anyone who can read the network's traffic learns the token: give tls_cert and tls_key"
        )
        return Check(what, f"{listen.target}: the network, in plain text", advice)
    advice = "give tls_cert and tls_key, or listen on 127.0.0.1"
    return Check(what, f"{listen.target}: does not start without TLS", advice)


def _is_far(address: str) -> bool:
    """Return whether an address in the settings is beyond this host. A port without an address
    counts as being on this host.
    """
    if address in ("", NO_NEIGHBOURS) or address.startswith(":"):
        return False
    parsed = parse(address)
    return isinstance(parsed, TcpAddress) and not is_this_host(parsed)


def _neighbours(security: Security, wanted: str, *, peer_tls: bool, is_far: bool) -> Check:
    if wanted == NO_NEIGHBOURS:
        return Check("neighbours", "none")
    if peer_tls:
        try:
            security.check_peer_tls()
        except ConfigError as error:
            return Check("neighbours", "a node does not start", str(error))
    elif not wanted and security.tls is not None and not security.insecure:
        shown = (
            "none beyond this host: a node lends no blocks and makes no slabs for other nodes, "
            "since they would cross the network in plain text"
        )
        advice = "set peer_tls on all nodes, or data_listen to :0 to allow that, or to none"
        return Check("neighbours", shown, advice, may_stay=True)
    where = "a free port" if wanted in ("", ":0") else wanted.removeprefix(":")
    shown = f"a node that joins over TCP lends blocks at {where}: to nodes with the key of the job"
    if peer_tls:
        return Check("neighbours", f"{shown}, with TLS")
    if not is_far and security.tls is None:
        return Check("neighbours", f"{shown}, in plain text within this host")
    advice = (
        "anyone on the network can read blocks, and change them on their way: peer_tls, with "
        "tls_cert, tls_key and tls_ca on all nodes, encrypts them"
    )
    return Check("neighbours", f"{shown}, in plain text", advice)


def _neighbour_keys(path: Path) -> Check:
    """Check the coordinator's secret: the coordinator refuses to start if others can read it."""
    if not path.exists():
        return Check("neighbours' keys", f"none yet: the first coordinator creates {path}")
    shown = f"{path}, mode {stat.S_IMODE(path.stat().st_mode):04o}"
    try:
        private_file.check(path)
    except ConfigError as error:
        return Check("neighbours' keys", shown, str(error))
    return Check("neighbours' keys", shown)


def _certificates(security: Security) -> Iterator[Check]:
    if security.tls is None:
        return
    try:
        import cryptography  # noqa: F401
    except ImportError:
        advice = f"to see when they end: {INSTALL}"
        yield Check("certificates", "not looked at", advice, may_stay=True)
        return
    pems: Pems = security.tls.current()[0]
    for name, pem in (("tls_cert", pems.cert), ("tls_ca", pems.ca)):
        if pem is not None:
            yield _file_of_certificates(name, pem)


def _file_of_certificates(name: str, pem: bytes) -> Check:
    """Check all certificates of a file: a file of CAs may have several, and a certificate may be
    followed by its chain.
    """
    from cryptography import x509

    now, every = dt.datetime.now(dt.UTC), x509.load_pem_x509_certificates(pem)
    ends = min(certificate.not_valid_after_utc for certificate in every)
    shown = [f"until {ends:%Y-%m-%d %H:%M} UTC", *(_uris(every[0]) if name == "tls_cert" else ())]
    if len(every) > 1:
        shown = [f"{len(every)} certificates", f"the first of them {shown[0]}", *shown[1:]]
    late = [
        (certificate.subject.rfc4514_string(), why)
        for certificate in every
        if (why := _late(certificate, now))
    ]
    advice = [f"{who if len(every) > 1 else 'it'} {why}" for who, why in late[:_TOLD_MAX]]
    if len(late) > len(advice):
        advice.append(f"and {len(late) - len(advice)} more")
    return Check(name, ", ".join(shown), "; ".join(advice))


def _late(certificate: x509.Certificate, now: dt.datetime) -> str:
    """Return what is wrong with a certificate's dates, and what to do; "" if nothing is wrong."""
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:
        return f"begins at {begins:%Y-%m-%d %H:%M} UTC: check the clock"
    if now > ends:
        return f"has ended, at {ends:%Y-%m-%d %H:%M} UTC: renew or replace it"
    return "ends soon: renew it" if ends - now < _SOON else ""


def _uris(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

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
        return Check("clients", "any certificate of tls_ca, and a token", advice, may_stay=True)
    return Check("clients", "a token")


def _jwt_key(path: str) -> Check:
    if not path:
        return Check("JWTs", "signed with the shared token (HS256)")

    try:
        return Check("JWTs", f"{public_key(path)[0]}, {path}; and HS256 with the shared token")
    except ConfigError as error:
        return Check("JWTs", "cannot be checked", str(error))


def _urls(security: Security) -> Check:
    if security.allowed_urls:
        return Check("allowed_urls", ", ".join(security.allowed_urls))
    advice = "list prefixes if trainers may not read all that the node's credentials can"
    shown = "every url, but no address of a cloud's metadata"
    return Check("allowed_urls", shown, advice, may_stay=True)


def _functions(allowed: Sequence[str]) -> Check:
    if not allowed:
        return Check("allowed_functions", "none: a served node calls no functions of trainers")
    advice = [
        f"{prefix} contains functions of Python itself, with which trainers can do anything that "
        "the node's user can"
        for prefix in allowed
        if prefix.partition(":")[0].partition(".")[0] in _OF_PYTHON
    ]
    advice += [
        f"{prefix} also allows all modules below it: end it with a colon"
        for prefix in allowed
        if ":" not in prefix
    ]
    return Check("allowed_functions", ", ".join(allowed), "; ".join(advice))
