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
from ergon_framework.facts.stores import file_system, file_uploads
from ergon_framework.facts.stores.file_uploads import SYNC
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.testing.conformance.contents_words import LATER, break_off, keep, read, some, stored_of

pytestmark = pytest.mark.spec("FAC-21")


@pytest.fixture
def contents(tmp_path):
    return FileContents(tmp_path / "zone" / "artifacts")


@pytest.fixture
def folder(contents, tmp_path):
    return tmp_path / "zone" / "artifacts"


def place(folder, digest):
    digits = digest.removeprefix("sha256:")
    return folder / "objects" / digits[:2] / digits[2:4] / digits


# -- what lies there ------------------------------------------------------------------------------------


def test_nobody_else_may_read_or_write(contents, folder):
    break_off(contents, b"half", "left")
    stored = keep(contents, b"x")
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), f"{path} has {mode:o}"
    assert place(folder, stored.digest).read_bytes() == b"x"


def test_what_is_damaged_without_being_shorter_is_replaced_too(contents, folder):
    stored = keep(contents, b"good")
    place(folder, stored.digest).write_bytes(b"baad")
    keep(contents, b"good")
    assert read(contents, stored.digest) == b"good"


def test_uploads_leave_nothing_but_contents(contents, folder):
    keep(contents, b"x")
    keep(contents, b"y", "named")
    break_off(contents, b"z")
    assert list((folder / "uploads").iterdir()) == []


def test_somebody_elses_file_is_not_swept(contents, folder):
    (folder / "uploads" / "not-an-upload.txt").write_text("mine")
    (folder / "uploads" / "subfolder").mkdir()
    assert contents.sweep(LATER) == 0
    assert {path.name for path in (folder / "uploads").iterdir()} == {"not-an-upload.txt", "subfolder"}


def test_a_folder_that_cannot_be_used_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot keep artifacts in .*file"):
        FileContents(tmp_path / "file" / "below")


def open_below(folder):
    """Which files and folders below it this process holds open. Others are not counted: what earlier tests left
    behind is closed whenever the collector comes by."""
    held = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(str(fd.readlink()))
    return sorted(path for path in held if path.startswith(str(folder)))


def test_no_file_stays_open(contents, folder):
    before = open_below(folder)
    stored = keep(contents, some(600_000), "named")
    half_read = contents.read(stored.digest)
    next(half_read)
    assert len(open_below(folder)) == len(before) + 1, "a content that is being read is open"
    break_off(contents, b"half", "other")
    for begin in (99, -1):
        with pytest.raises(FactError), contents.receive("other", begin=begin):
            pass
    with pytest.raises(FactError), contents.receive(begin=1):
        pass
    contents.received("other")
    contents.sweep(LATER)
    contents.size_of(stored.digest)
    contents.remove(stored.digest)
    del half_read
    assert open_below(folder) == before


def test_a_folder_that_was_let_go_of_is_not_held_open(tmp_path):
    contents = FileContents(tmp_path)
    assert open_below(tmp_path)
    contents.close()
    assert open_below(tmp_path) == []
    del contents
    # Nor one that is forgotten.
    FileContents(tmp_path, max_bytes=10)
    assert open_below(tmp_path) == []


@pytest.mark.spec("FAC-22")
def test_two_mebibytes_are_stored_within_half_a_second(contents):
    took = []
    for _ in range(5):
        content = some(2 * 1024 * 1024)
        began = time.perf_counter()
        keep(contents, content)
        took.append(time.perf_counter() - began)
    assert sorted(took)[2] < 0.5


# -- links ----------------------------------------------------------------------------------------------


