"""Revoked: certificates that are no longer let in, in a file that is read again when it changes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import AccessDenied
from ergon_framework.facts.service.files import Stamp, stamp
from ergon_framework.facts.service.identity import Identity
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}").fullmatch
#: The longest list that is read.
LONGEST: Final = 16 * 1024 * 1024


class Revoked:
    """The sha256 fingerprints of one file, a line each; what stands behind a ``#`` is a comment.

    While the file cannot be read nobody is let in: nobody knows who is on it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._found: frozenset[str] | None = frozenset()
        if path is not None:
            self._found = read(path)
            self._stamp = stamp(path)

    def check(self, who: Identity) -> None:
        """Whether *who* is still let in."""
        if self._path is not None:
            self._look(self._path)
        if self._found is None:
            raise AccessDenied(
                "the list of revoked certificates cannot be read, so nobody is let in; the log of the service says why",
                final=False,
                later=True,
                retry_after=5.0,
            )
        if who.fingerprint in self._found:
            raise AccessDenied(f"the certificate of {who.name} was revoked; it needs another one")

    def _look(self, path: Path) -> None:
        now = stamp(path)
        if now == self._stamp:
            return
        try:
            self._found = read(path)
        except ConfigurationError as error:
            self._found = None
            logs.say(logging.ERROR, Event.CERTIFICATES_UNREADABLE, {Field.ERROR: str(error)}, to=log)
        self._stamp = now


def read(path: Path) -> frozenset[str]:
    """The fingerprints in *path*; colons between the digits are left out, as openssl writes them."""
    try:
        if path.stat().st_size > LONGEST:
            raise ConfigurationError(f"the list of revoked certificates {path} has more than {LONGEST:,} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the list of revoked certificates {path} cannot be read: {error}") from error
    found = set()
    for number, line in enumerate(lines, 1):
        word = line.partition("#")[0].strip().replace(":", "").lower().rpartition("=")[2]
        if word and not _FINGERPRINT(word):
            raise ConfigurationError(
                f"{path}:{number} is no sha256 fingerprint of a certificate; openssl x509 -noout -fingerprint -sha256 "
                "prints it"
            )
        if word:
            found.add(word)
    return frozenset(found)
