"""The size limit of uploads: compared when one is announced, and counted while its bytes arrive."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from ergon_framework.facts.errors import ArtifactConflict, ArtifactUnknown, BufferFull, LimitExceeded
from ergon_framework.facts.model import Stored
from ergon_framework.facts.retention import sweep_uploads
from ergon_framework.facts.service.server import Limits
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres import PostgresBoundary
from tests.integration.facts_zones import KINDS, Zones

pytestmark = pytest.mark.spec("SEC-12")

LIMIT = 1_000_000
PIECE = bytes(100_000)


def stored(content):
    return Stored(f"sha256:{hashlib.sha256(content).hexdigest()}", len(content))


class Memory(MemoryBoundary):
    def __init__(self, **given):
        super().__init__(max_bytes=LIMIT, **given)

    def bytes_here(self):
        return self._artifacts.size + self._artifacts.upload_bytes


class Files(PostgresBoundary):
    """In PostgreSQL, with artifacts in a folder."""

    def __init__(self, dsn, folder, **given):
        self.folder = folder
        super().__init__(dsn, contents=FileContents(folder), max_bytes=LIMIT, accept_loss=True, **given)

    def bytes_here(self):
        """Two equal readings: while files come and go, one alone may count a file that another has replaced."""
        reading = self._sizes()
        while (again := self._sizes()) != reading:
            reading = again
        return sum(reading.values())

    def _sizes(self):
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
        yield Memory()
        return
    with Files(request.getfixturevalue("database"), tmp_path) as made:
        yield made


def test_what_is_announced_too_large_is_refused_before_its_first_byte(store):
    asked = []

    def blob():
        asked.append("a piece")
        yield PIECE

    with pytest.raises(
        BufferFull, match=r"b/k of 1099511627776 bytes: 0 bytes are retained and 1000000 is the most"
    ) as no:
        store.put_object("b", "k", blob(), expected=Stored("sha256:" + "0" * 64, 2**40))
    assert (asked, store.bytes_here(), no.value.final, no.value.later) == ([], 0, True, False)
    store.put_object("b", "first", PIECE)
    with pytest.raises(BufferFull, match=r"of 950000 bytes: 100000 bytes are retained") as no:
        store.put_object("b", "k", blob(), expected=Stored("sha256:" + "0" * 64, 950_000))
    # That one can be stored later.
    assert (asked, no.value.final, no.value.later) == ([], False, True)


def test_bytes_are_counted_while_they_arrive(store):
    seen = []

    def long():
        for _ in range(50):
            seen.append(store.bytes_here())
            yield PIECE

    with pytest.raises(BufferFull, match="1000000 is the most"):
        store.put_object("b", "k", long())
    assert (len(seen), max(seen)) == (11, LIMIT)
    assert store.bytes_here() == 0
    with pytest.raises(ArtifactUnknown):
        list(store.get_object("b", "k"))


def test_uploads_that_come_at_once_share_the_limit(store):
    peak, start = [], threading.Barrier(4)

    def blob():
        start.wait(20)
        for _ in range(6):
            peak.append(store.bytes_here())
            yield PIECE

    def put(number):
        try:
            return store.put_object("b", str(number), blob()).size
        except BufferFull:
            return None

    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(put, range(4)))
    assert max(peak) <= LIMIT
    assert sum(size or 0 for size in sizes) == store.bytes_here() <= LIMIT
    assert None in sizes


def test_what_broke_off_counts_and_gives_way(store, monkeypatch):
    content = os.urandom(800_000)

    def breaking():
        yield content[:700_000]
        raise OSError("the line is gone")

    with pytest.raises(OSError, match="the line is gone"):
        store.put_object("b", "k", breaking(), expected=stored(content))
    assert store.received("b", "k", stored(content)) == store.bytes_here() == 700_000
    other = os.urandom(400_000)
    for expected in (stored(other), None):
        with pytest.raises(BufferFull):
            store.put_object("b", "other", [other], expected=expected)
    # It can be gone on with meanwhile, though there is no room for all of it once more.
    assert store.put_object("b", "k", [content[700_000:]], expected=stored(content), begin=700_000).size == 800_000
    assert store.prune(2**52).artifacts == 1
    with pytest.raises(OSError, match="the line is gone"):
        store.put_object("b", "k", breaking(), expected=stored(content))
    now = store._wall
    monkeypatch.setattr(store, "_wall", lambda: now() + 61)
    assert store.put_object("b", "other", [other], expected=stored(other)) == stored(other)
    assert store.bytes_here() == 400_000


@pytest.mark.parametrize("announced", [False, True])
def test_what_is_stored_is_answered_by_a_full_store(store, announced):
    content = os.urandom(700_000)
    expected = stored(content) if announced else None
    store.put_object("b", "k", content)
    assert store.put_object("b", "k", content, expected=expected) == stored(content)
    with pytest.raises(ArtifactConflict):
        store.put_object("b", "k", os.urandom(700_000))
    assert store.bytes_here() == 700_000


# -- over the service -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    made = Zones(tmp_path_factory.mktemp("zones"))
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_zone_uploads_so_many_at_once(zones, kind):
    zones.serve(f"uploads {kind}", limits=Limits(uploads=1))
    first, second = (zones.client(zones.plant_files, kind=KINDS[kind]) for _ in range(2))
    begun, go_on = threading.Event(), threading.Event()

    def blob():
        yield b"first half, "
        begun.set()
        assert go_on.wait(20)
        yield b"second half"

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(first.put_object, "b", "slow", blob())
        assert begun.wait(20)
        try:
            with pytest.raises(LimitExceeded, match="zone 'Plant A' has 1 uploads under way, and 1 is the limit") as no:
                refused(second)
        finally:
            go_on.set()
        assert (no.value.later, no.value.retry_after) == (True, 1.0)
        assert slow.result(20).size == 23
    assert second.put_object("b", "quick", [b"x"]).size == 1


def refused(client):
    """Upload until the first upload has reached the service."""
    for number in range(1000):
        client.put_object("b", f"quick {number}", [b"x"])


def test_uploads_that_are_not_gone_on_with_are_removed(tmp_path):
    looked = threading.Event()

    class Watched(FileContents):
        def sweep(self, before_unix_ms):
            try:
                return super().sweep(before_unix_ms)
            finally:
                looked.set()

    contents = Watched(tmp_path)
    for name in ("old", "young"):
        with contents.receive(name) as receiving:
            receiving.add(b"half of it")
    for file in (tmp_path / "uploads").glob("old*"):
        os.utime(file, (1, 1))
    with sweep_uploads(contents, keep=3600.0):
        assert looked.wait(20)
    assert (contents.received("old"), contents.received("young")) == (0, 10)
