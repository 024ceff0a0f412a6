"""Code that is made before it is asked for: who asks gets it once, waits for it, or makes it."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from spmd.compile.native.llvm import compiler
from spmd.compile.native.llvm.background_compile import BackgroundCompiler, Item
from spmd.compile.native.llvm.compiler import Loader, Written
from spmd.compile.native.llvm.object_cache import ObjectCache

PATIENCE = 60
EXAMPLE = "define i64 @{name}() {{\n  ret i64 {value}\n}}\n"


def sources(count: int):
    return [(f"text {k}", True) for k in range(count)]


def writers(*made):
    return [Item(source[0], lambda source=source: source) for source in made]


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_compiled_code_is_given_once():
    seen = []
    early = BackgroundCompiler(lambda unit: seen.append(unit) or unit[0][0].encode())
    first, second = sources(2)
    early.begin(writers(first, second))
    until(lambda: not early.is_pending("text 1"))
    assert early.take(first) == b"text 0"
    assert early.take(first) is None
    assert early.take(second) == b"text 1"
    assert seen == [[first], [second]]


def test_a_caller_waits_for_a_started_source_and_compiles_one_that_is_not():
    reached, gate, seen = threading.Event(), threading.Event(), []

    def emit(unit):
        seen.append(unit[0])
        reached.set()
        assert gate.wait(PATIENCE)
        return b"code"

    early = BackgroundCompiler(emit)
    first, second, third = sources(3)
    early.begin(writers(first, second, third))
    assert reached.wait(PATIENCE)
    assert early.take(second) is None
    found = []
    waiting = threading.Thread(target=lambda: found.append(early.take(first)))
    waiting.start()
    time.sleep(0.02)
    assert found == []
    gate.set()
    waiting.join(PATIENCE)
    assert found == [b"code"]
    until(lambda: not early.is_pending("text 2"))
    assert seen == [first, third]


def test_a_source_that_fails_is_left_to_the_caller():
    def emit(unit):
        raise RuntimeError("not LLVM IR")

    early = BackgroundCompiler(emit)
    early.begin(writers(*sources(1)))
    until(lambda: not any(t.name == "spmd-early" for t in threading.enumerate()))
    assert early.take(sources(1)[0]) is None


def test_compiled_code_is_used_unless_a_caller_compiled_it():
    used, reached, gate = [], threading.Event(), threading.Event()
    early = BackgroundCompiler(lambda unit: reached.set() or (gate.wait(PATIENCE) and b"code"))
    first, second = sources(2)
    items = [Item(s[0], lambda s=s: s, lambda s=s: used.append(s)) for s in (first, second)]
    early.begin(items)
    assert reached.wait(PATIENCE)
    assert early.take(second) is None
    assert early.is_pending("text 0") and early.is_pending("text 1")
    gate.set()
    until(lambda: not early.is_pending("text 1"))
    assert used == [first] and not early.is_pending("text 0")


def test_a_loader_takes_the_code_of_a_text_that_was_compiled_early(monkeypatch):
    """The background compiler emits another number here, so that its code is known by it."""
    monkeypatch.setattr(compiler, "object_cache", ObjectCache(lambda: None))
    early_text, text = (EXAMPLE.format(name="early_example", value=value) for value in (6, 5))
    monkeypatch.setattr(
        compiler.background_compile,
        "BackgroundCompiler",
        lambda emit: BackgroundCompiler(lambda unit: emit([(early_text, unit[0][1])])),
    )
    loader, written = Loader(), Written("early", lambda: text)
    loader.begin_early({written: None})
    until(lambda: not loader.is_pending(written))
    address = loader.compile_written(written)["early_example"]
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 6


_FORK = """
import os, threading
import spmd, spmd.numpy as snp
double = spmd.jit(lambda x: x * 2 + 1)
assert double(snp.ones(3))[0] == 3
early = any(t.name == "spmd-early" for t in threading.enumerate())
child = os.fork()
if child == 0:
    ok = float(spmd.jit(lambda x: (x @ x).sum())(snp.ones((40, 40)))) == 64000
    os._exit(0 if ok and double(snp.ones(3))[1] == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
print("early" if early else "done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_may_fork_during_background_compilation():
    """The first result is there, the rest of the runtime is not."""
    environment = os.environ | {"SPMD_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", _FORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
