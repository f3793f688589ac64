"""Check the size limit of uploads: checked when an upload is announced, and while its bytes arrive."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ergon_framework.facts.errors import ArtifactConflict, ArtifactUnknown, BufferFull, LimitExceeded
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.retention import clean_up_uploads
from ergon_framework.facts.service.server import Limits
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.facts_zones import CLIENT_TYPES, ServiceZones

pytestmark = pytest.mark.spec("SEC-12")

MAX_BYTES = 1_000_000
CHUNK = bytes(100_000)


def to_stored(content):
    return StoredArtifact(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


class LimitedMemoryStore(MemoryBoundary):
    def __init__(self, **options):
        super().__init__(max_bytes=MAX_BYTES, **options)

    def count_bytes(self):
        return self._artifacts.size + self._artifacts.upload_bytes


class LimitedPostgresStore(PostgresBoundary):
    """A store in PostgreSQL, with artifacts in a folder."""

    def __init__(self, dsn, folder, **options):
        self.folder = folder
        super().__init__(dsn, contents=FileContentStore(folder), max_bytes=MAX_BYTES, accept_loss=True, **options)

    def count_bytes(self):
        """Return the size when two readings agree: while files change, one alone may count a replaced file."""
        reading = self._read_sizes()
        while (next_reading := self._read_sizes()) != reading:
            reading = next_reading
        return sum(reading.values())

    def _read_sizes(self):
        files = [*(self.folder / "objects").rglob("*"), *self.folder.glob("uploads/*.part")]
        sizes = {}
        for file in files:
            with suppress(FileNotFoundError):
                status = file.stat()
                if stat.S_ISREG(status.st_mode):
                    sizes[file] = status.st_size
        return sizes


@pytest.fixture(params=["memory", "postgres"])
def store(request, tmp_path):
    if request.param == "memory":
        yield LimitedMemoryStore()
        return
    with LimitedPostgresStore(request.getfixturevalue("database"), tmp_path) as store:
        yield store


def test_an_upload_announced_too_large_is_rejected_before_its_first_byte(store):
    produced = []

    def blob():
        produced.append("a piece")
        yield CHUNK

    with pytest.raises(
        BufferFull, match=r"b/k of 1099511627776 bytes: 0 bytes are retained, the limit is 1000000"
    ) as caught:
        store.put_object("b", "k", blob(), expected=StoredArtifact("sha256:" + "0" * 64, 2**40))
    assert (produced, store.count_bytes(), caught.value.final, caught.value.not_attempted) == ([], 0, True, False)
    store.put_object("b", "first", CHUNK)
    with pytest.raises(BufferFull, match=r"of 950000 bytes: 100000 bytes are retained") as caught:
        store.put_object("b", "k", blob(), expected=StoredArtifact("sha256:" + "0" * 64, 950_000))
    # This upload can be stored later.
    assert (produced, caught.value.final, caught.value.not_attempted) == ([], False, True)


def test_an_upload_is_rejected_as_soon_as_it_exceeds_the_limit(store):
    sizes = []

    def endless_blob():
        for _ in range(50):
            sizes.append(store.count_bytes())
            yield CHUNK

    with pytest.raises(BufferFull, match=r"the limit is 1000000|\d+ of 1000000 bytes are used"):
        store.put_object("b", "k", endless_blob())
    assert (len(sizes), max(sizes)) == (11, MAX_BYTES)
    assert store.count_bytes() == 0
    with pytest.raises(ArtifactUnknown):
        list(store.get_object("b", "k"))


def test_concurrent_uploads_share_the_limit(store):
    readings, barrier = [], threading.Barrier(4)

    def blob():
        barrier.wait(20)
        for _ in range(6):
            readings.append(store.count_bytes())
            yield CHUNK

    def put(number):
        try:
            return store.put_object("b", str(number), blob()).size
        except BufferFull:
            return None

    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(put, range(4)))
    assert max(readings) <= MAX_BYTES
    assert sum(size or 0 for size in sizes) == store.count_bytes() <= MAX_BYTES
    assert None in sizes


def test_an_interrupted_upload_counts_until_it_expires(store, monkeypatch):
    content = os.urandom(800_000)

    def yield_and_fail():
        yield content[:700_000]
        raise OSError("the line is gone")

    with pytest.raises(OSError, match="the line is gone"):
        store.put_object("b", "k", yield_and_fail(), expected=to_stored(content))
    assert store.uploaded_bytes("b", "k", to_stored(content)) == store.count_bytes() == 700_000
    other_content = os.urandom(400_000)
    for expected in (to_stored(other_content), None):
        with pytest.raises(BufferFull):
            store.put_object("b", "other", [other_content], expected=expected)
    # It can be continued meanwhile, although its whole content would not fit again.
    assert store.put_object("b", "k", [content[700_000:]], expected=to_stored(content), begin=700_000).size == 800_000
    assert store.prune(2**52).artifacts == 1
    with pytest.raises(OSError, match="the line is gone"):
        store.put_object("b", "k", yield_and_fail(), expected=to_stored(content))
    wall_clock = store._wall
    monkeypatch.setattr(store, "_wall", lambda: wall_clock() + 61)
    assert store.put_object("b", "other", [other_content], expected=to_stored(other_content)) == to_stored(
        other_content
    )
    assert store.count_bytes() == 400_000


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_full_store_accepts_content_that_it_already_has(store, is_announced):
    content = os.urandom(700_000)
    expected = to_stored(content) if is_announced else None
    store.put_object("b", "k", content)
    assert store.put_object("b", "k", content, expected=expected) == to_stored(content)
    with pytest.raises(ArtifactConflict):
        store.put_object("b", "k", os.urandom(700_000))
    assert store.count_bytes() == 700_000


# -- over the service -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    yield zones
    zones.close()


@pytest.mark.parametrize("kind", CLIENT_TYPES)
def test_a_zone_has_a_limited_number_of_concurrent_uploads(zones, kind):
    zones.serve(f"uploads {kind}", limits=Limits(uploads=1))
    first, second = (zones.connect(zones.plant_files, client_type=CLIENT_TYPES[kind]) for _ in range(2))
    started, may_continue = threading.Event(), threading.Event()

    def blob():
        yield b"first half, "
        started.set()
        assert may_continue.wait(20)
        yield b"second half"

    with ThreadPoolExecutor(1) as pool:
        slow_upload = pool.submit(first.put_object, "b", "slow", blob())
        assert started.wait(20)
        try:
            with pytest.raises(
                LimitExceeded, match="zone 'Plant A' has 1 uploads running, and 1 is the limit"
            ) as caught:
                upload_until_rejected(second)
        finally:
            may_continue.set()
        assert (caught.value.not_attempted, caught.value.retry_after) == (True, 1.0)
        assert slow_upload.result(20).size == 23
    assert second.put_object("b", "quick", [b"x"]).size == 1


def upload_until_rejected(client):
    """Upload until the first upload has reached the service."""
    for number in range(1000):
        client.put_object("b", f"quick {number}", [b"x"])


def test_abandoned_uploads_are_removed(tmp_path):
    swept = threading.Event()

    class WatchedContents(FileContentStore):
        def delete_stale_uploads(self, before_unix_ms):
            try:
                return super().delete_stale_uploads(before_unix_ms)
            finally:
                swept.set()

    contents = WatchedContents(tmp_path)
    for name in ("old", "young"):
        with contents.begin_upload(name) as upload:
            upload.add(b"half of it")
    for file in (tmp_path / "uploads").glob("old*"):
        os.utime(file, (1, 1))
    with clean_up_uploads(contents, keep=3600.0):
        assert swept.wait(20)
    assert (contents.uploaded_bytes("old"), contents.uploaded_bytes("young")) == (0, 10)
