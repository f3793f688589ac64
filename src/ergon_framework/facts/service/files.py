"""Files of a key, its certificate and those who are trusted; they may be replaced while a program runs."""

from __future__ import annotations

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import grpc

from ergon_framework.errors import ConfigurationError
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")

#: By what a file that was replaced is noticed; None while there is none.
Stamp: TypeAlias = tuple[int, int, int] | None


def stamp(path: Path) -> Stamp:
    """What *path* is like now."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Pem(NamedTuple):
    """The three as they stand."""

    key: bytes
    certificate: bytes
    authorities: bytes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where they are: the key, its certificate with what stands between it and the authority, and the authorities."""

    certificate: Path
    key: Path
    authorities: Path

    def stamps(self) -> tuple[Stamp, ...]:
        return stamp(self.certificate), stamp(self.key), stamp(self.authorities)

    def read(self) -> Pem:
        """All three, which fit each other; ConfigurationError says what does not."""
        found = []
        for what, path in (("key", self.key), ("certificate", self.certificate), ("authorities", self.authorities)):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise ConfigurationError(f"the file of the {what} cannot be read: {error}") from error
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # Of a key with a password nobody is asked for it: a service starts alone.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            context.load_verify_locations(self.authorities)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self.certificate}, {self.key} and {self.authorities} are no certificate with its key and the "
                f"authorities that sign: {error}"
            ) from error
        return Pem(*found)


class Renewed:
    """The files as a handshake needs them: what was readable last, until what is there now is readable too."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamps = files.stamps()
        self._pem = files.read()

    def changed(self) -> Pem | None:
        """What is there now, if it is other than last time."""
        with self._lock:
            now = self._files.stamps()
            if now == self._stamps:
                return None
            self._stamps = now
            try:
                pem = self._files.read()
            except ConfigurationError as error:
                # Halfway replaced: when the other file follows, the stamps differ again.
                logs.say(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: str(error)}, to=log)
                return None
            if pem == self._pem:
                return None
            self._pem = pem
            return pem

    @property
    def pem(self) -> Pem:
        with self._lock:
            return self._pem


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Mutual TLS with what the files hold at each handshake: nobody without a certificate comes in."""
    renewed = Renewed(files)

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pem = renewed.changed()
        return None if pem is None else configuration(pem)

    return grpc.dynamic_ssl_server_credentials(configuration(renewed.pem), fetch, require_client_authentication=True)


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Mutual TLS with these, from the side that calls."""
    return grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
