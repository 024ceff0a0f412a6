"""Object code on disk: the next process loads the code that one compiled.

Entries are addressed by content (a hash of everything that determines the object code), so they
are never stale and concurrent writers can only write the same thing. A file is written beside its
place and renamed into it; it carries a checksum, and whatever fails the check is thrown away and
built again. A thread writes entries while the program that made them runs on (`cache_writer.py`).
The cache is an accelerator: no failure in here may ever reach the user.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping

from spmd.base.config import config
from spmd.base.digest import blake2b
from spmd.base.source import PACKAGE_DIR
from spmd.compile.native.llvm.cache_writer import CacheWriter

# `pathlib` is not imported for it: that takes longer than to read all entries of a program.
Folder = str | os.PathLike[str]

# Bump when the meaning of an entry changes: the hashed data, the format, the native ABI.
FORMAT_VERSION = 4

LIMIT_BYTES = 256 * 2**20
# A full folder is trimmed to this share, so that trimming stays rare.
KEPT_SHARE = 0.75
# Using an entry renews its age, but not more often than this: reads stay reads.
RENEW_AFTER_S = 24 * 3600

# A file whose writer was killed is removed with the old entries, after this time.
ABANDONED_AFTER_S = 3600

# Files of root, as in an image, are as trustworthy as the programs of the system.
ROOT_USER = 0

# The packages whose files say nothing about what is compiled: all of them stand above the compiler.
UNDIGESTED = frozenset(
    (
        *("as_jax", "checkpoints", "debug", "example_libraries", "experimental", "export"),
        *("nn", "numpy", "random", "scipy", "__pycache__"),
    )
)

_MAGIC = b"spmdobj2"
_UNFINISHED = ".new-"
_DIGEST_BYTES = 32


def entry_key(*parts: str) -> str:
    """The name of the entry that is determined by `parts`."""
    digest = blake2b(str(FORMAT_VERSION).encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def source_digest() -> str:
    """A digest of the compiler's files, or "" if there are none to look at, as in an archive."""
    found = digested_files()
    lines = [f"{path} {size} {changed_ns}" for path, size, changed_ns in found]
    return entry_key("\n".join(lines)) if found else ""


def digested_files() -> list[tuple[str, int, int]]:
    """The files of all packages but `UNDIGESTED`, sorted.

    Of each file it has Python's criteria for byte code: path, size and time.
    """
    found: list[tuple[str, int, int]] = []
    with contextlib.suppress(OSError), os.scandir(PACKAGE_DIR) as entries:
        for entry in entries:
            if "." not in entry.name and entry.name not in UNDIGESTED and entry.is_dir():
                with contextlib.suppress(OSError):
                    _add_files(entry.path, found)
    return sorted(found)


