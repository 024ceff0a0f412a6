"""The object cache: corruption, races, limits, folders that cannot or must not be used."""

import os
import subprocess
import sys
import threading
import time

import pytest

from spmd.compile.native.llvm import compiler, target
from spmd.compile.native.llvm.object_cache import UNDIGESTED, ObjectCache, entry_key

KEY = entry_key("text", "cpu")


def cache_in(folder, limit: int = 2**20) -> ObjectCache:
    return ObjectCache(lambda: folder, limit)


def files(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_stored_entry_is_loaded(tmp_path):
    assert cache_in(tmp_path).load(KEY) is None
    cache_in(tmp_path).store(KEY, b"object code")
    assert cache_in(tmp_path).load(KEY) == b"object code"
    assert cache_in(tmp_path).load(entry_key("other")) is None


def test_keys_separate_their_parts():
    keys = {entry_key("ab", "c"), entry_key("a", "bc"), entry_key("abc"), entry_key("abc", "")}
    assert len(keys) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: data[:-3] + b"?" + data[-2:],
        lambda data: b"another format" + data,
    ],
    ids=["short", "header only", "empty", "long", "flipped", "foreign"],
)
def test_damaged_entries_are_ignored_removed_and_rebuilt(tmp_path, damage):
    cache = cache_in(tmp_path)
    cache.store(KEY, b"object code")
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load(KEY) is None
    assert not path.exists()
    cache.store(KEY, b"object code")
    assert cache.load(KEY) == b"object code"


def test_no_folder_means_no_cache():
    cache = ObjectCache(lambda: None)
    cache.store(KEY, b"x")
    assert cache.load(KEY) is None
    cache.trim()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_read_but_not_written(tmp_path):
    cache_in(tmp_path).store(KEY, b"x")
    for path in [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]:
        path.chmod(0o500)
    cache = cache_in(tmp_path)
    cache.store(entry_key("new"), b"y")
    assert cache.load(KEY) == b"x"
    for path in [tmp_path, *(p for p in tmp_path.rglob("*") if p.is_dir())]:
        path.chmod(0o700)


def test_a_failing_write_ends_writing_and_raises_nothing(tmp_path, monkeypatch):
    cache = cache_in(tmp_path)
    calls = []

    def full(*args, **kwargs):
        calls.append(args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    cache.store(KEY, b"x")
    cache.store(KEY, b"x")
    assert len(calls) == 1
    assert files(tmp_path) == [], "the temporary file is gone too"
    assert cache.load(KEY) is None


def test_a_folder_that_is_a_file_is_no_cache(tmp_path):
    place = tmp_path / "file"
    place.write_text("not a folder")
    cache = cache_in(place / "objects")
    cache.store(KEY, b"x")
    assert cache.load(KEY) is None


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path):
    cache_in(tmp_path).store(KEY, b"code of somebody else")
    tmp_path.chmod(0o777)
    assert cache_in(tmp_path).load(KEY) is None
    tmp_path.chmod(0o700)
    assert cache_in(tmp_path).load(KEY) is not None


def test_the_oldest_entries_go_when_the_folder_is_full(tmp_path):
    cache = cache_in(tmp_path, limit=100_000)
    keys = [entry_key(str(i)) for i in range(20)]
    for age, key in enumerate(keys):
        cache.store(key, bytes(10_000))
        path = tmp_path / key[:2] / f"{key[2:]}.o"
        if path.exists():
            stamp = time.time() - 1000 + age
            os.utime(path, (stamp, stamp))
    cache.trim()
    kept = [cache.load(key) is not None for key in keys]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 100_000
    assert kept[-1] and not kept[0]
    assert kept == sorted(kept), "entries go in the order of their age"


def test_using_an_old_entry_renews_it(tmp_path):
    cache = cache_in(tmp_path)
    cache.store(KEY, b"x")
    (path,) = files(tmp_path)
    long_ago = time.time() - 10 * 24 * 3600
    os.utime(path, (long_ago, long_ago))
    assert cache.load(KEY) == b"x"
    assert path.stat().st_mtime > time.time() - 3600


def test_readers_never_see_half_an_entry(tmp_path):
    """Writers replace one entry again and again; a reader gets all of it."""
    payload = os.urandom(200_000)
    cache_in(tmp_path).store(KEY, payload)
    stop = threading.Event()
    seen = []

    def write() -> None:
        cache = cache_in(tmp_path, limit=2**30)
        while not stop.is_set():
            cache.store(KEY, payload)

    def read() -> None:
        cache = cache_in(tmp_path)
        for _ in range(300):
            seen.append(cache.load(KEY) == payload)

    writers = [threading.Thread(target=write) for _ in range(2)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join(60)
    stop.set()
    for thread in writers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in (*writers, *readers))
    assert all(seen) and len(seen) == 600
    assert len(files(tmp_path)) == 1


def test_the_digest_has_every_file_that_a_first_compile_imports(tmp_path):
    """With a package that it forgets, code that another version made would run."""
    program = (
        "import sys, spmd\n"
        "from spmd import lax\n"
        "from spmd.compile.native.llvm.object_cache import digested_files\n"
        "spmd.jit(spmd.grad(lambda x: lax.sin(x) * x))(1.0).block_until_ready()\n"
        "spmd.pmap(lambda x: lax.psum(x, 'i'), axis_name='i')(lax.iota('float32', 2))\n"
        "digested = {path for path, _, _ in digested_files()}\n"
        "ours = [(n, m.__file__) for n, m in sys.modules.items() if n.startswith('spmd.')]\n"
        "print(*(name for name, file in ours if file not in digested))\n"
    )
    env = {**os.environ, "SPMD_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The public modules beside the packages only list names.
    beside = [name for name in done.stdout.split() if name.count(".") > 1]
    assert not [name for name in beside if name.split(".")[1] not in UNDIGESTED]


def test_processes_that_compile_the_same_share_the_folder(tmp_path):
    program = (
        "from spmd.compile.native.llvm.compiler import compile_texts\n"
        "texts = ['define i64 @f%d() { ret i64 %d }' % (i, i) for i in range(20)]\n"
        "print(len(compile_texts(texts)))\n"
    )
    env = {**os.environ, "SPMD_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in running] == ["20\n"] * 3
    # Each text has a name, each module that they share another. A process that finds some texts of
    # another there makes modules of the rest.
    units = min(20, compiler.available_cores())
    # The description of the processor is beside all of these, where there is one.
    target.find_host(cache_in(tmp_path / "host"), compiler.host)
    described = len(files(tmp_path / "host"))
    modules = len(files(tmp_path / "objects")) - 20 - described
    assert units <= modules <= len(running) * units if units < 20 else modules == 0
