"""Access to a boundary: the identity in a caller's certificate, revoked certificates, and the rights of an identity.

A boundary is the service through which zones append and read facts and artifacts.

An identity consists of the zones and the operator that the URIs in a certificate stand for.

A revocation list names certificates, public keys or fingerprints; an authority publishes CRLs. The files are read again
when they change. Certificates are compared by issuer and serial number, keys by the sha256 of their
SubjectPublicKeyInfo: neither changes with another signature.

The store belongs to its own zones, which append facts and store artifacts there. Every other zone reads what is from
it or for it. ``AccessPolicy`` decides this without I/O.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import LogState, ObjectInfo
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, InvalidFactError
from ergon_framework.facts.model import SENDER_PREFIX, ZonePair, check_zone, zone_of_reader
from ergon_framework.facts.service.tls import FileStamp, file_stamp
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

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
        return ", ".join(names) or "no identity"

    def check(self, now: float) -> None:
        """Raise AccessDenied unless the certificate is valid at *now*; the caller may retry with a new certificate."""
        if not self.since <= now <= self.until:
            raise AccessDenied(
                f"the certificate of {self.name} is not valid now; replace it, no restart is needed",
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
        raise AccessDenied(f"the certificate names no identity in a way that can be read: {error}") from error
    if not zones and not operators:
        raise AccessDenied(f"the certificate names no zone; it needs a URI such as {ZONE_URI_PREFIX}Plant%20A")
    return Identity(
        zones=zones,
        # All operators have the same rights, so of several names one is enough.
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


# -- revoked certificates ---------------------------------------------------------------------------

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

    No caller is admitted while a file is unreadable. No caller with a certificate of an issuer is admitted after the
    next update of that issuer's CRL was due, as with OpenSSL, because later revocations are unknown. Not thread-safe.
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
            raise ConfigurationError(f"the CRL {crl} cannot be verified: specify the authorities file too")
        self._clock = clock
        self._list = (
            None
            if path is None
            else _ReloadingValue(
                (path,), lambda: read_revocation_list(path), description="list of revoked certificates"
            )
        )
        self._crl: _ReloadingValue[CrlEntries] | None = None
        if crl is not None and authorities is not None:
            self._crl = _ReloadingValue((crl, authorities), lambda: read_crl(crl, authorities), description="CRL")
        #: Issuers whose expired CRL was logged, so that it is logged once and not for each call.
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
                "the CRL of the certificate's issuer has expired, so certificates of this issuer are rejected until "
                "the service has a current one"
            )
        self._reported_issuers.discard(identity.issuer)

    def _report_expired(self, issuer: bytes, next_update: float) -> None:
        if issuer not in self._reported_issuers:
            self._reported_issuers.add(issuer)
            moment = datetime.fromtimestamp(next_update, UTC).isoformat()
            error = f"the next update of a CRL was due at {moment}; replace the file of --crl"
            logs.log_event(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: error}, to=log)


class _ReloadingValue(Generic[T]):
    """The result of *read* for *paths*, read again when one of them changes; errors name it by *description*."""

    def __init__(self, paths: tuple[Path, ...], read: Callable[[], T], *, description: str) -> None:
        self._description = description
        self._paths = paths
        self._read = read
        self._stamps = self._read_stamps()
        #: None while a changed file is unreadable.
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
            raise _unavailable_error(f"the {self._description} cannot be read, so no caller is admitted")
        return self._value

    def _read_stamps(self) -> tuple[FileStamp, ...]:
        return tuple(map(file_stamp, self._paths))


def _revoked_error(identity: Identity) -> AccessDenied:
    return AccessDenied(f"the certificate of {identity.name} was revoked; use another one")


def _unavailable_error(message: str) -> AccessDenied:
    return AccessDenied(f"{message}; the log of the service says why", final=False, not_attempted=True, retry_after=5.0)


# -- files of revoked certificates ------------------------------------------------------------------


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
                f"{path}:{number} is not a sha256 fingerprint, {_PUBLIC_KEY}=SHA256 or PEM certificate; put the "
                "certificate itself there"
            )
        (public_keys if name.strip() == _PUBLIC_KEY else fingerprints).add(value)
    if fingerprints:
        fields = {
            Field.REASON: f"{path} has {len(fingerprints)} fingerprints of whole certificates, which change with the "
            f"signature; list the certificates (PEM) or {_PUBLIC_KEY}=SHA256, or use --crl"
        }
        logs.log_event(logging.WARNING, Event.REVOCATION_INCOMPLETE, fields, to=log)
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
                "add the issuer's certificate there, or use the right CRL"
            )
        _check_scope(path, crl)
        certificates.update((issuer, entry.serial_number) for entry in crl)
        if crl.next_update_utc is not None:
            # A file may have several CRLs of an issuer; the newest decides when they are outdated.
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
                "use a complete CRL of the issuer, not a delta or indirect one"
            )


def _parse_crls(path: Path, data: bytes) -> Iterator[x509.CertificateRevocationList]:
    blocks = _CRL.findall(data)
    try:
        if not blocks:
            yield x509.load_der_x509_crl(data)
        for block in blocks:
            yield x509.load_pem_x509_crl(block)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a CRL in PEM or DER: {error}") from error


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
        raise ConfigurationError(f"the file {path} cannot be read: {error}; check its path and permissions") from error


# -- access rights ----------------------------------------------------------------------------------

#: Maximum number of readers that a zone may have in a store that is not its own.
MAX_READERS = 100


class AccessPolicy:
    """The access rules of one service, whose store belongs to *zones*."""

    def __init__(self, zones: Collection[str], *, max_readers: int = MAX_READERS) -> None:
        for zone in zones:
            check_zone("zone", zone)
        self._own = frozenset(zones)
        self._max_readers = max_readers

    def check_append_any(self, identity: Identity) -> None:
        """Raise AccessDenied unless *identity* may append at all; checked before a request is received."""
        if not identity.zones & self._own:
            raise AccessDenied(f"only {self._owner_names} may append facts, and the caller is {identity.name}")

    def check_append(self, identity: Identity, zones: Iterable[str]) -> None:
        """Raise AccessDenied unless *identity* may append as all of these zones."""
        for zone in zones:
            if zone not in identity.zones:
                # The name is untrusted and is repeated in the error, so it must be a valid zone name.
                check_zone("from_zone", zone)
                raise AccessDenied(f"only {zone!r} may append its facts, and the caller is {identity.name}")
            if zone not in self._own:
                raise AccessDenied(
                    f"{zone!r} appends to its own store, and this one belongs to {self._owner_names}: facts from "
                    "other zones arrive here by replication"
                )

    def check_lookup(self, identity: Identity, from_zone: str) -> None:
        """Raise AccessDenied unless *identity* may look up a fact from that zone."""
        if from_zone not in identity.zones and identity.operator is None:
            raise AccessDenied(f"only {from_zone!r} may look up its facts, and the caller is {identity.name}")

    def check_cursor(self, identity: Identity, pair: ZonePair) -> None:
        """Raise AccessDenied unless *identity* may query the cursors of *pair*."""
        if identity.operator is None and not involves_zone(identity, pair):
            raise _other_zones_error(identity, pair)

    def check_read(self, identity: Identity, pair: ZonePair, reader: str) -> None:
        """Raise AccessDenied unless *identity* may read *pair* as *reader*, and confirm in that name.

        An operator may query confirmations and cursors, but not the content of facts.
        """
        if not involves_zone(identity, pair):
            raise _other_zones_error(identity, pair)
        owner = zone_of_reader(reader, pair)
        if owner not in identity.zones:
            raise AccessDenied(
                f"the reader {reader!r} belongs to {owner!r}, and the caller is {identity.name}; to read back the "
                f"facts of its own zone, use a name that begins with {SENDER_PREFIX!r}"
            )

    def max_readers(self, pair: ZonePair, reader: str) -> int | None:
        """Return the maximum readers of the zone of *reader*; None if it is a zone of the store."""
        return None if zone_of_reader(reader, pair) in self._own else self._max_readers

    def concerns(self, pair: ZonePair) -> bool:
        """Return whether a zone of the store sends or receives the facts of *pair*."""
        return not self._own.isdisjoint(pair)

    def unknown_pair_error(self, pair: ZonePair) -> AccessDenied:
        """Return the error for a pair that has no facts here and no zone of the store."""
        return AccessDenied(
            f"there are no facts from {pair.from_zone!r} to {pair.to_zone!r} in this store, which belongs to "
            f"{self._owner_names}; query the store of one of the two zones"
        )

    def check_put(self, identity: Identity, zone: str = "") -> str:
        """Return the owner to record for an artifact that *identity* stores as *zone*.

        In a store of several zones each zone has its own namespace. An empty owner stands for all zones of the store;
        a store of one zone uses no other owner.
        """
        own_zones = identity.zones & self._own
        if not own_zones or (zone and zone not in own_zones):
            stored_by = repr(zone) if zone and zone not in identity.zones else self._owner_names
            raise AccessDenied(f"only {stored_by} may store artifacts here, and the caller is {identity.name}")
        if len(self._own) == 1:
            return ""
        return zone or (next(iter(own_zones)) if len(own_zones) == 1 else "")

    def own_zones(self, identity: Identity) -> frozenset[str]:
        """Return the zones of the store that *identity* represents."""
        return identity.zones & self._own

    def list_owners(self, identity: Identity, zone: str = "") -> Sequence[str]:
        """Return the owners to search, in order, when *identity* requests an artifact of *zone*.

        An empty owner stands for all zones of the store.
        """
        if zone:
            return (zone, "") if zone in self._own else (zone,)
        if identity.zones & self._own:
            return (*sorted(identity.zones & self._own), "")
        # Without an owner, the caller means the zones of the store, or reads back its own artifacts.
        return ("", *sorted(self._own), *sorted(identity.zones))

    def check_get(self, identity: Identity, bucket: str, key: str, info: ObjectInfo | None) -> None:
        """Raise ArtifactUnknown unless *identity* may read the artifact: as an owner, or as the receiver of a fact.

        A receiver is a zone for which the store retains a fact of the owner that references the artifact.

        For any other caller the artifact does not exist, whether it is stored or not. Owners pass this check also for
        a missing artifact.
        """
        owners = self._own if info is None or not info.zone else frozenset((info.zone,))
        if identity.zones & owners:
            return
        referenced_by = frozenset[ZonePair]() if info is None else info.referenced_by
        if not any(pair.from_zone in owners and pair.to_zone in identity.zones for pair in referenced_by):
            raise ArtifactUnknown(
                f"no retained fact of its owner for {identity.name} names artifact {bucket}/{key}; pass the zone that "
                "the fact comes from"
            )

    def require_operator(self, identity: Identity) -> str:
        """Return the name of the operator; raise AccessDenied for all other identities."""
        if identity.operator is None:
            raise AccessDenied(
                f"an operator certificate, ergon://operator/NAME, is required, and the caller is {identity.name}"
            )
        return identity.operator

    def filter_visible(self, identity: Identity, states: Iterable[LogState]) -> list[LogState]:
        """Return the logs that *identity* may see."""
        return [state for state in states if identity.operator is not None or involves_zone(identity, state.pair)]

    @property
    def _owner_names(self) -> str:
        return ", ".join(map(repr, sorted(self._own))) or "no zone"


def involves_zone(identity: Identity, pair: ZonePair) -> bool:
    """Return whether a zone pair is from or for *identity*."""
    return not identity.zones.isdisjoint(pair)


def _other_zones_error(identity: Identity, pair: ZonePair) -> AccessDenied:
    return AccessDenied(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are for these two zones, and the caller is {identity.name}"
    )
