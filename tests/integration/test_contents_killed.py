"""An upload whose process is killed repeatedly with SIGKILL continues each time and is complete in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.testing.conformance.content_store.fixture import FAR_FUTURE_MS, compute_stored, read_content

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-21")]

SIZE = 24 * 1024 * 1024
KILLS = 40

UPLOADER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ergon_framework.facts.model import StoredArtifact
    from ergon_framework.facts.stores.files import FileContentStore
    source, folder, digest, size, *name = sys.argv[1:]
    contents = FileContentStore(folder)
    name = name[0] if name else None
    here = contents.uploaded_bytes(name) if name else 0
    print("began", here, flush=True)
    with contents.begin_upload(name, begin=here) as receiving, Path(source).open("rb") as file:
        file.seek(here)
        while piece := file.read(65_536):
            receiving.add(piece)
            print(receiving.size, flush=True)
        print("sealing", flush=True)
        receiving.commit(StoredArtifact(digest, int(size)))
    print("sealed", flush=True)
    """
)


def run_uploader(arguments, rng):
    """Run the upload and return its output; with a random source, SIGKILL it at some output line or a moment later."""
    process = subprocess.Popen(
        [sys.executable, "-c", UPLOADER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    last = rng.choice([1, 2, 50, 200, 380, 500]) if rng else None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        # The kill hits any system call; which one depends on the machine.
        if len(lines) == last or (rng and line == "sealing\n" and rng.random() < 0.7):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    return lines


@pytest.mark.parametrize("name", ["upload", None])
def test_an_upload_is_complete_after_many_kills(tmp_path, name):
    rng = random.Random(6)
    content = rng.randbytes(SIZE)
    (tmp_path / "source").write_bytes(content)
    stored = compute_stored(content)
    arguments = [tmp_path / "source", tmp_path / "artifacts", *stored, *([name] if name else [])]
    contents, kills, resumed = FileContentStore(tmp_path / "artifacts"), 0, 0
    while kills < KILLS:
        lines = run_uploader(arguments, rng)
        resumed += lines[:1] not in ([], ["began 0"])
        kills += lines[-1:] != ["sealed"]
        # Half of the file must never be visible; the whole file may be, if the kill came after the rename.
        size = contents.size_of(stored.digest)
        assert size in (None, stored.size)
        if size is not None:
            assert read_content(contents, stored.digest) == content
            contents.remove(stored.digest)
    assert name is None or resumed > KILLS // 4
    assert run_uploader(arguments, None)[-1:] == ["sealed"]
    assert read_content(contents, stored.digest) == content
    contents.delete_stale_uploads(FAR_FUTURE_MS)
    assert list((tmp_path / "artifacts" / "uploads").iterdir()) == []


PAUSED_UPLOADER = textwrap.dedent(
    """
    import sys
    from ergon_framework.facts.errors import UploadLost
    from ergon_framework.facts.stores.files import FileContentStore
    with FileContentStore(sys.argv[1]).begin_upload("wanted") as receiving:
        receiving.add(b"a" * 100_000)
        print("added", flush=True)
        sys.stdin.readline()
        try:
            receiving.add(b"b" * 100_000)
            receiving.commit()
        except UploadLost:
            print("lost", flush=True)
        else:
            print("sealed", flush=True)
    """
)


@pytest.mark.parametrize("begin", [0, 60_000, 100_000])
def test_a_process_that_continues_after_losing_its_upload_writes_nothing(tmp_path, begin):
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSED_UPLOADER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "added\n"
        os.kill(process.pid, signal.SIGSTOP)
        contents = FileContentStore(tmp_path)
        assert contents.uploaded_bytes("wanted") == 100_000
        with contents.begin_upload("wanted", begin=begin) as receiving:
            receiving.add(b"c" * 50_000)
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "lost\n"
            receiving.add(b"d" * 50_000)
            stored = receiving.commit()
        assert read_content(contents, stored.digest) == b"a" * begin + b"c" * 50_000 + b"d" * 50_000
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
