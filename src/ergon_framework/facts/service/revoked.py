"""RevocationList: certificates that are no longer admitted, from files that are read again when they change.

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
from ergon_framework.facts.service.files import FileStamp, file_stamp
from ergon_framework.facts.service.identity import Identity
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
#: Maximum size of a file, in bytes.
MAX_FILE_BYTES: Final = 16 * 1024 * 1024

_match_digest = re.compile(r"[0-9a-f]{64}").fullmatch
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_CRL: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_PUBLIC_KEY: Final = "public-key"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RevocationEntries:
    """The entries of one list."""

    #: Issuer (DER) and serial number of each certificate.
    certificates: frozenset[tuple[bytes, int]] = frozenset()
    public_keys: frozenset[str] = frozenset()
    #: sha256 of whole certificates, as in older lists.
    fingerprints: frozenset[str] = frozenset()

    def contains(self, identity: Identity) -> bool:
        return (
            (identity.issuer, identity.serial) in self.certificates
            or identity.public_key in self.public_keys
            or identity.fingerprint in self.fingerprints
            or not self.fingerprints.isdisjoint(identity.fingerprints)
        )


@dataclass(frozen=True, slots=True)
class CrlEntries:
    """The CRLs of one file: their entries, and the next update of each issuer's CRL, in seconds since 1970."""

    certificates: frozenset[tuple[bytes, int]]
    next_updates: dict[bytes, float]


class RevocationList:
    """Decides by a list, CRLs, or both, whether a certificate is still admitted.

    No caller is admitted while a file is unreadable. No caller of an issuer is admitted while its CRL is past its next
    update, as with OpenSSL, because later revocations are unknown. Not thread-safe.
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
        self._list = None if path is None else _ReloadingValue((path,), lambda: read_revocation_list(path))
        self._crl: _ReloadingValue[CrlEntries] | None = None
        if crl is not None and authorities is not None:
            self._crl = _ReloadingValue((crl, authorities), lambda: read_crl(crl, authorities))
        self._reported_issuers: set[bytes] = set()

    def check(self, identity: Identity) -> None:
        """Raise AccessDenied unless *identity* is still admitted."""
        if self._list is not None and self._list.get().contains(identity):
            raise _revoked_error(identity)
        if self._crl is None:
            return
        crl = self._crl.get()
        if (identity.issuer, identity.serial) in crl.certificates:
            raise _revoked_error(identity)
        next_update = crl.next_updates.get(identity.issuer)
        if next_update is not None and next_update < self._clock():
            self._report_expired(identity.issuer, next_update)
            raise _unavailable_error(
                "the CRL of the certificate's issuer has expired, so its certificates are not let in"
            )
        self._reported_issuers.discard(identity.issuer)

    def _report_expired(self, issuer: bytes, next_update: float) -> None:
        if issuer not in self._reported_issuers:
            self._reported_issuers.add(issuer)
            moment = datetime.fromtimestamp(next_update, UTC).isoformat()
            error = f"the next update of a CRL was due at {moment}; replace the file of --crl"
            logs.log_event(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: error}, to=log)


class _ReloadingValue(Generic[T]):
    """The result of *read* for *paths*, read again when one of them changes."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._stamps = self._read_stamps()
        self._value: T | None = read()

    def get(self) -> T:
        """Return the current contents; raise AccessDenied while the files are unreadable."""
        now = self._read_stamps()
        if now != self._stamps:
            try:
                self._value = self._read()
            except ConfigurationError as error:
                self._value = None
                logs.log_event(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: str(error)}, to=log)
            self._stamps = now
        if self._value is None:
            raise _unavailable_error("the list of revoked certificates cannot be read, so nobody is let in")
        return self._value

    def _read_stamps(self) -> tuple[FileStamp, ...]:
        return tuple(map(file_stamp, self._paths))


def _revoked_error(identity: Identity) -> AccessDenied:
    return AccessDenied(f"the certificate of {identity.name} was revoked; it needs another one")


