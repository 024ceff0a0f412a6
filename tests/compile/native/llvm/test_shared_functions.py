"""Functions that kernels share: compiled once, found by what object code says that it calls."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.compile.cpu.math.table import (
    HAS_BRANCHES,
    LONG,
    VECTOR_FUNCTIONS,
    call_function,
    shared_functions,
)
from spmd.compile.native.llvm import compiler
from spmd.compile.native.llvm.compiler import Loader
from spmd.compile.native.llvm.modules import Stream, into_units
from spmd.compile.native.llvm.shared_functions import (
    called_by_code,
    called_by_text,
    needs_passes,
    share,
    shared_text,
)
from spmd.compile.native.llvm.vector_emitter import Emitter, Module
from tests.compile.cpu.native import host_target
from tests.compile.native.llvm.emissions import note_emissions


def shared(number: int) -> str:
    """A shared function that gives a number; its symbol."""
    return share(f"test{number}", f"define i64 @SYMBOL() {{\n  ret i64 {number}\n}}\n")


def caller(name: str, symbol: str, more: int = 0) -> str:
    """A text whose function adds to what a shared function gives."""
    return (
        f"define i64 @{name}() {{\n  %x = call i64 @{symbol}()\n  %y = add i64 %x, {more}\n"
        f"  ret i64 %y\n}}\ndeclare i64 @{symbol}()\n"
    )


def call(address: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64)(address)()


@pytest.fixture
def emitted(monkeypatch):
    """The texts of each module that is compiled."""
    return note_emissions(monkeypatch)


def remove(folder: Path, symbol: str) -> None:
    """Remove the code of a shared function from the disk."""
    compiler.object_cache.flush()
    loader = Loader()
    entry = loader.compile_texts([shared_text(symbol)], optimize=needs_passes(symbol))[symbol].entry
    compiler.object_cache.flush()
    (folder / entry[:2] / f"{entry[2:]}.o").unlink()


def test_a_symbol_names_the_content_of_a_function():
    same = [share("name", "define i64 @SYMBOL() {\n  ret i64 5\n}\n") for _ in range(2)]
    other = share("name", "define i64 @SYMBOL() {\n  ret i64 6\n}\n")
    assert same[0] == same[1] != other
    assert called_by_text(shared_text(other)) == [other]
    assert called_by_text(caller("f", other)) == [other] and called_by_text("ret void") == []


def test_a_shared_function_is_compiled_once_and_by_itself(folder, emitted):
    symbol, loader = shared(70), Loader()
    first = loader.compile_texts([caller("a", symbol, 1), caller("b", symbol, 2)])
    assert [call(first[name]) for name in "ab"] == [71, 72]
    assert [shared_text(symbol)] in emitted
    assert sum(shared_text(symbol) in unit for unit in emitted) == 1
    emitted.clear()
    assert call(loader.compile_texts([caller("c", symbol, 3)])["c"]) == 73
    assert emitted == [[caller("c", symbol, 3)]]


def test_a_shared_function_is_a_unit_of_its_own():
    text, stream = (shared_text(shared(71)), False), Stream()
    small = (caller("f", shared(71)), False)
    assert stream.add(small) is None
    assert stream.add(text) == [text] and stream.open == [small]
    other = (caller("g", shared(71)), False)
    assert sorted(map(len, into_units([text, small, other], 1))) == [1, 2]


def test_object_code_names_the_shared_functions_it_calls(folder):
    symbol, loader = shared(72), Loader()
    entry = loader.compile_texts([caller("f", symbol)])["f"].entry
    assert called_by_code(compiler.object_cache.load(entry)) == [symbol]


@pytest.mark.parametrize("by_llvm", [False, True])
def test_entries_load_the_shared_functions_they_call(folder, emitted, monkeypatch, by_llvm):
    if by_llvm:

        def refuse(*_):
            raise compiler.UnfamiliarError("refused")

        monkeypatch.setattr(compiler, "link", refuse)
    symbol = shared(73)
    entry = Loader().compile_texts([caller("f", symbol, 1)])["f"].entry
    emitted.clear()
    fresh = Loader()
    assert fresh.load_entries({entry: ("f",)}) and call(fresh.loaded(entry)["f"]) == 74
    # The function is there now: another entry that calls it is told where.
    other = Loader().compile_texts([caller("g", symbol, 2)])["g"].entry
    assert fresh.load_entries({other: ("g",)}) and call(fresh.loaded(other)["g"]) == 75
    assert not any(shared_text(symbol) in unit for unit in emitted)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_shared_functions_load_those_they_call(folder, emitted, missing):
    symbols = [shared(76)]
    for more in (1, 2):
        text = caller("SYMBOL", symbols[-1], more)
        # One with a stack variable, which needs the passes.
        text = text.replace("%y\n", "%z\n").replace(
            "  ret", "  %a = alloca i64\n  store i64 %y, ptr %a\n  %z = load i64, ptr %a\n  ret"
        )
        symbols.append(share(f"test{76 + more}", text, optimize=True))
    entry = Loader().compile_texts([caller("f", symbols[-1], 1)])["f"].entry
    if missing is not None:
        remove(folder, symbols[missing])
    emitted.clear()
    fresh = Loader()
    if missing is None:
        assert fresh.load_entries({entry: ("f",)}) and call(fresh.loaded(entry)["f"]) == 80
        assert emitted == []
        return
    assert not fresh.load_entries({entry: ("f",)})
    assert call(fresh.compile_texts([caller("f", symbols[-1], 1)])["f"]) == 80
    assert [shared_text(symbols[missing])] in emitted


def test_a_caller_of_a_missing_function_is_compiled_again(folder, emitted):
    symbol = shared(74)
    entry = Loader().compile_texts([caller("f", symbol, 1)])["f"].entry
    remove(folder, symbol)
    fresh = Loader()
    assert not fresh.load_entries({entry: ("f",)})
    emitted.clear()
    assert call(fresh.compile_texts([caller("f", symbol, 1)])["f"]) == 75
    assert sorted(map(len, emitted)) in ([1, 1], [2])


def test_vector_functions_that_are_called_are_among_those_that_are_prepared():
    target = host_target()
    for width in (1, 16):
        known = set(shared_functions(target, "float", width))
        for name in (*HAS_BRANCHES, *LONG):
            e = Emitter(Module(target), width)
            count = 2 if name == "rem" else 1
            call_function(e, name, "float", *["%x"] * count)
            assert set(called_by_text(e.module.text())) < known
    assert len(known) == len(VECTOR_FUNCTIONS) + 1


PROGRAM = """
import numpy as np, spmd, spmd.numpy as snp
from spmd.compile.native.llvm.compiler import loader
x = np.linspace(-9, 9, 500, dtype=np.float32)
y = spmd.jit(lambda x: snp.sin(x) + snp.cos(3 * x))(x)
print(loader.compiled, np.asarray(y).tobytes().hex()[:64])
"""


def test_a_second_process_finds_a_program_and_its_shared_functions(tmp_path):
    variables = {"SPMD_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.split())
    assert int(outputs[0][0]) > 0 and int(outputs[1][0]) == 0
    assert outputs[0][1] == outputs[1][1]


def test_kernels_with_shared_functions_give_what_numpy_gives():
    x = np.linspace(-30, 30, 777, dtype=np.float32)
    given = spmd.jit(lambda x: snp.sin(x) * snp.cos(x) + snp.tan(x / 40))(x)
    wide = x.astype(np.float64)
    expected = np.sin(wide) * np.cos(wide) + np.tan(wide / 40)
    np.testing.assert_allclose(given, expected, atol=3e-7)