@pytest.mark.spec("FAC-04")
def test_a_link_in_the_way_of_a_content_is_not_followed(contents, folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    digits = stored_of(b"secret").digest.removeprefix("sha256:")
    (folder / "objects" / digits[:2]).symlink_to(outside)
    with pytest.raises(FactError, match="cannot keep the upload"):
        keep(contents, b"secret")
    assert list(outside.iterdir()) == []


@pytest.mark.spec("FAC-04")
def test_a_link_in_place_of_a_content_is_not_read_and_is_replaced(contents, folder, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret of somebody else")
    stored = keep(contents, b"abc")
    place(folder, stored.digest).unlink()
    place(folder, stored.digest).symlink_to(tmp_path / "secret")
    assert contents.size_of(stored.digest) is None
    with pytest.raises(KeyError):
        contents.read(stored.digest)
    keep(contents, b"abc")
    assert read(contents, stored.digest) == b"abc"
    assert (tmp_path / "secret").read_bytes() == b"secret of somebody else"


@pytest.mark.spec("FAC-04")
@pytest.mark.parametrize("name", ["planted", "planted.part"])
def test_a_link_in_place_of_an_upload_is_not_written_through(contents, folder, tmp_path, name):
    (tmp_path / "victim").write_bytes(b"dear to somebody")
    (folder / "uploads" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(FactError), contents.receive("planted") as receiving:
        receiving.add(b"overwritten")
    assert (tmp_path / "victim").read_bytes() == b"dear to somebody"


# -- power ----------------------------------------------------------------------------------------------


def other_boot(folder, name):
    claim = folder / "uploads" / name
    claim.write_bytes(b"0" * 36 + claim.read_bytes()[36:])


@pytest.mark.parametrize(
    "size,left",
    [(0, 0), (1, 0), (SYNC - 1, 0), (SYNC, 0), (SYNC + 1, SYNC), (2 * SYNC, SYNC), (2 * SYNC + 5, 2 * SYNC)],
)
def test_after_a_loss_of_power_only_what_was_synced_counts(contents, folder, size, left):
    content = some(size)
    break_off(contents, content, "cut")
    assert contents.received("cut") == size
    other_boot(folder, "cut")
    assert contents.received("cut") == left
    with contents.receive("cut", begin=left) as receiving:
        receiving.add(content[left:])
        assert receiving.seal() == stored_of(content)


def test_an_upload_goes_on_where_runs_of_the_machine_have_shorter_names(contents, monkeypatch):
    content = some(SYNC + 10)
    break_off(contents, content, "moved")
    monkeypatch.setattr(file_uploads, "boot", lambda: "")
    with contents.receive("moved", begin=SYNC) as receiving:
        receiving.add(content[SYNC:])
        assert receiving.seal() == stored_of(content)


def test_what_was_synced_before_a_byte_was_synced_before_it(contents, monkeypatch):
    done = []
    write, sync = os.pwrite, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: done.append(at + len(data)) or write(fd, data, at))
    monkeypatch.setattr(os, "fsync", lambda fd: done.append("sync") or sync(fd))
    with contents.receive("big") as receiving:
        done.clear()
        receiving.add(some(2 * SYNC + 3))
        assert done == [SYNC, "sync", 2 * SYNC, "sync", 2 * SYNC + 3]


def test_a_content_has_its_name_only_when_it_is_on_the_disk(contents, folder, monkeypatch):
    """In this order: the bytes, the folders on the way, the name, the folder with the name."""
    done = []
    sync, rename = os.fsync, os.rename

    def synced(fd):
        done.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        sync(fd)

    def renamed(*args, **given):
        done.append("rename")
        rename(*args, **given)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    with contents.receive() as receiving:
        receiving.add(b"abc")
        done.clear()
        digits = receiving.seal().digest.removeprefix("sha256:")
    assert done[0].endswith(".part")
    assert done[1:] == ["objects", digits[:2], "rename", digits[2:4]]


def test_what_could_not_be_synced_is_thrown_away(contents, folder, monkeypatch):
    with contents.receive("sick") as receiving:
        receiving.add(b"abc")

        def fails(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fails)
        with pytest.raises(FactError, match="cannot sync the upload sick: Input/output error"):
            receiving.seal()
        monkeypatch.undo()
    assert contents.received("sick") == 0
    assert contents.size_of(stored_of(b"abc").digest) is None


SAMPLE = """\
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
def test_what_is_known_of_a_file_system(path, durable, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: SAMPLE)
    assert file_system.keeps_what_is_synced(path) is durable


@pytest.mark.spec("FAC-26")
def test_memory_is_not_durable(tmp_path):
    assert file_system.keeps_what_is_synced("/dev/shm") is False


# -- room -----------------------------------------------------------------------------------------------

FULL = textwrap.dedent(
    """
    import json, subprocess, sys
    from ergon_framework.facts.errors import BufferFull
    from ergon_framework.facts.stores.files import FileContents
    from ergon_framework.testing.conformance.contents_words import keep, stored_of
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", sys.argv[1]], check=True)
    contents = FileContents(sys.argv[1])
    told = []
    for name in (None, "named"):
        try:
            keep(contents, b"x" * 8_000_000, name)
        except BufferFull as error:
            told.append(str(error))
    here = contents.received("named")
    contents.sweep(2**42)
    print(json.dumps({
        "told": told,
        "here": here,
        "readable": contents.size_of(stored_of(b"x" * 8_000_000).digest),
        "then": keep(contents, b"y" * 1_000_000) == stored_of(b"y" * 1_000_000),
        "durable": contents.durable,
    }))
    """
)


@pytest.mark.spec("FAC-16")
def test_a_full_disk_is_a_full_buffer_and_leaves_nothing(tmp_path):
    """On a disk of 4 MiB, in a name space of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told["told"]) == 2
    assert "No space left on device; nothing was stored, make room on that disk" in told["told"][0]
    assert 0 < told["here"] < 4 * 1024 * 1024
    assert told["readable"] is None
    assert told["then"] is True
    assert told["durable"] is False


def test_room_that_others_have_made_is_found(tmp_path):
    contents = FileContents(tmp_path, max_bytes=1000)
    stored = keep(contents, b"x" * 900)
    other = FileContents(tmp_path, max_bytes=1000)
    with pytest.raises(BufferFull, match="900 bytes of artifacts are here and 1000 is the most"):
        keep(other, b"y" * 200)
    contents.remove(stored.digest)
    other._budget.INTERVAL_SECONDS = 0.0
    assert keep(other, b"y" * 200).size == 200


# -- hands ----------------------------------------------------------------------------------------------


def test_somebody_who_was_stopped_in_the_middle_is_not_waited_for_for_ever(contents, folder, monkeypatch):
    break_off(contents, b"half", "stuck")
    monkeypatch.setattr(file_uploads, "_PATIENCE", 0.05)
    with (folder / "uploads" / "stuck").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FactError, match=r"written by a process that has not moved for 0\.05 s"):
            contents.received("stuck")
    assert contents.received("stuck") == 4