def _unavailable_error(message: str) -> AccessDenied:
    return AccessDenied(f"{message}; the log of the service says why", final=False, not_attempted=True, retry_after=5.0)


# -- files ----------------------------------------------------------------------------------------------


def read_revocation_list(path: Path) -> RevocationEntries:
    """Read a list of PEM certificates, ``public-key=SHA256`` lines and fingerprint lines; ``#`` begins a comment."""
    data = _read_bytes(path)
    certificates = frozenset(
        (each.issuer.public_bytes(), each.serial_number) for each in _parse_certificates(path, data)
    )
    # Certificates become empty lines, so that line numbers in errors match the file.
    rest = _CERTIFICATE.sub(lambda match: b"\n" * match[0].count(b"\n"), data)
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
        if not _match_digest(value):
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
        logs.log_event(logging.WARNING, Event.REVOCATION_WEAK, fields, to=log)
    return RevocationEntries(certificates, frozenset(public_keys), frozenset(fingerprints))


def read_crl(path: Path, authorities: Path) -> CrlEntries:
    """Read the CRLs of *path*, PEM or DER; each must be signed by one of the *authorities*."""
    issuers: dict[bytes, list[x509.Certificate]] = {}
    for each in _parse_certificates(authorities, _read_bytes(authorities)):
        issuers.setdefault(each.subject.public_bytes(), []).append(each)
    certificates: set[tuple[bytes, int]] = set()
    next_updates: dict[bytes, float] = {}
    for crl in _parse_crls(path, _read_bytes(path)):
        issuer = crl.issuer.public_bytes()
        if not any(_has_signed(each, crl) for each in issuers.get(issuer, ())):
            raise ConfigurationError(
                f"{path} has a CRL of {crl.issuer.rfc4514_string()} that no certificate in {authorities} has signed; "
                "put the issuer's certificate there, or take the right CRL"
            )
        _check_scope(path, crl)
        certificates.update((issuer, entry.serial_number) for entry in crl)
        if crl.next_update_utc is not None:
            next_updates[issuer] = max(crl.next_update_utc.timestamp(), next_updates.get(issuer, 0.0))
    return CrlEntries(frozenset(certificates), next_updates)


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    try:
        # The library's type hints exclude the keys that it rejects.
        return crl.is_signature_valid(authority.public_key())  # type: ignore[arg-type]
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return False


def _check_scope(path: Path, crl: x509.CertificateRevocationList) -> None:
    """Reject a CRL that covers only a part of what its issuer has revoked, or that covers other issuers."""
    for extension in crl.extensions:
        if not extension.critical:
            continue
        value = extension.value
        is_complete = (
            isinstance(value, x509.IssuingDistributionPoint)
            and not value.indirect_crl
            and value.only_some_reasons is None
        )
        if not is_complete:
            raise ConfigurationError(
                f"{path} has a CRL with the critical extension {extension.oid.dotted_string}, which is not supported; "
                "take a complete CRL of the issuer, no delta and no indirect one"
            )


def _parse_crls(path: Path, data: bytes) -> Iterator[x509.CertificateRevocationList]:
    blocks = _CRL.findall(data)
    try:
        if not blocks:
            yield x509.load_der_x509_crl(data)
        for block in blocks:
            yield x509.load_pem_x509_crl(block)
    except ValueError as error:
        raise ConfigurationError(f"{path} is no CRL in PEM or DER: {error}") from error


def _parse_certificates(path: Path, data: bytes) -> Iterator[x509.Certificate]:
    for block in _CERTIFICATE.findall(data):
        try:
            yield x509.load_pem_x509_certificate(block)
        except ValueError as error:
            raise ConfigurationError(f"{path} has a certificate that cannot be read: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"the file {path} has more than {MAX_FILE_BYTES:,} bytes; split it, or remove entries"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the list of revoked certificates {path} cannot be read: {error}") from error
