"""Identity: the zones and the operator that the URI names in a caller's certificate stand for, and its validity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from ergon_framework.facts.errors import AccessDenied, InvalidFactError
from ergon_framework.facts.model import check_zone

#: Equal for all certificates of one identity: the zones and the operator.
IdentityKey: TypeAlias = tuple[frozenset[str], str | None]

ZONE_URI_PREFIX: Final = "ergon://zone/"
OPERATOR_URI_PREFIX: Final = "ergon://operator/"
#: The orders of the curves whose signatures a handshake accepts: P-224, P-256, P-384 and P-521.
CURVE_ORDERS: Final = (
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFF16A2E0B8F03E13DD29455C5C2A3D,
    0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
    0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973,
    (2**521 - 0x5AE79787C40D069948033FEB708F65A2FC44A36477663B851449048E16EC79BF7),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that a certificate states for its holder."""

    zones: frozenset[str]
    #: The name of the operator; None if the holder is not an operator.
    operator: str | None
    #: Begin and end of the certificate's validity, in seconds since 1970.
    since: float
    until: float
    #: sha256 of the certificate, in hexadecimal digits.
    fingerprint: str
    #: Unaffected by a new signature: issuer (DER), serial number, and sha256 of the public key (SPKI).
    issuer: bytes = b""
    serial: int = 0
    public_key: str = ""
    #: The fingerprint, and those of the same certificate with the other valid ECDSA signature, for old lists.
    fingerprints: frozenset[str] = frozenset()

    @property
    def key(self) -> IdentityKey:
        """The key by which limits are counted."""
        return self.zones, self.operator

    @property
    def name(self) -> str:
        """The display name for logs and audits."""
        names = [f"zone {zone}" for zone in sorted(self.zones)] + [f"operator {self.operator}"] * bool(self.operator)
        return ", ".join(names) or "nobody"

    def check(self, now: float) -> None:
        """Raise AccessDenied unless the certificate is valid at *now*; the caller may retry with a new certificate."""
        if not self.since <= now <= self.until:
            raise AccessDenied(
                f"the certificate of {self.name} is not valid now; put a new one in its place, no restart is needed",
                final=False,
                not_attempted=True,
                retry_after=5.0,
            )


def to_zone_uri(zone: str) -> str:
    """Return the URI of *zone* in a certificate."""
    check_zone("zone", zone)
    return ZONE_URI_PREFIX + quote(zone, safe="")


def to_operator_uri(name: str) -> str:
    """Return the URI of an operator in a certificate."""
    return OPERATOR_URI_PREFIX + quote(name, safe="")


# Cached because every call on a connection presents the same certificate.
@lru_cache(maxsize=1024)
def parse_certificate(pem: bytes) -> Identity:
    """Return the identity in a certificate that the handshake has verified; raise AccessDenied if it names none."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        uris = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            x509.UniformResourceIdentifier
        )
        zones = frozenset(_parse_names(uris, ZONE_URI_PREFIX))
        operators = sorted(_parse_names(uris, OPERATOR_URI_PREFIX))
        public_key = digest_public_key(certificate)
    except (
        ValueError,
        UnsupportedAlgorithm,
        x509.ExtensionNotFound,
        x509.DuplicateExtension,
        InvalidFactError,
    ) as error:
        raise AccessDenied(f"the certificate names nobody in a way that can be read: {error}") from error
    if not zones and not operators:
        raise AccessDenied(f"the certificate names no zone; it needs a URI such as {ZONE_URI_PREFIX}Plant%20A")
    return Identity(
        zones=zones,
        operator=operators[0] if operators else None,
        since=certificate.not_valid_before_utc.timestamp(),
        until=certificate.not_valid_after_utc.timestamp(),
        fingerprint=certificate.fingerprint(SHA256()).hex(),
        issuer=certificate.issuer.public_bytes(),
        serial=certificate.serial_number,
        public_key=public_key,
        fingerprints=frozenset(_list_fingerprints(certificate)),
    )


def digest_public_key(certificate: x509.Certificate) -> str:
    """Return the sha256 of the SubjectPublicKeyInfo, in hexadecimal digits."""
    info = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return _sha256(info)


def _sha256(data: bytes) -> str:
    digest = Hash(SHA256())
    digest.update(data)
    return digest.finalize().hex()


def _list_fingerprints(certificate: x509.Certificate) -> Iterable[str]:
    """Yield the fingerprint of *certificate*, and of each certificate that differs only in the form of its signature.

    An ECDSA signature (r, s) is as valid as (r, n - s), and the conversion needs no key. The curve of the issuer is not
    in the certificate, so all of them are tried.
    """
    yield certificate.fingerprint(SHA256()).hex()
    if not isinstance(certificate.signature_algorithm_parameters, ec.ECDSA):
        return
    r, s = decode_dss_signature(certificate.signature)
    encoded = certificate.public_bytes(serialization.Encoding.DER)
    signed = certificate.tbs_certificate_bytes
    after = encoded[encoded.index(signed) + len(signed) :]
    # The identifier of an ECDSA algorithm has fewer than 128 bytes, so its length is one byte.
    algorithm = after[: 2 + after[1]]
    for order in CURVE_ORDERS:
        if s < order:
            signature = b"\x00" + encode_dss_signature(r, order - s)
            yield _sha256(_encode_der(0x30, signed + algorithm + _encode_der(0x03, signature)))


def _encode_der(tag: int, content: bytes) -> bytes:
    """Encode *content* as DER with *tag*."""
    size = len(content)
    if size < 0x80:  # noqa: PLR2004 - the short form of DER
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _parse_names(uris: Iterable[str], prefix: str) -> Iterable[str]:
    for uri in uris:
        if uri.startswith(prefix):
            name = unquote(uri.removeprefix(prefix), errors="strict")
            check_zone("the name in a certificate", name)
            yield name
