"""TLS files: a key, its certificate and the trusted authorities; they may be replaced while a program runs."""

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

#: Modification time, size and inode, by which a replaced file is noticed; None if the file is missing.
FileStamp: TypeAlias = tuple[int, int, int] | None


def file_stamp(path: Path) -> FileStamp:
    """Return the current stamp of *path*."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Pem(NamedTuple):
    """The contents of the three files, in PEM."""

    key: bytes
    certificate: bytes
    authorities: bytes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the key, of the certificate with its chain up to the authority, and of the trusted authorities."""

    certificate: Path
    key: Path
    authorities: Path

    def mtimes(self) -> tuple[FileStamp, ...]:
        return file_stamp(self.certificate), file_stamp(self.key), file_stamp(self.authorities)

    def read(self) -> Pem:
        """Read all three files and check that they match; raise ConfigurationError if they do not."""
        contents = []
        for kind, path in (("key", self.key), ("certificate", self.certificate), ("authorities", self.authorities)):
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise ConfigurationError(
                    f"reading the {kind} file {path} failed: {error.strerror}; check its path and permissions"
                ) from error
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # An empty password avoids the prompt for an encrypted key: a service starts unattended.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            context.load_verify_locations(self.authorities)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise ConfigurationError(
                f"{self.certificate}, {self.key} and {self.authorities} are not a matching certificate, key and "
                f"authorities file: {error}"
            ) from error
        return Pem(*contents)


class ReloadingTlsFiles:
    """The last readable contents of the files, replaced when changed files are readable too."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamps = files.mtimes()
        self._pem = files.read()

    def reload_if_changed(self) -> Pem | None:
        """Return the current contents if they have changed since the last call."""
        with self._lock:
            now = self._files.mtimes()
            if now == self._stamps:
                return None
            self._stamps = now
            try:
                pem = self._files.read()
            except ConfigurationError as error:
                # Partly replaced: when the other file follows, the stamps differ again.
                logs.log_event(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: str(error)}, to=log)
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
    """Return credentials for mutual TLS with the current files at each handshake; a client certificate is required."""
    reloading = ReloadingTlsFiles(files)

    def to_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pem = reloading.reload_if_changed()
        return None if pem is None else to_configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        to_configuration(reloading.pem), fetch, require_client_authentication=True
    )


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """Return client credentials for mutual TLS with these files."""
    return grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
