"""Check contents in S3 when the server is unavailable, rejects requests, crashes, or has been tampered with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.errors import UploadLost
from ergon_framework.facts.stores.s3 import MIN_PART_BYTES, S3ContentStore
from ergon_framework.testing.conformance.content_store.fixture import (
    FAR_FUTURE_MS,
    compute_stored,
    interrupt_upload,
    read_content,
    sample_bytes,
    store_content,
)
from tests.servers.seaweed import CREDENTIALS, PrivateSeaweed

pytestmark = pytest.mark.spec("FAC-21")


@pytest.fixture
def server(monkeypatch):
    """Yield a separate server that the test may break."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    folder = Path(tempfile.mkdtemp(prefix="ergon-seaweed-"))
    server = PrivateSeaweed(folder)
    try:
        server.start()
        server.create_bucket("artifacts")
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def open_contents(server, **options):
    return S3ContentStore("artifacts", endpoint=server.endpoint, part_bytes=MIN_PART_BYTES, timeout=10.0, **options)


def test_a_crash_of_the_server_loses_only_what_was_not_sent_yet(server):
    content = sample_bytes(3 * MIN_PART_BYTES + 100)
    stored_small = store_content(open_contents(server), sample_bytes(2 * MIN_PART_BYTES))
    with open_contents(server).begin_upload("goeson") as upload:
        upload.add(content[: 2 * MIN_PART_BYTES + 50])
        server.kill()
        with pytest.raises(ConnectionLostError):
            upload.add(content[2 * MIN_PART_BYTES + 50 :])
    for call in (
        lambda: open_contents(server).uploaded_bytes("goeson"),
        lambda: open_contents(server).size_of(stored_small.digest),
        lambda: read_content(open_contents(server), stored_small.digest),
        lambda: open_contents(server).remove(stored_small.digest),
        lambda: open_contents(server).delete_stale_uploads(FAR_FUTURE_MS),
        lambda: store_content(open_contents(server), b"small"),
    ):
        with pytest.raises(ConnectionLostError, match="bucket 'artifacts'"):
            call()
    server.start()
    reopened = open_contents(server)
    assert reopened.size_of(compute_stored(content).digest) is None
    assert reopened.uploaded_bytes("goeson") == 2 * MIN_PART_BYTES
    with reopened.begin_upload("goeson", begin=2 * MIN_PART_BYTES) as upload:
        upload.add(content[2 * MIN_PART_BYTES :])
        stored = upload.commit(compute_stored(content))
    assert read_content(reopened, stored.digest) == content
    assert reopened.size_of(stored_small.digest) == stored_small.size


@pytest.mark.spec("FAC-18")
def test_denied_access_is_reported_with_the_remedy_and_without_secrets(server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-guess")
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY") as caught:
        open_contents(server).size_of(compute_stored(b"x").digest)
    with pytest.raises(ConfigurationError):
        store_content(open_contents(server), b"x")
    assert "a-guess" not in str(caught.value)
    assert caught.value.final


def test_a_missing_bucket_is_reported(seaweed):
    contents = S3ContentStore("nowhere", endpoint=seaweed.endpoint)
    for call in (
        lambda: contents.uploaded_bytes("upload"),
        lambda: store_content(contents, b"x"),
        lambda: contents.delete_stale_uploads(FAR_FUTURE_MS),
    ):
        with pytest.raises(ConfigurationError, match="there is no bucket 'nowhere': create it"):
            call()


def test_an_upload_with_a_changed_part_is_not_committed(seaweed):
    contents = open_contents(seaweed, prefix="tampered")
    content = sample_bytes(2 * MIN_PART_BYTES)
    with contents.begin_upload("touched") as upload:
        upload.add(content)
        path = upload._parts[0][0]
        contents._bucket.replace(path, sample_bytes(MIN_PART_BYTES))
        with pytest.raises(UploadLost):
            upload.commit()
    assert contents.size_of(compute_stored(content).digest) is None


def test_concurrent_continuations_of_an_upload_commit_only_correct_content(seaweed):
    contents = open_contents(seaweed, prefix="rivals")
    content = sample_bytes(2 * MIN_PART_BYTES + 10)
    interrupt_upload(contents, content[:MIN_PART_BYTES], "shared")
    with contents.begin_upload("shared", begin=MIN_PART_BYTES) as first:
        # Another upload has started between the check of the marker and the write.
        first._check_owner = lambda: None
        first.add(content[MIN_PART_BYTES:])
        with contents.begin_upload("shared", begin=MIN_PART_BYTES) as second:
            second.add(content[MIN_PART_BYTES:])
            first._write_part()
            assert second.commit(compute_stored(content)) == compute_stored(content)
    assert read_content(contents, compute_stored(content).digest) == content


def test_parts_used_by_another_upload_are_not_deleted(seaweed):
    contents = open_contents(seaweed, prefix="hands")
    content = sample_bytes(2 * MIN_PART_BYTES)
    with contents.begin_upload("shared") as first:
        first.add(content[:MIN_PART_BYTES])
        with contents.begin_upload("shared", begin=MIN_PART_BYTES) as second:
            first._discard()
            second.add(content[MIN_PART_BYTES:])
            assert second.commit() == compute_stored(content)


@pytest.mark.spec("FAC-26")
def test_contents_are_durable_only_if_configured_so(seaweed):
    assert open_contents(seaweed).durable is None
    assert open_contents(seaweed, durable=True).durable is True


def test_parts_below_the_s3_minimum_are_rejected():
    with pytest.raises(ConfigurationError, match="part_bytes 100 is too small: the minimum is 5,242,880"):
        S3ContentStore("artifacts", part_bytes=100)
