"""Writing behind: an orderly end loses nothing, nothing is half, forks and failures harm nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd.compile.native.llvm import cache_writer
from spmd.compile.native.llvm.cache_writer import CacheWriter
from spmd.compile.native.llvm.object_cache import ObjectCache, entry_key
from tests.threads import in_threads

ROOT = Path(__file__).parents[4]
KEYS = [entry_key(str(k)) for k in range(40)]


@pytest.fixture
def no_rest(monkeypatch):
    """The thread writes only when it is asked to: nobody rests for so long."""
    monkeypatch.setattr(cache_writer, "REST_SECONDS", 1000.0)
    monkeypatch.setattr(cache_writer, "LONGEST_WAIT_SECONDS", 1000.0)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def wait_for_writers() -> Callable[[], None]:
    """Call it: the threads that write what was stored during the test have ended."""
    before = threading.enumerate()

    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "spmd-cache" and thread not in before:
                thread.join(60)
                assert not thread.is_alive()

    return wait


def test_waiting_entries_are_found_here_and_after_a_flush_by_others(tmp_path, no_rest):
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    for key in KEYS:
        cache.store(key, key.encode())
    assert files(tmp_path) == []
    assert [cache.load(key) for key in KEYS] == [key.encode() for key in KEYS]
    cache.flush()
    assert len(files(tmp_path)) == len(KEYS)
    other = ObjectCache(lambda: tmp_path)
    assert [other.load(key) for key in KEYS] == [key.encode() for key in KEYS]
    cache.flush()  # there is nothing to write


def test_entries_are_written_without_a_flush_and_the_thread_ends(tmp_path, wait_for_writers):
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    for turn in range(2):  # a thread that ended is followed by another
        cache.store(KEYS[turn], b"object code")
        wait_for_writers()
        assert len(files(tmp_path)) == turn + 1


def test_entries_are_written_while_a_thread_stores_without_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_writer, "LONGEST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(cache_writer, "REST_SECONDS", 30.0)
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    deadline = time.monotonic() + 60
    while not files(tmp_path):
        cache.store(KEYS[0], b"object code")
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_full_buffer_is_written_at_once(no_rest, monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(cache_writer, "MOST_BYTES", 1000)
    behind = CacheWriter(lambda path, payload: written.append(path))
    behind.put({"a": bytes(600)})
    behind.put({"a": bytes(700)})  # in its place: still 700
    assert written == []
    behind.put({"b": bytes(400)})
    assert written == ["a", "b"] and behind.get("a") is None


def test_the_last_payload_of_a_path_is_written_last():
    written: dict[str, list[bytes]] = {}
    begun, go = threading.Event(), threading.Event()

    def write(path: str, payload: bytes) -> None:
        begun.set()
        assert go.wait(60)
        written.setdefault(path, []).append(payload)

    behind = CacheWriter(write)
    behind.put({"a": b"1"})
    assert begun.wait(60)
    behind.put({"a": b"2"})  # while the first is written
    assert behind.get("a") == b"2"
    go.set()
    behind.flush()
    assert written == {"a": [b"1", b"2"]} and behind.get("a") is None


def test_threads_that_store_lose_nothing(tmp_path):
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    failed: list[object] = []

    def store(first: int) -> None:
        for key in KEYS[first::4]:
            cache.store(key, key.encode())
            if cache.load(key) != key.encode():
                failed.append(key)

    in_threads(store, range(4))
    cache.flush()
    assert not failed and len(files(tmp_path)) == len(KEYS)


def test_entries_are_written_at_once_where_no_thread_can_start(tmp_path, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    for key in KEYS[:2]:
        cache.store(key, b"object code")
    assert len(files(tmp_path)) == 2


def test_a_full_disk_ends_writing_and_raises_in_no_thread(tmp_path, monkeypatch, wait_for_writers):
    raised: list[object] = []
    calls: list[object] = []

    def full(*args: object) -> None:
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr("os.replace", full)
    cache = ObjectCache(lambda: tmp_path, write_behind=True)
    for key in KEYS:
        cache.store(key, b"object code")
    cache.flush()
    wait_for_writers()
    assert len(calls) == 1 and not raised and files(tmp_path) == []
    assert "any more" in str(cache.problem())
    assert cache.load(KEYS[0]) is None


def test_a_signal_handler_may_store_during_a_write(no_rest):
    """As one does that writes a checkpoint with a compiled function before the job ends."""
    written: list[str] = []

    def write(path: str, payload: bytes) -> None:
        if not written:
            signal.raise_signal(signal.SIGUSR1)
        written.append(path)

    def handle(*_: object) -> None:
        written.append("handled")
        behind.put({"b": b"2"})
        behind.flush()

    behind = CacheWriter(write)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        behind.put({"a": b"1"})
        behind.flush()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert written == ["handled", "a", "b", "a"] and behind.get("b") is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of Unix")
def test_a_limit_of_file_sizes_raises_nowhere_and_leaves_no_half_file(tmp_path):
    text = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); store()\n"
        "cache.flush(); print(cache.problem())"
    )
    command = [sys.executable, "-c", _STORE + text, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr and "any more" in done.stdout
    assert files(tmp_path) == []


def test_a_change_of_folder_does_not_move_stored_entries(tmp_path, no_rest):
    folders = [tmp_path / "first"]
    cache = ObjectCache(lambda: folders[0], write_behind=True)
    cache.store(KEYS[0], b"object code")
    folders[0] = tmp_path / "second"
    assert cache.load(KEYS[0]) is None
    cache.flush()
    assert [path.relative_to(tmp_path).parts[0] for path in files(tmp_path)] == ["first"]


def test_unfinished_files_of_killed_processes_go_after_an_hour(tmp_path):
    cache = ObjectCache(lambda: tmp_path)
    cache.store(KEYS[0], b"object code")
    new, old = (tmp_path / KEYS[0][:2] / f".new-{name}" for name in ("new", "old"))
    for path in (new, old):
        path.write_bytes(b"half")
    long_ago = time.time() - 2 * 3600
    os.utime(old, (long_ago, long_ago))
    cache.trim()
    assert new.exists() and not old.exists()
    assert cache.load(KEYS[0]) == b"object code"


# ---- ends of processes -------------------------------------------------------------------------

_STORE = """
import multiprocessing, os, sys, threading, time
from pathlib import Path
from spmd.compile.native.llvm import cache_writer as behind
from spmd.compile.native.llvm.object_cache import ObjectCache, entry_key
behind.REST_SECONDS = behind.LONGEST_WAIT_SECONDS = 1000.0  # only the end of the program writes
cache = ObjectCache(lambda: Path(sys.argv[1]), write_behind=True)
def store(*_):
    for k in range(40):
        cache.store(entry_key(str(k)), bytes(10_000))
