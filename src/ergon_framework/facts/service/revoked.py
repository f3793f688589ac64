"""Revoked: certificates that are no longer let in, in files that are read again when they change.

A list names certificates, public keys or fingerprints; an authority publishes CRLs. Certificates are compared by issuer
and serial number, keys by the sha256 of their SubjectPublicKeyInfo: neither changes with another signature.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import AccessDenied
from ergon_framework.facts.service.files import Stamp, stamp
from ergon_framework.facts.service.identity import Identity
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
#: The largest file that is read, in bytes.
MAX_FILE: Final = 16 * 1024 * 1024

_DIGEST = re.compile(r"[0-9a-f]{64}").fullmatch
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_CRL: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_PUBLIC_KEY: Final = "public-key"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RevocationList:
    """What one list names."""

    #: Issuer (DER) and serial number of each certificate.
    certificates: frozenset[tuple[bytes, int]] = frozenset()
    public_keys: frozenset[str] = frozenset()
    #: sha256 of whole certificates, as older lists have them.
    fingerprints: frozenset[str] = frozenset()

    def holds(self, who: Identity) -> bool:
        return (
            (who.issuer, who.serial) in self.certificates
            or who.public_key in self.public_keys
            or who.fingerprint in self.fingerprints
            or not self.fingerprints.isdisjoint(who.fingerprints)
        )


@dataclass(frozen=True, slots=True)
class RevokedByIssuer:
    """The CRLs of one file: who is on them, and until when each issuer's holds, in seconds since 1970."""

    certificates: frozenset[tuple[bytes, int]]
    until: dict[bytes, float]


class Revoked:
    """Decides by a list, CRLs, or both, whether a certificate is still let in.

    No caller is let in while a file cannot be read. No caller of an issuer is let in while its CRL is past its next
    update, as with OpenSSL: who was revoked since is not known. Not safe to call from several threads.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        crl: Path | None = None,
        authorities: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if crl is not None and authorities is None:
            raise ConfigurationError(f"the CRL {crl} cannot be verified: name the file of the authorities too")
        self._clock = clock
        self._list = None if path is None else _Watched((path,), lambda: read_list(path))
        self._crl: _Watched[RevokedByIssuer] | None = None
        if crl is not None and authorities is not None:
            self._crl = _Watched((crl, authorities), lambda: read_crl(crl, authorities))
        self._said: set[bytes] = set()

    def check(self, who: Identity) -> None:
        """Raise AccessDenied unless *who* is still let in."""
        if self._list is not None and self._list.current().holds(who):
            raise _revoked(who)
        if self._crl is None:
            return
        published = self._crl.current()
        if (who.issuer, who.serial) in published.certificates:
            raise _revoked(who)
        until = published.until.get(who.issuer)
        if until is not None and until < self._clock():
            self._say_expired(who.issuer, until)
            raise _waiting("the CRL of the certificate's issuer has expired, so its certificates are not let in")
        self._said.discard(who.issuer)

    def _say_expired(self, issuer: bytes, until: float) -> None:
        if issuer not in self._said:
            self._said.add(issuer)
            moment = datetime.fromtimestamp(until, UTC).isoformat()
            error = f"the next update of a CRL was due at {moment}; replace the file of --crl"
            logs.say(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: error}, to=log)


class _Watched(Generic[T]):
    """What *read* makes of *paths*, read again when one of them changes."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._stamps = self._stamp()
        self._value: T | None = read()

    def current(self) -> T:
        """Return what the files hold now; AccessDenied while they cannot be read."""
        now = self._stamp()
        if now != self._stamps:
            try:
                self._value = self._read()
            except ConfigurationError as error:
                self._value = None
                logs.say(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: str(error)}, to=log)
            self._stamps = now
        if self._value is None:
            raise _waiting("the list of revoked certificates cannot be read, so nobody is let in")
        return self._value

    def _stamp(self) -> tuple[Stamp, ...]:
        return tuple(map(stamp, self._paths))


def _revoked(who: Identity) -> AccessDenied:
    return AccessDenied(f"the certificate of {who.name} was revoked; it needs another one")


def _waiting(message: str) -> AccessDenied:
    return AccessDenied(f"{message}; the log of the service says why", final=False, later=True, retry_after=5.0)


# -- files ----------------------------------------------------------------------------------------------


