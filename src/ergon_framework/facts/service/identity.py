"""Identity: who a caller is, by the URI names in its certificate, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256

from ergon_framework.facts.errors import AccessDenied, InvalidFactError
from ergon_framework.facts.model import check_zone

ZONE: Final = "ergon://zone/"
OPERATOR: Final = "ergon://operator/"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a certificate says about who holds it."""

    zones: frozenset[str]
    #: The operator's name; None for everybody else.
    operator: str | None
    #: Seconds since 1970 between which it holds.
    since: float
    until: float
    #: sha256 of the certificate, in hexadecimal digits.
    fingerprint: str

    @property
    def name(self) -> str:
        """For logs and audits."""
        who = [f"zone {zone}" for zone in sorted(self.zones)] + [f"operator {self.operator}"] * bool(self.operator)
        return ", ".join(who) or "nobody"

    def check(self, now: float) -> None:
        """Whether it holds at that moment; somebody with an expired certificate may come back with a new one."""
        if not self.since <= now <= self.until:
            raise AccessDenied(
                f"the certificate of {self.name} is not valid now; put a new one in its place, no restart is needed",
                final=False,
                later=True,
                retry_after=5.0,
            )


def zone_uri(zone: str) -> str:
    """How *zone* is written in a certificate."""
    check_zone("zone", zone)
    return ZONE + quote(zone, safe="")


def operator_uri(name: str) -> str:
    """How an operator is written in a certificate."""
    return OPERATOR + quote(name, safe="")


# Of each connection every call brings the same certificate.
@lru_cache(maxsize=1024)
def read(pem: bytes) -> Identity:
    """Who holds the certificate, whose signature the handshake has checked; AccessDenied if it names nobody."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        uris = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            x509.UniformResourceIdentifier
        )
        zones = frozenset(_names(uris, ZONE))
        operators = sorted(_names(uris, OPERATOR))
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, InvalidFactError) as error:
        raise AccessDenied(f"the certificate names nobody in a way that can be read: {error}") from error
    if not zones and not operators:
        raise AccessDenied(f"the certificate names no zone; it needs a URI such as {ZONE}Plant%20A")
    return Identity(
        zones=zones,
        operator=operators[0] if operators else None,
        since=certificate.not_valid_before_utc.timestamp(),
        until=certificate.not_valid_after_utc.timestamp(),
        fingerprint=certificate.fingerprint(SHA256()).hex(),
    )


def _names(uris: Iterable[str], prefix: str) -> Iterable[str]:
    for uri in uris:
        if uri.startswith(prefix):
            name = unquote(uri.removeprefix(prefix), errors="strict")
            check_zone("the name in a certificate", name)
            yield name
