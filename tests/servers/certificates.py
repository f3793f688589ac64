"""Certificates for tests: an authority, and whatever it signs, as files."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ergon_framework.facts.service.files import TlsFiles
from ergon_framework.facts.service.identity import operator_uri, zone_uri


def _named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class Authority:
    """Signs certificates, and writes them into *folder*."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(self._name, self._key.public_key(), [], ca=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name, *, zones=(), operator=None, uris=(), lasts=timedelta(days=1), since=timedelta(hours=1), into=None
    ):
        """A key and a certificate for loopback and these zones; the files of somebody who trusts this authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        found = [*map(zone_uri, zones), *([operator_uri(operator)] if operator else []), *uris]
        names = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            *map(x509.UniformResourceIdentifier, found),
        ]
        certificate = self._sign(_named(name), key.public_key(), names, lasts=lasts, since=since)
        files = into or TlsFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.path)
        # Each replaced at once, as an operator who is careful does it.
        for path, data in (
            (files.key, _pem(key)),
            (files.certificate, certificate.public_bytes(serialization.Encoding.PEM)),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(data)
            new.replace(path)
        return files

    def _sign(self, name, public, names, *, lasts=timedelta(days=1), since=timedelta(hours=1), ca=False):
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - since)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def fingerprint(files: TlsFiles) -> str:
    return x509.load_pem_x509_certificate(files.certificate.read_bytes()).fingerprint(hashes.SHA256()).hex()
