"""SmallDisk: a file system of a few megabytes that a test can fill up and empty again."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

_BLOCK = b"\0" * 65_536


class MountError(RuntimeError):
    """This machine does not let the test mount a file system, and no simulation takes its place."""


class SmallDisk:
    """A tmpfs of *megabytes* at ``folder``, mounted until it is closed; needs the rights to mount."""

    def __init__(self, megabytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ergon-small-disk-"))
        self._filler = self.folder / "filler"
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "tmpfs", str(self.folder)]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            self.folder.rmdir()
            raise MountError(f"mounting a tmpfs failed: {completed.stderr.strip()}; run the tests as root")

    def make_folder(self, name: str, owner: int | None = None) -> Path:
        """Create an empty folder on the disk that belongs to the user *owner*."""
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        if owner is not None:
            os.chown(folder, owner, owner)
        return folder

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fill(self) -> None:
        """Take every free byte, also those that became free since the last call."""
        with self._filler.open("ab", buffering=0) as file:
            size = len(_BLOCK)
            while size:
                try:
                    file.write(_BLOCK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def empty(self) -> None:
        """Free the space that ``fill`` has taken."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        # Lazily: a process that is about to end may still have a file open.
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
