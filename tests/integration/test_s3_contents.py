"""Contents in S3 when the server is away, refuses, crashes, or has been tampered with."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts.errors import UploadLost
from ergon_framework.facts.stores.s3 import SMALLEST, S3Contents
from ergon_framework.testing.conformance.contents_words import LATER, break_off, keep, read, some, stored_of
from tests.servers.seaweed import ACCESS, PrivateSeaweed

pytestmark = pytest.mark.spec("FAC-21")


@pytest.fixture
def server(monkeypatch):
    """A server of the test's own, to be treated badly."""
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    folder = Path(tempfile.mkdtemp(prefix="ergon-seaweed-"))
    server = PrivateSeaweed(folder)
    try:
        server.start()
        server.make_bucket("artifacts")
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def opened(server, **how):
    return S3Contents("artifacts", endpoint=server.endpoint, part_bytes=SMALLEST, timeout=10.0, **how)


def test_a_crash_of_the_server_costs_what_was_not_sent_yet(server):
    content = some(3 * SMALLEST + 100)
    kept = keep(opened(server), some(2 * SMALLEST))
    with opened(server).receive("goeson") as receiving:
        receiving.add(content[: 2 * SMALLEST + 50])
        server.kill()
        with pytest.raises(ConnectionLost):
            receiving.add(content[2 * SMALLEST + 50 :])
    for call in (
        lambda: opened(server).received("goeson"),
        lambda: opened(server).size_of(kept.digest),
        lambda: read(opened(server), kept.digest),
        lambda: opened(server).remove(kept.digest),
        lambda: opened(server).sweep(LATER),
        lambda: keep(opened(server), b"small"),
    ):
        with pytest.raises(ConnectionLost, match="bucket 'artifacts'"):
            call()
    server.start()
    heir = opened(server)
    assert heir.size_of(stored_of(content).digest) is None
    assert heir.received("goeson") == 2 * SMALLEST
    with heir.receive("goeson", begin=2 * SMALLEST) as receiving:
        receiving.add(content[2 * SMALLEST :])
        stored = receiving.seal(stored_of(content))
    assert read(heir, stored.digest) == content
    assert heir.size_of(kept.digest) == kept.size


@pytest.mark.spec("FAC-18")
def test_who_may_not_is_told_what_to_do_and_no_secret(server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-guess")
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY") as told:
        opened(server).size_of(stored_of(b"x").digest)
    with pytest.raises(ConfigurationError):
        keep(opened(server), b"x")
    assert "a-guess" not in str(told.value)
    assert told.value.final


def test_a_bucket_that_is_not_there_is_said(seaweed):
    contents = S3Contents("nowhere", endpoint=seaweed.endpoint)
    for call in (lambda: contents.received("upload"), lambda: keep(contents, b"x"), lambda: contents.sweep(LATER)):
        with pytest.raises(ConfigurationError, match="there is no bucket 'nowhere'; make it"):
            call()


def test_a_part_that_was_changed_is_not_sealed(seaweed):
    contents = opened(seaweed, prefix="tampered")
    content = some(2 * SMALLEST)
    with contents.receive("touched") as receiving:
        receiving.add(content)
        path = receiving._parts[0][0]
        contents._bucket.replace(path, some(SMALLEST))
        with pytest.raises(UploadLost):
            receiving.seal()
    assert contents.size_of(stored_of(content).digest) is None


def test_two_who_go_on_at_the_same_time_seal_nothing_wrong(seaweed):
    contents = opened(seaweed, prefix="rivals")
    content = some(2 * SMALLEST + 10)
    break_off(contents, content[:SMALLEST], "shared")
    with contents.receive("shared", begin=SMALLEST) as first:
        # Between his look at the mark and his writing somebody else has come.
        first._check = lambda: None
        first.add(content[SMALLEST:])
        with contents.receive("shared", begin=SMALLEST) as second:
            second.add(content[SMALLEST:])
            first._put_down()
            assert second.seal(stored_of(content)) == stored_of(content)
    assert read(contents, stored_of(content).digest) == content


def test_parts_in_other_hands_are_not_deleted(seaweed):
    contents = opened(seaweed, prefix="hands")
    content = some(2 * SMALLEST)
    with contents.receive("shared") as first:
        first.add(content[:SMALLEST])
        with contents.receive("shared", begin=SMALLEST) as second:
            first._discard()
            second.add(content[SMALLEST:])
            assert second.seal() == stored_of(content)


@pytest.mark.spec("FAC-26")
def test_it_is_durable_if_somebody_answers_for_it(seaweed):
    assert opened(seaweed).durable is None
    assert opened(seaweed, durable=True).durable is True


def test_parts_that_s3_would_not_take_are_refused():
    with pytest.raises(ConfigurationError, match="a part has at least 5,242,880 bytes on S3, and part_bytes is 100"):
        S3Contents("artifacts", part_bytes=100)
