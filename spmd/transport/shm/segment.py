"""A piece of memory that the processes of one host share, with no name left behind.

The creator makes a file in /dev/shm, the others map it, and then the creator removes the name: the
memory lives exactly as long as a process maps it, also when every process is killed. Only a crash
between creation and removal leaves a file; its name holds the creator's process id, so that the
next job of the same user removes it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time

from spmd.base.errors import LaunchError
from spmd.base.record import record

PREFIX = "spmd-"
# A file this old whose creator is gone was left by a crash. The age protects a creator that lives
# in another process namespace, where its id can't be seen from here.
STALE_SECONDS = 300.0


@record
class Segment:
    """Mapped shared memory and the path under which other processes can map it too."""

    path: str
    memory: mmap.mmap

    def unlink(self) -> None:
        """Remove the name. The memory stays until the last process lets go of it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def create(nbytes: int) -> Segment:
    """Make a zeroed segment of `nbytes` in the first folder that has room for it."""
    tried = []
    for folder in _folders():
        name = f"{PREFIX}{os.getuid()}-{os.getpid()}-{os.urandom(6).hex()}"
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            tried.append(f"{folder}: {error.strerror}")
            continue
        try:
            _reserve(fd, nbytes)
            return Segment(path, mmap.mmap(fd, nbytes))
        except OSError as error:
            tried.append(f"{folder}: {error.strerror}")
            os.unlink(path)
        finally:
            os.close(fd)
    raise LaunchError(
        f"no folder has room for {nbytes / 2**20:.0f} MiB of memory shared between ranks "
        f"({'; '.join(tried)}).\nIn a container, start it with a larger /dev/shm "
        f"(docker run --shm-size=1g)."
    )


def attach(path: str, nbytes: int) -> Segment:
    """Map a segment that another process of this host created."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return Segment(path, mmap.mmap(fd, nbytes))
    finally:
        os.close(fd)


def sweep(now: float | None = None) -> list[str]:
    """Remove files of this user's crashed jobs; returns the removed paths."""
    now = time.time() if now is None else now
    removed = []
    for folder in _folders():
        for name in os.listdir(folder):
            if not name.startswith(f"{PREFIX}{os.getuid()}-"):
                continue
            path, creator = os.path.join(folder, name), name.split("-")[2]
            with contextlib.suppress(OSError):
                old = now - os.stat(path).st_mtime > STALE_SECONDS
                if old and creator.isdigit() and not os.path.exists(f"/proc/{creator}"):
                    os.unlink(path)
                    removed.append(path)
    return removed


def _folders() -> list[str]:
    folders = ["/dev/shm", os.environ.get("TMPDIR", "/tmp")]
    return [folder for folder in folders if os.path.isdir(folder)]


def _reserve(fd: int, nbytes: int) -> None:
    """Give the file its size, and its pages now: a full tmpfs must fail here, not with SIGBUS."""
    os.ftruncate(fd, nbytes)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except AttributeError:
        pass  # macOS has no such call; its temporary folder is a disk
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
