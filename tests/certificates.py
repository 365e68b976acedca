"""Certificates of authorities that only tests know, as cert-manager and SPIRE write them: PEM files
with DNS names, addresses and URIs.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dataplane.security.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def made(cls, name: str = "tests", lasts: dt.timedelta = dt.timedelta(days=1)) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        built = (
            _builder(subject, subject, key.public_key(), lasts)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, built)

    def write(
        self,
        folder: Path,
        name: str,
        *,
        uri: str = "",
        begins: dt.timedelta = -dt.timedelta(days=2),
        lasts: dt.timedelta = dt.timedelta(hours=1),
        trusts: Authority | None = None,
        address: str = "127.0.0.1",
    ) -> TlsFiles:
        """A key, a certificate for this machine, and what it trusts; each is replaced at once.
        `address` is this machine's.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address(address)),
        ]
        if uri:
            names.append(x509.UniformResourceIdentifier(uri))
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        built = (
            _builder(_name(name), self.certificate.subject, key.public_key(), lasts, begins)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        ca = (trusts or self).certificate
        paths = [folder / f"{name}.{kind}" for kind in ("crt", "key", "ca")]
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pem = serialization.Encoding.PEM
        for path, body in zip(
            paths, (built.public_bytes(pem), private, ca.public_bytes(pem)), strict=True
        ):
            aside = path.with_suffix(".new")
            aside.write_bytes(body)
            aside.replace(path)
        return TlsFiles(*map(str, paths))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lasts: dt.timedelta,
    begins: dt.timedelta = -dt.timedelta(days=2),
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + lasts)
    )
