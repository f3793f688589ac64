"""Content stores under the conformance suite, and the damage that tests do to them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ergon_framework.facts.stores.file_uploads import is_fsync_durable
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.memory_contents import MemoryContentStore
from ergon_framework.facts.stores.s3 import MIN_PART_BYTES, S3ContentStore
from ergon_framework.testing.conformance.content_store.suite import ContentStoreUnderTest


class MemoryContentsUnderTest(ContentStoreUnderTest):
    durable = False
    bounded = True

    def __init__(self, make=MemoryContentStore):
        self._make = make
        self._stores = {}

    def open(self, store, *, max_bytes=None):
        if store not in self._stores:
            self._stores[store] = self._make(max_bytes=max_bytes)
        return self._stores[store]

    def truncate(self, store, digest):
        contents = self._stores[store].contents
        contents[digest] = contents[digest][:-1]
        return True


class FileContentsUnderTest(ContentStoreUnderTest):
    bounded = True
    #: Larger than two points at which a named upload is synced.
    large = 17 * 1024 * 1024

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="ergon-contents-"))
        # The test machine's file system is unknown; other tests cover the answer for each file system.
        self.durable = is_fsync_durable(self._folder)

    def open(self, store, *, max_bytes=None):
        return FileContentStore(self._folder / store, max_bytes=max_bytes)

    def truncate(self, store, digest):
        digits = digest.removeprefix("sha256:")
        os.truncate(self._folder / store / "objects" / digits[:2] / digits[2:4] / digits, 1)
        return True

    def close(self):
        shutil.rmtree(self._folder)


class S3ContentsUnderTest(ContentStoreUnderTest):
    """A real server, whose operator has not declared whether it syncs."""

    durable = None
    #: Three parts, the last of them a short one.
    large = 11 * 1024 * 1024

    def __init__(self, server):
        self._server = server

    def open(self, store, *, max_bytes=None):
        return S3ContentStore(
            "conformance", endpoint=self._server.endpoint, prefix=f"zone/{store}", part_bytes=MIN_PART_BYTES
        )

    def truncate(self, store, digest):
        digits = digest.removeprefix("sha256:")
        self.open(store)._bucket.replace(f"objects/{digits[:2]}/{digits[2:4]}/{digits}", b"short")
        return True
