"""Contents as files: what the disk, links, other processes and lost power do to them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import BufferFull, FactError
from ergon_framework.facts.stores import file_uploads
from ergon_framework.facts.stores.file_uploads import SYNC_INTERVAL_BYTES
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.testing.conformance.content_store.fixture import (
    FAR_FUTURE_MS,
    compute_stored,
    interrupt_upload,
    read_content,
    sample_bytes,
    store_content,
)

pytestmark = pytest.mark.spec("FAC-21")


@pytest.fixture
def contents(tmp_path):
    return FileContentStore(tmp_path / "zone" / "artifacts")


@pytest.fixture
def folder(contents, tmp_path):
    return tmp_path / "zone" / "artifacts"


def object_path(folder, digest):
    digits = digest.removeprefix("sha256:")
    return folder / "objects" / digits[:2] / digits[2:4] / digits


# -- what lies there ------------------------------------------------------------------------------------


def test_only_the_owner_may_read_or_write(contents, folder):
    interrupt_upload(contents, b"half", "left")
    stored = store_content(contents, b"x")
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
    assert object_path(folder, stored.digest).read_bytes() == b"x"


def test_damaged_content_of_the_same_size_is_replaced_too(contents, folder):
    stored = store_content(contents, b"good")
    object_path(folder, stored.digest).write_bytes(b"baad")
    store_content(contents, b"good")
    assert read_content(contents, stored.digest) == b"good"


def test_uploads_leave_nothing_but_contents(contents, folder):
    store_content(contents, b"x")
    store_content(contents, b"y", "named")
    interrupt_upload(contents, b"z")
    assert list((folder / "uploads").iterdir()) == []


def test_a_third_party_file_is_not_cleaned_up(contents, folder):
    (folder / "uploads" / "not-an-upload.txt").write_text("mine")
    (folder / "uploads" / "subfolder").mkdir()
    assert contents.delete_stale_uploads(FAR_FUTURE_MS) == 0
    assert {path.name for path in (folder / "uploads").iterdir()} == {"not-an-upload.txt", "subfolder"}


def test_an_unusable_folder_is_reported_immediately(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot store artifacts in .*file"):
        FileContentStore(tmp_path / "file" / "below")


def list_open_paths(folder):
    """Which files and folders below it this process holds open. Others are not counted: what earlier tests left
    behind is closed whenever the collector comes by."""
    paths = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(str(fd.readlink()))
    return sorted(path for path in paths if path.startswith(str(folder)))


def test_no_file_stays_open(contents, folder):
    before = list_open_paths(folder)
    stored = store_content(contents, sample_bytes(600_000), "named")
    half_read = contents.read(stored.digest)
    next(half_read)
    assert len(list_open_paths(folder)) == len(before) + 1, "a content that is being read is open"
    interrupt_upload(contents, b"half", "other")
    for begin in (99, -1):
        with pytest.raises(FactError), contents.begin_upload("other", begin=begin):
            pass
    with pytest.raises(FactError), contents.begin_upload(begin=1):
        pass
    contents.uploaded_bytes("other")
    contents.delete_stale_uploads(FAR_FUTURE_MS)
    contents.size_of(stored.digest)
    contents.remove(stored.digest)
    del half_read
    assert list_open_paths(folder) == before


def test_a_closed_or_collected_store_keeps_no_folder_open(tmp_path):
    contents = FileContentStore(tmp_path)
    assert list_open_paths(tmp_path)
    contents.close()
    assert list_open_paths(tmp_path) == []
    del contents
    # Nor one that is forgotten.
    FileContentStore(tmp_path, max_bytes=10)
    assert list_open_paths(tmp_path) == []


@pytest.mark.spec("FAC-22")
def test_two_mebibytes_are_stored_within_half_a_second(contents):
    durations = []
    for _ in range(5):
        content = sample_bytes(2 * 1024 * 1024)
        started_at = time.perf_counter()
        store_content(contents, content)
        durations.append(time.perf_counter() - started_at)
    assert sorted(durations)[2] < 0.5


# -- links ----------------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-04")
def test_a_link_in_the_path_of_a_content_is_not_followed(contents, folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    digits = compute_stored(b"secret").digest.removeprefix("sha256:")
    (folder / "objects" / digits[:2]).symlink_to(outside)
    with pytest.raises(FactError, match="cannot commit the upload"):
        store_content(contents, b"secret")
    assert list(outside.iterdir()) == []


@pytest.mark.spec("FAC-04")
def test_a_link_in_place_of_a_content_is_not_read_and_is_replaced(contents, folder, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret of another user")
    stored = store_content(contents, b"abc")
    object_path(folder, stored.digest).unlink()
    object_path(folder, stored.digest).symlink_to(tmp_path / "secret")
    assert contents.size_of(stored.digest) is None
    with pytest.raises(KeyError):
        contents.read(stored.digest)
    store_content(contents, b"abc")
    assert read_content(contents, stored.digest) == b"abc"
    assert (tmp_path / "secret").read_bytes() == b"secret of another user"


@pytest.mark.spec("FAC-04")
@pytest.mark.parametrize("name", ["planted", "planted.part"])
def test_a_link_in_place_of_an_upload_is_not_written_through(contents, folder, tmp_path, name):
    (tmp_path / "victim").write_bytes(b"must stay unchanged")
    (folder / "uploads" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(FactError), contents.begin_upload("planted") as receiving:
        receiving.add(b"overwritten")
    assert (tmp_path / "victim").read_bytes() == b"must stay unchanged"


# -- power ----------------------------------------------------------------------------------------------


def simulate_reboot(folder, name):
    claim = folder / "uploads" / name
    claim.write_bytes(b"0" * 36 + claim.read_bytes()[36:])


@pytest.mark.parametrize(
    "size, synced_size",
    [
        (0, 0),
        (1, 0),
        (SYNC_INTERVAL_BYTES - 1, 0),
        (SYNC_INTERVAL_BYTES, 0),
        (SYNC_INTERVAL_BYTES + 1, SYNC_INTERVAL_BYTES),
        (2 * SYNC_INTERVAL_BYTES, SYNC_INTERVAL_BYTES),
        (2 * SYNC_INTERVAL_BYTES + 5, 2 * SYNC_INTERVAL_BYTES),
    ],
)
def test_after_a_loss_of_power_only_synced_bytes_count(contents, folder, size, synced_size):
    content = sample_bytes(size)
    interrupt_upload(contents, content, "cut")
    assert contents.uploaded_bytes("cut") == size
    simulate_reboot(folder, "cut")
    assert contents.uploaded_bytes("cut") == synced_size
    with contents.begin_upload("cut", begin=synced_size) as receiving:
        receiving.add(content[synced_size:])
        assert receiving.commit() == compute_stored(content)


def test_an_upload_resumes_without_a_boot_id(contents, monkeypatch):
    content = sample_bytes(SYNC_INTERVAL_BYTES + 10)
    interrupt_upload(contents, content, "moved")
    monkeypatch.setattr(file_uploads, "boot_id", lambda: "")
    with contents.begin_upload("moved", begin=SYNC_INTERVAL_BYTES) as receiving:
        receiving.add(content[SYNC_INTERVAL_BYTES:])
        assert receiving.commit() == compute_stored(content)


def test_a_large_upload_is_synced_at_every_interval(contents, monkeypatch):
    operations = []
    write, sync = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: operations.append(at + len(data)) or write(fd, data, at))
    monkeypatch.setattr(os, "fsync", lambda fd: operations.append("sync") or sync(fd))
    with contents.begin_upload("big") as receiving:
        operations.clear()
        receiving.add(sample_bytes(2 * SYNC_INTERVAL_BYTES + 3))
        assert operations == [SYNC_INTERVAL_BYTES, "sync", 2 * SYNC_INTERVAL_BYTES, "sync", 2 * SYNC_INTERVAL_BYTES + 3]


def test_a_content_has_its_name_only_when_it_is_on_the_disk(contents, folder, monkeypatch):
    """In this order: the bytes, the folders on the way, the name, the folder with the name."""
    operations = []
    sync, rename = os.fsync, os.rename

    def record_sync(fd):
        operations.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        sync(fd)

    def record_rename(*args, **options):
        operations.append("rename")
        rename(*args, **options)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    with contents.begin_upload() as receiving:
        receiving.add(b"abc")
        operations.clear()
        digits = receiving.commit().digest.removeprefix("sha256:")
    assert operations[0].endswith(".part")
    assert operations[1:] == ["objects", digits[:2], "rename", digits[2:4]]


def test_an_upload_that_cannot_be_synced_is_discarded(contents, folder, monkeypatch):
    with contents.begin_upload("sick") as receiving:
        receiving.add(b"abc")

        def fails(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(FactError, match="cannot sync the upload sick: Input/output error"):
            receiving.commit()
        monkeypatch.undo()
    assert contents.uploaded_bytes("sick") == 0
    assert contents.size_of(compute_stored(b"abc").digest) is None


MOUNT_TABLE = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /memory rw,nosuid - tmpfs tmpfs rw,size=1g
31 22 0:27 / /mnt/with\\040blank rw - xfs /dev/b rw,attr2
32 22 0:28 / /mnt/careless rw - ext4 /dev/c rw,nobarrier
33 22 0:29 / /var/lib/box rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
34 22 0:30 / /var/lib/fast rw - overlay overlay rw,lowerdir=/a,upperdir=/b,volatile
35 22 0:31 / /net rw - nfs4 server:/x rw
36 30 0:32 / /memory/disk rw - btrfs /dev/d rw
"""


