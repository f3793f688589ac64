"""Places for contents as candidates, and how they are treated badly."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ergon_framework.facts.stores.file_system import keeps_what_is_synced
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.memory_contents import MemoryContents
from ergon_framework.facts.stores.s3 import SMALLEST, S3Contents
from ergon_framework.testing.conformance.contents import ContentsCandidate


class MemoryPlace(ContentsCandidate):
    durable = False
    bounded = True

    def __init__(self, make=MemoryContents):
        self._make = make
        self._places = {}

    def contents(self, place, *, room=None):
        if place not in self._places:
            self._places[place] = self._make(max_bytes=room)
        return self._places[place]

    def cut(self, place, digest):
        contents = self._places[place].contents
        contents[digest] = contents[digest][:-1]
        return True


class FilePlace(ContentsCandidate):
    bounded = True
    #: Beyond two points at which a named upload is synced.
    large = 17 * 1024 * 1024

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="ergon-contents-"))
        # Where tests run nobody knows it; what is said of which file system has tests of its own.
        self.durable = keeps_what_is_synced(self._folder)

    def contents(self, place, *, room=None):
        return FileContents(self._folder / place, max_bytes=room)

    def cut(self, place, digest):
        digits = digest.removeprefix("sha256:")
        os.truncate(self._folder / place / "objects" / digits[:2] / digits[2:4] / digits, 1)
        return True

    def close(self):
        shutil.rmtree(self._folder)


class S3Place(ContentsCandidate):
    """A real server, whose operator has not said whether it syncs."""

    durable = None
    #: Three parts, the last of them a short one.
    large = 11 * 1024 * 1024

    def __init__(self, server):
        self._server = server

    def contents(self, place, *, room=None):
        return S3Contents("exam", endpoint=self._server.endpoint, prefix=f"zone/{place}", part_bytes=SMALLEST)

    def cut(self, place, digest):
        digits = digest.removeprefix("sha256:")
        self.contents(place)._bucket.replace(f"objects/{digits[:2]}/{digits[2:4]}/{digits}", b"short")
        return True