def _add_files(folder: str, found: list[tuple[str, int, int]]) -> None:
    """The files in a folder and in those below it that code is made of: path, size and time."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".cuh")):
                stat = entry.stat()
                found.append((entry.path, stat.st_size, stat.st_mtime_ns))
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                _add_files(entry.path, found)


class ObjectCache:
    """A folder of checked, content-addressed entries, bounded in size.

    `folder` gives the folder at each use (None: no cache). A folder that others than this user
    and root may write to is not used: its entries are run as machine code. With `write_behind`, a
    caller that stores an entry does not wait for the disk; this process finds it at once.
    """

    def __init__(
        self,
        folder: Callable[[], Folder | None],
        limit_bytes: int = LIMIT_BYTES,
        write_behind: bool = False,
    ):
        self._folder = folder
        self._limit = limit_bytes
        self._checked: dict[Folder, bool] = {}
        self._written = 0
        self._writable = True
        self._writer = CacheWriter(self._write) if write_behind else None

    @property
    def folder(self) -> Folder | None:
        """The folder; None if there is no cache."""
        return self._folder()

    @property
    def is_on(self) -> bool:
        """Whether there is a folder, so that entries may be found and kept."""
        return self._usable_folder() is not None

    def problem(self) -> str | None:
        """The reason that entries cannot be kept; None if they can."""
        self.flush()
        folder = self._folder()
        if folder is None:
            return "the compile cache is switched off"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            handle, name = _new_file(str(folder))
            os.close(handle)
            os.unlink(name)
        except OSError as error:
            return f"cannot write to {folder}: {error.strerror}"
        if not self.is_on:
            return f"{folder} is not used: what lies in it is run, and others may write to it"
        return None if self._writable else f"cannot write to {folder} any more"

    def load(self, key: str) -> bytes | None:
        """The payload stored under `key`, or None if there is no sound entry."""
        folder = self._usable_folder()
        if folder is None:
            return None
        path = _path_in(folder, key)
        if self._writer is not None:
            waiting = self._writer.get(path)
            if waiting is not None:
                return waiting
        try:
            with open(path, "rb", buffering=0) as file:
                data = file.read()
                written = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        payload = _unseal(data)
        if payload is None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        if time.time() - written > RENEW_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def store(self, key: str, payload: bytes) -> None:
        """Keep `payload` under `key`; the first failure to write ends writing for this process."""
        self.store_all({key: payload})

    def store_all(self, entries: Mapping[str, bytes]) -> None:
        """Keep each payload under its key, as `store` does."""
        folder = self._usable_folder()
        if folder is None or not self._writable:
            return
        paths = {_path_in(folder, key): payload for key, payload in entries.items()}
        if self._writer is not None:
            self._writer.put(paths)
            return
        for path, payload in paths.items():
            self._write(path, payload)

    def flush(self) -> None:
        """Write the entries that are not on the disk; when it returns, other processes find all."""
        if self._writer is not None:
            self._writer.flush()

    def _write(self, path: str, payload: bytes) -> None:
        if not self._writable:
            return
        try:
            _write_atomically(path, _seal(payload))
        except (OSError, MemoryError):
            self._writable = False
            return
        # The folder may be large and on a slow disk: look at its size at the first write, which
        # catches files that earlier processes left, and then once per eighth of the limit.
        first = self._written == 0
        self._written += len(payload)
        if first or self._written > self._limit // 8:
            self._written = 1
            self.trim()

    def trim(self) -> None:
        """Remove the entries that were not used for longest, if the folder is over its limit."""
        folder = self._usable_folder()
        if folder is None:
            return
        entries = []
        now = time.time()
        for file in _files_in(folder):
            with contextlib.suppress(OSError):
                stat = file.stat()
                if file.name.endswith(".o"):
                    entries.append((stat.st_mtime, stat.st_size, file.path))
                elif file.name.startswith(_UNFINISHED) and now - stat.st_mtime > ABANDONED_AFTER_S:
                    os.unlink(file.path)
        total = sum(size for _, size, _ in entries)
        if total <= self._limit:
            return
        for _, size, path in sorted(entries):
            if total <= self._limit * KEPT_SHARE:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size

    def _usable_folder(self) -> Folder | None:
        folder = self._folder()
        if folder is None:
            return None
        if folder not in self._checked:
            self._checked[folder] = _is_private(folder)
        return folder if self._checked[folder] else None


def _path_in(folder: Folder, key: str) -> str:
    return os.path.join(folder, key[:2], f"{key[2:]}.o")


def _is_private(folder: Folder) -> bool:
    """Make `folder` if need be, and say whether only this user, or root, can write to it."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        stat = os.stat(folder)
    except OSError:
        return False
    return stat.st_uid in (os.getuid(), ROOT_USER) and not stat.st_mode & 0o022


def _seal(payload: bytes) -> bytes:
    return _MAGIC + blake2b(payload, digest_size=_DIGEST_BYTES).digest() + payload


def _unseal(data: bytes) -> bytes | None:
    body = len(_MAGIC) + _DIGEST_BYTES
    payload = data[body:]
    if data[: len(_MAGIC)] != _MAGIC or len(data) <= body:
        return None
    if blake2b(payload, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : body]:
        return None
    return payload


def _files_in(folder: Folder) -> Iterator[os.DirEntry[str]]:
    """The files in the folders of a cache."""
    with contextlib.suppress(OSError), os.scandir(folder) as folders:
        for inner in folders:
            if len(inner.name) == 2 and inner.is_dir():
                with contextlib.suppress(OSError), os.scandir(inner.path) as files:
                    yield from files


def _new_file(folder: str) -> tuple[int, str]:
    """An open file of this process alone, and its name.

    Not by `tempfile`: that has locks, and a process may be forked while another thread holds them.
    """
    name = os.path.join(folder, _UNFINISHED + os.urandom(8).hex())
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), name


def _write_atomically(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    try:
        handle, name = _new_file(folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        handle, name = _new_file(folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@functools.lru_cache(maxsize=8)
def _objects_in(cache_dir: str) -> str:
    return os.path.join(os.path.expanduser(cache_dir), "objects")


def _configured_folder() -> str | None:
    return _objects_in(config.cache_dir) if config.cache_dir else None


object_cache = ObjectCache(_configured_folder, write_behind=True)