def read_list(path: Path) -> RevocationList:
    """Read a list: certificates (PEM), ``public-key=SHA256`` and fingerprints, a line each; ``#`` begins a comment."""
    data = _bytes(path)
    certificates = frozenset((each.issuer.public_bytes(), each.serial_number) for each in _certificates(path, data))
    # Line numbers stay as they are in the file.
    rest = _CERTIFICATE.sub(lambda found: b"\n" * found[0].count(b"\n"), data)
    try:
        lines = rest.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the list of revoked certificates {path} cannot be read: {error}") from error
    public_keys: set[str] = set()
    fingerprints: set[str] = set()
    for number, line in enumerate(lines, 1):
        name, _, value = line.partition("#")[0].strip().replace(":", "").lower().rpartition("=")
        if not name and not value:
            continue
        if not _DIGEST(value):
            raise ConfigurationError(
                f"{path}:{number} is no sha256 fingerprint, {_PUBLIC_KEY}=SHA256 or certificate in PEM; put the "
                "certificate itself there"
            )
        (public_keys if name.strip() == _PUBLIC_KEY else fingerprints).add(value)
    if fingerprints:
        fields = {
            Field.REASON: f"{path} has {len(fingerprints)} fingerprints of whole certificates, which change with the "
            f"signature; list the certificates (PEM) or {_PUBLIC_KEY}=SHA256, or use --crl"
        }
        logs.say(logging.WARNING, Event.REVOCATION_WEAK, fields, to=log)
    return RevocationList(certificates, frozenset(public_keys), frozenset(fingerprints))


def read_crl(path: Path, authorities: Path) -> RevokedByIssuer:
    """Read the CRLs of *path*, PEM or DER, each of which one of the *authorities* has signed."""
    issuers: dict[bytes, list[x509.Certificate]] = {}
    for each in _certificates(authorities, _bytes(authorities)):
        issuers.setdefault(each.subject.public_bytes(), []).append(each)
    certificates: set[tuple[bytes, int]] = set()
    until: dict[bytes, float] = {}
    for crl in _crls(path, _bytes(path)):
        issuer = crl.issuer.public_bytes()
        if not any(_has_signed(each, crl) for each in issuers.get(issuer, ())):
            raise ConfigurationError(
                f"{path} has a CRL of {crl.issuer.rfc4514_string()} that no certificate in {authorities} has signed; "
                "put the issuer's certificate there, or take the right CRL"
            )
        _check_scope(path, crl)
        certificates.update((issuer, entry.serial_number) for entry in crl)
        if crl.next_update_utc is not None:
            until[issuer] = max(crl.next_update_utc.timestamp(), until.get(issuer, 0.0))
    return RevokedByIssuer(frozenset(certificates), until)


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    try:
        # The library's types leave out the keys that it refuses.
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _check_scope(path: Path, crl: x509.CertificateRevocationList) -> None:
    """Refuse a CRL that is only a part of what its issuer has revoked, or speaks for other issuers."""
    for extension in crl.extensions:
        if not extension.critical:
            continue
        value = extension.value
        whole = (
            isinstance(value, x509.IssuingDistributionPoint)
            and not value.indirect_crl
            and value.only_some_reasons is None
        )
        if not whole:
            raise ConfigurationError(
                f"{path} has a CRL with the critical extension {extension.oid.dotted_string}, which is not supported; "
                "take a complete CRL of the issuer, no delta and no indirect one"
            )


def _crls(path: Path, data: bytes) -> Iterator[x509.CertificateRevocationList]:
    blocks = _CRL.findall(data)
    try:
        if not blocks:
            yield x509.load_der_x509_crl(data)
        for block in blocks:
            yield x509.load_pem_x509_crl(block)
    except ValueError as error:
        raise ConfigurationError(f"{path} is no CRL in PEM or DER: {error}") from error


def _certificates(path: Path, data: bytes) -> Iterator[x509.Certificate]:
    for block in _CERTIFICATE.findall(data):
        try:
            yield x509.load_pem_x509_certificate(block)
        except ValueError as error:
            raise ConfigurationError(f"{path} has a certificate that cannot be read: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE:
            raise ConfigurationError(f"the file {path} has more than {MAX_FILE:,} bytes; split it, or remove entries")
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the list of revoked certificates {path} cannot be read: {error}") from error