@pytest.mark.spec("FAC-26")
@pytest.mark.parametrize(
    "path,durable",
    [
        ("/srv", True),
        ("/memory", False),
        ("/memory/deep/er", False),
        ("/memory/disk/a", True),
        ("/memoryless", True),
        ("/mnt/with blank/a", True),
        ("/mnt/careless", False),
        ("/var/lib/box/a", None),
        ("/var/lib/fast/a", False),
        ("/net/a", None),
    ],
)
def test_the_durability_of_a_file_system_follows_from_its_mount(path, durable, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: MOUNT_TABLE)
    assert file_uploads.is_fsync_durable(path) is durable


@pytest.mark.spec("FAC-26")
def test_memory_is_not_durable(tmp_path):
    assert file_uploads.is_fsync_durable("/dev/shm") is False


# -- room -----------------------------------------------------------------------------------------------

FULL_DISK_PROGRAM = textwrap.dedent(
    """
    import json, subprocess, sys
    from ergon_framework.facts.errors import BufferFull
    from ergon_framework.facts.stores.files import FileContentStore
    from ergon_framework.testing.conformance.content_store.fixture import store_content, compute_stored
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", sys.argv[1]], check=True)
    contents = FileContentStore(sys.argv[1])
    told = []
    for name in (None, "named"):
        try:
            store_content(contents, b"x" * 8_000_000, name)
        except BufferFull as error:
            told.append(str(error))
    here = contents.uploaded_bytes("named")
    contents.delete_stale_uploads(2**42)
    print(json.dumps({
        "told": told,
        "here": here,
        "readable": contents.size_of(compute_stored(b"x" * 8_000_000).digest),
        "then": store_content(contents, b"y" * 1_000_000) == compute_stored(b"y" * 1_000_000),
        "durable": contents.durable,
    }))
    """
)


