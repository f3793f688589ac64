"""An upload whose process is SIGKILLed again and again goes on each time, and is right in the end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from ergon_framework.facts.stores.files import FileContents
from ergon_framework.testing.conformance.contents_words import LATER, read, stored_of

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-21")]

SIZE = 24 * 1024 * 1024
KILLS = 40

UPLOADER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ergon_framework.facts.model import Stored
    from ergon_framework.facts.stores.files import FileContents
    source, folder, digest, size, *name = sys.argv[1:]
    contents = FileContents(folder)
    name = name[0] if name else None
    here = contents.received(name) if name else 0
    print("began", here, flush=True)
    with contents.receive(name, begin=here) as receiving, Path(source).open("rb") as file:
        file.seek(here)
        while piece := file.read(65_536):
            receiving.add(piece)
            print(receiving.size, flush=True)
        print("sealing", flush=True)
        receiving.seal(Stored(digest, int(size)))
    print("sealed", flush=True)
    """
)


def run(arguments, dice):
    """Start it, and with dice SIGKILL it at some line of what it says or a moment later; what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", UPLOADER, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    last = dice.choice([1, 2, 50, 200, 380, 500]) if dice else None
    said = []
    for line in process.stdout:
        said.append(line.strip())
        # Where the next call to the system is hit is for the machine to decide.
        if len(said) == last or (dice and line == "sealing\n" and dice.random() < 0.7):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stdout.close()
    process.wait()
    return said


@pytest.mark.parametrize("name", ["upload", None])
def test_it_is_right_after_many_kills(tmp_path, name):
    dice = random.Random(6)
    content = dice.randbytes(SIZE)
    (tmp_path / "source").write_bytes(content)
    stored = stored_of(content)
    arguments = [tmp_path / "source", tmp_path / "artifacts", *stored, *([name] if name else [])]
    contents, kills, went_on = FileContents(tmp_path / "artifacts"), 0, 0
    while kills < KILLS:
        said = run(arguments, dice)
        went_on += said[:1] not in ([], ["began 0"])
        kills += said[-1:] != ["sealed"]
        # Half of it is never there; all of it may be, if the kill came behind the name.
        size = contents.size_of(stored.digest)
        assert size in (None, stored.size)
        if size is not None:
            assert read(contents, stored.digest) == content
            contents.remove(stored.digest)
    assert name is None or went_on > KILLS // 4
    assert run(arguments, None)[-1:] == ["sealed"]
    assert read(contents, stored.digest) == content
    contents.sweep(LATER)
    assert list((tmp_path / "artifacts" / "uploads").iterdir()) == []


SLEEPER = textwrap.dedent(
    """
    import sys
    from ergon_framework.facts.errors import UploadLost
    from ergon_framework.facts.stores.files import FileContents
    with FileContents(sys.argv[1]).receive("wanted") as receiving:
        receiving.add(b"a" * 100_000)
        print("added", flush=True)
        sys.stdin.readline()
        try:
            receiving.add(b"b" * 100_000)
            receiving.seal()
        except UploadLost:
            print("lost", flush=True)
        else:
            print("sealed", flush=True)
    """
)


@pytest.mark.parametrize("begin", [0, 60_000, 100_000])
def test_a_process_that_wakes_up_late_writes_nothing_any_more(tmp_path, begin):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "added\n"
        os.kill(process.pid, signal.SIGSTOP)
        contents = FileContents(tmp_path)
        assert contents.received("wanted") == 100_000
        with contents.receive("wanted", begin=begin) as receiving:
            receiving.add(b"c" * 50_000)
            os.kill(process.pid, signal.SIGCONT)
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "lost\n"
            receiving.add(b"d" * 50_000)
            stored = receiving.seal()
        assert read(contents, stored.digest) == b"a" * begin + b"c" * 50_000 + b"d" * 50_000
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
