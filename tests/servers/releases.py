"""Where the programs of the servers come from: this machine, or a Debian release in a folder of its own.

``ERGON_SERVERS`` selects: ``debian12`` (the default) is what this machine has, ``current`` is Debian's stable release,
and ``newest`` its unstable one. ``tools/install-servers --current`` builds the folders. A program of a release runs
with its folder as the root folder; the data of the tests, in the folder of temporary files, has the same path there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

RELEASES = {"debian12": None, "current": "trixie", "newest": "sid"}
_HOME = Path(os.environ.get("ERGON_SERVERS_HOME", "/var/cache/ergon-servers"))
#: The folders of programs, first to last.
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class ReleaseError(RuntimeError):
    """The selected release is unknown, or is not installed."""


def find_root() -> Path | None:
    """Return the root folder of the selected release; None if the programs of this machine are selected."""
    name = os.environ.get("ERGON_SERVERS", "debian12")
    if name not in RELEASES:
        raise ReleaseError(f"ERGON_SERVERS is {name!r}: set one of {', '.join(RELEASES)}")
    release = RELEASES[name]
    if release is None:
        return None
    root = _HOME / release
    if not (root / ".complete").exists():
        raise ReleaseError(f"ERGON_SERVERS={name} needs servers in {root}; run: tools/install-servers --current")
    if not os.path.ismount(root / "proc"):
        raise ReleaseError(f"the folders of {root} are not mounted; run: tools/install-servers --current")
    return root


def find_program(name: str) -> str | None:
    """Return the path of a program in the selected release; None if it has none."""
    root = find_root()
    if root is None:
        return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_PATH)))
    return next((f"{folder}/{name}" for folder in _PATH if (root / folder[1:] / name).exists()), None)


def find_folders(pattern: str) -> list[Path]:
    """Return the folders of the selected release whose paths match *pattern*, as they are called there."""
    root = find_root() or Path("/")
    return [Path("/") / folder.relative_to(root) for folder in root.glob(pattern.removeprefix("/"))]


def in_release(command: Sequence[str], *, user: tuple[int, int] | None = None) -> list[str]:
    """Return *command* for the selected release, as the user and group with these numbers.

    On this machine the caller changes the user, and this returns the command as it is.
    """
    root = find_root()
    if root is None:
        return list(command)
    options = [] if user is None else [f"--userspec={user[0]}:{user[1]}", "--groups="]
    return ["chroot", *options, str(root), *command]
