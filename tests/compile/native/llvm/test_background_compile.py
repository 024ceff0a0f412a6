"""Code that is made before it is asked for: who asks gets it once, waits for it, or makes it."""

import os
import subprocess
import sys
import threading
import time

import pytest

from spmd.compile.native.llvm.background_compile import BackgroundCompiler, Item
from spmd.compile.native.llvm.compiler import Loader, Written

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


def test_what_is_made_is_given_once():
    seen = []
    early = BackgroundCompiler(lambda unit: seen.append(unit) or unit[0][0].encode())
    first, second = sources(2)
    early.begin(writers(first, second))
    until(lambda: len(seen) == 2 and early._now is None)
    assert early.take(first) == b"text 0"
    assert early.take(first) is None
    assert early.take(second) == b"text 1"
    assert seen == [[first], [second]]


def test_who_asks_waits_for_what_is_under_way_and_makes_what_is_not_begun():
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
    until(lambda: third in early._codes)
    assert seen == [first, third]


def test_what_cannot_be_compiled_is_left_to_who_asks():
    def emit(unit):
        raise RuntimeError("not LLVM IR")

    early = BackgroundCompiler(emit)
    early.begin(writers(*sources(1)))
    until(lambda: not any(t.name == "spmd-early" for t in threading.enumerate()))
    assert early.take(sources(1)[0]) is None


def test_what_is_made_is_put_to_use_if_nobody_made_it_before():
    used, gate = [], threading.Event()
    early = BackgroundCompiler(lambda unit: gate.wait(PATIENCE) and b"code")
    first, second = sources(2)
    items = [Item(s[0], lambda s=s: s, lambda s=s: used.append(s)) for s in (first, second)]
    early.begin(items)
    until(lambda: early._now == first)
    assert early.take(second) is None
    assert early.is_pending("text 0") and early.is_pending("text 1")
    gate.set()
    until(lambda: not early.is_pending("text 1"))
    assert used == [first] and not early.is_pending("text 0")


def test_a_loader_compiles_written_texts_once(monkeypatch, tmp_path):
    loader = Loader()
    written = Written("early", lambda: EXAMPLE.format(name="early_example", value=5))
    emitted = []
    emit = loader._emit_now
    monkeypatch.setattr(loader, "_emit_now", lambda unit: emitted.append(unit) or emit(unit))
    monkeypatch.setattr(loader, "_mark", lambda name: None)
    loader.begin_early({written: None})
    until(lambda: emitted)
    assert "early_example" in loader.compile_written(written)
    assert len(emitted) == 1


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
def test_a_child_is_forked_while_code_is_made_early():
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