@pytest.mark.spec("FAC-16")
def test_a_full_disk_is_a_full_buffer_and_leaves_nothing(tmp_path):
    """On a disk of 4 MiB, in a name space of its own."""
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        FULL_DISK_PROGRAM,
        str(tmp_path),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout)
    assert len(report["told"]) == 2
    assert "No space left on device; nothing was stored; free space on that disk" in report["told"][0]
    assert 0 < report["here"] < 4 * 1024 * 1024
    assert report["readable"] is None
    assert report["then"] is True
    assert report["durable"] is False


def test_space_freed_by_another_process_is_used(tmp_path):
    contents = FileContentStore(tmp_path, max_bytes=1000)
    stored = store_content(contents, b"x" * 900)
    other = FileContentStore(tmp_path, max_bytes=1000)
    with pytest.raises(BufferFull, match="900 of 1000 bytes are used"):
        store_content(other, b"y" * 200)
    contents.remove(stored.digest)
    other._budget.INTERVAL_SECONDS = 0.0
    assert store_content(other, b"y" * 200).size == 200


# -- hands ----------------------------------------------------------------------------------------------


def test_the_wait_for_a_stopped_writer_is_bounded(contents, folder, monkeypatch):
    interrupt_upload(contents, b"half", "stuck")
    monkeypatch.setattr(file_uploads, "_LOCK_TIMEOUT_SECONDS", 0.05)
    with (folder / "uploads" / "stuck").open("r+b") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with pytest.raises(FactError, match=r"locked by another process, waited 0\.05 s"):
            contents.uploaded_bytes("stuck")
    assert contents.uploaded_bytes("stuck") == 4


def test_cleanup_spares_a_resumed_upload(contents, folder):
    interrupt_upload(contents, b"half", "old")
    for name in ("old", "old.part"):
        os.utime(folder / "uploads" / name, (1, 1))
    with contents.begin_upload("old", begin=4) as receiving:
        receiving.add(b"more")
        assert contents.delete_stale_uploads(int(time.time() * 1000) - 60_000) == 0
        assert receiving.commit() == compute_stored(b"halfmore")


def test_cleanup_checks_again_when_it_has_the_lock(contents, folder, monkeypatch):
    interrupt_upload(contents, b"half", "old")
    for name in ("old", "old.part"):
        os.utime(folder / "uploads" / name, (1, 1))
    waiting, sleep = threading.Event(), time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: waiting.set() or sleep(seconds))
    counts = []
    cleanup = threading.Thread(
        target=lambda: counts.append(contents.delete_stale_uploads(int(time.time() * 1000) - 60_000))
    )
    with (folder / "uploads" / "old").open("r+b") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        cleanup.start()
        assert waiting.wait(10)
        os.utime(folder / "uploads" / "old.part")
    cleanup.join(10)
    assert counts == [0]
    assert contents.uploaded_bytes("old") == 4


def test_a_commit_killed_before_its_claim_is_removed_leaves_an_empty_upload(contents, folder):
    interrupt_upload(contents, b"abc", "dead")
    (folder / "uploads" / "dead.part").unlink()
    assert contents.uploaded_bytes("dead") == 0
    assert contents.delete_stale_uploads(FAR_FUTURE_MS) == 1
    assert list((folder / "uploads").iterdir()) == []