"""
ENDINGS = {
    "return": ("store()", 0),
    "sys.exit": ("store(); sys.exit(3)", 3),
    "exception": ("store(); 1 / 0", 1),
    "a thread is the last": (
        "late = lambda: (threading.main_thread().join(), store())\n"
        "threading.Thread(target=late).start()",
        0,
    ),
    "atexit": ("import atexit; atexit.register(store)", 0),
    "a forked child": (
        "c = multiprocessing.get_context('fork').Process(target=store); c.start(); c.join()\n"
        "sys.exit(c.exitcode)",
        0,
    ),
    "a forked child of one that stored": (
        "cache.store(entry_key('x'), b'x'); "
        "c = multiprocessing.get_context('fork').Process(target=store); c.start(); c.join()\n"
        "n = len(list(Path(sys.argv[1]).glob('??/*'))); cache.flush(); sys.exit(n != 40)",
        0,
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ending", ENDINGS)
def test_all_entries_are_there_when_a_process_has_ended(tmp_path, ending):
    text, code = ENDINGS[ending]
    command = [sys.executable, "-c", _STORE + text, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    found = ObjectCache(lambda: tmp_path)
    assert [found.load(key) for key in KEYS] == [bytes(10_000)] * len(KEYS)


_ENDLESS = """
import os, sys, threading
from pathlib import Path
from spmd.compile.native.llvm import cache_writer as behind
from spmd.compile.native.llvm.object_cache import ObjectCache, entry_key
behind.REST_SECONDS = 0.0
cache = ObjectCache(lambda: Path(sys.argv[1]), write_behind=True)
def store():
    k = 0
    while True:
        cache.store(entry_key(str(k % 40)), bytes([k % 256]) * 1_000_000)
        k += 1
threading.Thread(target=store, daemon=True).start()
sys.stdin.read(1)
os._exit(7)
"""


@pytest.mark.parametrize("ending", ["killed", "os._exit"])
def test_a_process_that_ends_at_once_leaves_whole_entries_only(tmp_path, ending):
    command = [sys.executable, "-c", _ENDLESS, str(tmp_path)]
    for _ in range(2):
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
        assert process.stdin is not None
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("??/*.o")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if ending == "killed":
            process.send_signal(signal.SIGKILL)
        process.stdin.close()
        assert process.wait(60) == (-9 if ending == "killed" else 7)
        entries = list(tmp_path.glob("??/*.o"))
        found = ObjectCache(lambda: tmp_path)
        for path in entries:
            payload = found.load(path.parent.name + path.stem)
            assert payload is not None and payload == payload[:1] * 1_000_000
            path.unlink()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_during_a_write_neither_waits_nor_writes_it(tmp_path):
    """One other thread is in the middle of a write, a third holds the lock of what waits."""
    begun, held, go = threading.Event(), threading.Event(), threading.Event()

    class Slow(bytes):
        """The writer asks for the length of a payload while it holds its lock."""

        def __len__(self) -> int:
            held.set()
            assert go.wait(60)
            return super().__len__()

    written: list[tuple[int, str]] = []

    def write(path: str, payload: bytes) -> None:
        written.append((os.getpid(), path))
        if payload == b"slow":
            begun.set()
            go.wait(60)

    behind = CacheWriter(write)
    behind.put({"slow": b"slow"})
    behind.put({"next": b"next"})
    assert begun.wait(60)
    putting = threading.Thread(target=lambda: behind.put({"held": Slow(b"held")}))
    putting.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it must not wait for anybody
        before = len(written)
        behind.put({"own": b"own"})
        behind.flush()
        own = written[before:]
        os._exit(0 if own == [(os.getpid(), "own")] and behind.get("next") is None else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    putting.join(60)
    assert not putting.is_alive()
    behind.flush()
    assert os.waitstatus_to_exitcode(status) == 0
    assert written == [(os.getpid(), name) for name in ("slow", "next", "held")]
