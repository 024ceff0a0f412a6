"""Write-behind disk cache: entries are written after the first result was returned.

The one idea: no call waits for a file. An entry stays in memory, where it can be read, until a
thread has written it to the disk. The thread lives while there is something to write. It waits for
a moment without requests or for the end of the program, and the end of the program waits for it. So
a program that ends in order leaves all its files, one that is killed leaves fewer, and neither
leaves half a file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from spmd.base.background import Worker, is_ending, wait_for_rest
from spmd.base.fork import after_fork_in_child

# Entries are written when there was no request for so long: a program that is compiled reads
# several entries and stores others, and runs for the first time next. If requests go on and on,
# entries are written after the longer time.
REST_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 1.0
# With more than this in memory, the thread that adds an entry writes.
MOST_BYTES = 32 * 2**20


class CacheWriter:
    """Calls `write(path, payload)` for each `put`, on another thread, one after the other.

    `write` must not raise. All methods may be called from any thread.
    """

    def __init__(self, write: Callable[[str, bytes], None]):
        self._write = write
        self._worker = Worker("spmd-cache")
        self._forget()
        after_fork_in_child(self._forget)

    def _forget(self) -> None:
        """There is nothing to write; in a forked child: its parent does that."""
        self._waiting: dict[str, bytes] = {}
        self._nbytes = 0
        self._changed = 0.0
        # Locks of the fields above, for moments only, and of the writing thread. The handler of a
        # signal may store an entry while the interrupted code has one of them.
        self._lock = threading.RLock()
        self._writing = threading.RLock()

    def put(self, entries: Mapping[str, bytes]) -> None:
        """Have payloads written to their paths, soon."""
        with self._lock:
            is_first = not self._waiting  # else the job of another entry writes these too
            for path, payload in entries.items():
                self._nbytes += len(payload) - len(self._waiting.get(path, b""))
                self._waiting[path] = payload
            self._changed = time.monotonic()
            is_full = self._nbytes > MOST_BYTES
        if is_full or (is_first and not self._worker.submit(self._write_at_rest)):
            self.flush()

    def get(self, path: str) -> bytes | None:
        """The payload that is still to be written to `path`, if any."""
        self._changed = time.monotonic()  # the caller is at work on a program
        return self._waiting.get(path)

    def flush(self) -> None:
        """Write all that was put; when it returns, the files are there."""
        with self._writing:
            while True:
                with self._lock:
                    path = next(iter(self._waiting), None)
                    payload = b"" if path is None else self._waiting[path]
                if path is None:
                    return
                self._write(path, payload)
                # It is found in memory until it is found on the disk.
                with self._lock:
                    if self._waiting.get(path) is payload:
                        del self._waiting[path]
                        self._nbytes -= len(payload)

    def _write_at_rest(self) -> None:
        """Write when nothing was requested for a while, or when the program has ended."""
        program = threading.main_thread()

        def pause(seconds: float) -> bool:
            program.join(seconds)
            return is_ending() or not self._waiting

        if self._waiting and not is_ending():
            wait_for_rest(lambda: self._changed, pause, REST_SECONDS, LONGEST_WAIT_SECONDS)
        self.flush()