def test_sweeping_spares_what_somebody_has_just_come_back_to(contents, folder):
    break_off(contents, b"half", "old")
    for name in ("old", "old.part"):
        os.utime(folder / "uploads" / name, (1, 1))
    with contents.receive("old", begin=4) as receiving:
        receiving.add(b"more")
        assert contents.sweep(int(time.time() * 1000) - 60_000) == 0
        assert receiving.seal() == stored_of(b"halfmore")


def test_sweeping_looks_again_when_it_has_the_lock(contents, folder, monkeypatch):
    break_off(contents, b"half", "old")
    for name in ("old", "old.part"):
        os.utime(folder / "uploads" / name, (1, 1))
    waits, sleep = threading.Event(), time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.set() or sleep(seconds))
    swept = []
    sweeping = threading.Thread(target=lambda: swept.append(contents.sweep(int(time.time() * 1000) - 60_000)))
    with (folder / "uploads" / "old").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        sweeping.start()
        assert waits.wait(10)
        os.utime(folder / "uploads" / "old.part")
    sweeping.join(10)
    assert swept == [0]
    assert contents.received("old") == 4


def test_a_seal_that_died_before_its_claim_was_gone_leaves_an_upload_of_nothing(contents, folder):
    break_off(contents, b"abc", "dead")
    (folder / "uploads" / "dead.part").unlink()
    assert contents.received("dead") == 0
    assert contents.sweep(LATER) == 1
    assert list((folder / "uploads").iterdir()) == []
