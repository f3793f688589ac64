"""Certificates for tests: an authority, and the files that it signs."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import NameOID

from ergon_framework.facts.service.access import to_operator_uri, to_zone_uri
from ergon_framework.facts.service.tls import TlsFiles


def _to_x509_name(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _to_host_name(host):
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _to_pem(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class CertificateAuthority:
    """Signs certificates, and writes them into *folder*."""

    def __init__(self, folder: Path, name: str = "authority", *, curve: ec.EllipticCurve | None = None) -> None:
        self._folder = folder
        self._name = _to_x509_name(name)
        self._key = ec.generate_private_key(curve or ec.SECP256R1())
        self._certificate = self._sign(self._name, self._key.public_key(), [], ca=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name,
        *,
        zones=(),
        operator=None,
        uris=(),
        hosts=("localhost", "127.0.0.1"),
        lasts=timedelta(days=1),
        since=timedelta(hours=1),
        into=None,
    ):
        """Issue a key and a certificate for *hosts* and *zones*; return the files of a client that trusts them."""
        key = ec.generate_private_key(ec.SECP256R1())
        all_uris = [*map(to_zone_uri, zones), *([to_operator_uri(operator)] if operator else []), *uris]
        names = [*map(_to_host_name, hosts), *map(x509.UniformResourceIdentifier, all_uris)]
        certificate = self._sign(_to_x509_name(name), key.public_key(), names, lasts=lasts, since=since)
        files = into or TlsFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.path)
        # Each file is replaced atomically, as a careful operator does it.
        for path, data in (
            (files.key, _to_pem(key)),
            (files.certificate, certificate.public_bytes(serialization.Encoding.PEM)),
        ):
            new_path = path.with_suffix(".new")
            new_path.write_bytes(data)
            new_path.replace(path)
        return files

    def create_crl(self, *revoked, lasts=timedelta(hours=1), extensions=(), encoding=serialization.Encoding.PEM):
        """Return the bytes of a CRL that lists the certificates of *revoked*."""
        now = datetime.now(UTC)
        last_update = now - timedelta(days=1)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name).last_update(last_update)
        builder = builder.next_update(now + lasts)
        for files in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(load_certificate(files).serial_number)
            builder = builder.add_revoked_certificate(entry.revocation_date(last_update).build())
        for extension in extensions:
            builder = builder.add_extension(extension, critical=True)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(encoding)

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


def load_certificate(files: TlsFiles) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files.certificate.read_bytes())


def compute_fingerprint(files: TlsFiles) -> str:
    return load_certificate(files).fingerprint(hashes.SHA256()).hex()


def compute_public_key_digest(files: TlsFiles) -> str:
    """Return the sha256 of the public key, as openssl pkey -pubin -outform DER | openssl dgst -sha256 prints it."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        load_certificate(files)
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return digest.finalize().hex()


#: The order of each curve's group, by the number of its bits.
_CURVE_ORDERS = {
    256: 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
    384: 2**384 - 1388124618062372383947042015309946732620727252194336364173,
    521: 2**521 - 657877501894328237357444332315020117536923257219387276263472201219398408051703,
}


def with_other_signature(files: TlsFiles, *, bits: int = 256) -> TlsFiles:
    """Return the certificate and key with the other valid ECDSA signature, (r, n - s), without the authority's key.

    *bits* is the size of the authority's key.
    """
    original = load_certificate(files)
    r, s = decode_dss_signature(original.signature)
    signature = encode_dss_signature(r, _CURVE_ORDERS[bits] - s)
    # It is as valid as the first one, or this raises.
    authority = x509.load_pem_x509_certificate(files.authorities.read_bytes())
    authority.public_key().verify(signature, original.tbs_certificate_bytes, ec.ECDSA(hashes.SHA256()))
    der, signed_part = original.public_bytes(serialization.Encoding.DER), original.tbs_certificate_bytes
    rest = der[der.index(signed_part) + len(signed_part) :]
    size = bytes([len(signature) + 1]) if len(signature) < 127 else bytes([0x81, len(signature) + 1])
    body = signed_part + rest[: rest[1] + 2] + b"\x03" + size + b"\x00" + signature
    other_certificate = x509.load_der_x509_certificate(b"\x30\x82" + len(body).to_bytes(2, "big") + body)
    path = files.certificate.with_suffix(".twin")
    path.write_bytes(other_certificate.public_bytes(serialization.Encoding.PEM))
    return TlsFiles(path, files.key, files.authorities)
