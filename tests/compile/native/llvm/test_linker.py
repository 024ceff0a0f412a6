"""The linker: what it loads works as what LLVM's linker loads, and the rest it leaves to that."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from spmd.compile.native.llvm import compiler, linker
from spmd.compile.native.llvm.compiler import Loader
from spmd.compile.native.llvm.linker import UnfamiliarError, link
from spmd.compile.native.llvm.modules import symbols_of
from spmd.compile.native.llvm.object_cache import ObjectCache
from tests.compile.native.llvm.emissions import emit_of

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other processors' code is linked by LLVM"
)

EMIT = emit_of(Loader())


def object_of(text: str) -> bytes:
    return EMIT([(text, False)])


def by_llvm(text: str) -> Mapping[str, int]:
    """The addresses of a text's symbols that LLVM's linker loads."""
    with patch.object(compiler, "link", side_effect=UnfamiliarError("left to LLVM")):
        return Loader().compile_texts([text])


def call(address: int, *args: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(args))(address)(*args)


def switch() -> str:
    """A jump table, whose entries are distances."""
    cases = "".join(f"i64 {k}, label %c{k} " for k in range(12))
    blocks = "".join(
        f"c{k}:\n %r{k} = call i64 @llabs(i64 {-k * k})\n store i64 %r{k}, ptr %s\n br label %end\n"
        for k in range(12)
    )
    return (
        "declare i64 @llabs(i64)\ndefine i64 @f(i64 %n) nounwind {\n %s = alloca i64\n"
        f" store i64 -1, ptr %s\n switch i64 %n, label %end [{cases}]\n{blocks}"
        "end:\n %r = load i64, ptr %s\n ret i64 %r\n}\n"
    )


# Texts that define `f(i64) -> i64`, and what it gives for 0, 1, 2 in this order.
TEXTS: dict[str, tuple[str, list[int]]] = {
    "nothing": ("define i64 @f(i64 %n) nounwind {\n ret i64 %n\n}\n", [0, 1, 2]),
    "a function of the process": (
        "declare i64 @llabs(i64)\ndefine i64 @f(i64 %n) nounwind {\n %m = sub i64 -5, %n\n"
        " %r = call i64 @llabs(i64 %m)\n %s = add i64 %r, 1\n ret i64 %s\n}\n",
        [6, 7, 8],
    ),
    "the address of a function of the process": (
        "declare i64 @llabs(i64)\ndefine i64 @f(i64 %n) nounwind {\n"
        " %same = icmp eq ptr @llabs, null\n %r = select i1 %same, i64 -1, i64 %n\n"
        " ret i64 %r\n}\n",
        [0, 1, 2],
    ),
    "a private function": (
        "define internal i64 @g(i64 %n) nounwind noinline {\n %r = mul i64 %n, 7\n ret i64 %r\n}\n"
        "define i64 @f(i64 %n) nounwind {\n %r = call i64 @g(i64 %n)\n %s = add i64 %r, 1\n"
        " ret i64 %s\n}\n",
        [1, 8, 15],
    ),
    "a variable": (
        "@kept = global i64 40, align 64\n@more = global i64 0\n@less = internal global i64 3\n"
        "define i64 @f(i64 %n) nounwind {\n %a = load i64, ptr @kept\n %b = load i64, ptr @more\n"
        " %c = load i64, ptr @less\n %d = add i64 %a, %b\n %e = add i64 %d, %n\n"
        " store i64 %e, ptr @more\n store i64 %b, ptr @less\n %g = add i64 %e, %c\n"
        " ret i64 %g\n}\n",
        [43, 81, 163],
    ),
    "zeros": (
        "@zeros = global [100000 x i64] zeroinitializer, align 64\n"
        "@first = global i64 5\ndefine i64 @f(i64 %n) nounwind {\n"
        " %p = getelementptr i64, ptr @zeros, i64 99999\n %a = load i64, ptr %p\n"
        " %b = load i64, ptr @first\n %c = add i64 %a, %b\n store i64 %c, ptr %p\n ret i64 %c\n}\n",
        [5, 10, 15],
    ),
    "constants": (
        "@table = private constant [3 x i64] [i64 7, i64 8, i64 9]\n"
        "define i64 @f(i64 %n) nounwind {\n %p = getelementptr i64, ptr @table, i64 %n\n"
        " %r = load i64, ptr %p\n %x = sitofp i64 %r to double\n %y = fmul double %x, 2.5\n"
        " %z = fptosi double %y to i64\n ret i64 %z\n}\n",
        [17, 20, 22],
    ),
    "addresses in a table": (
        "define internal i64 @a(i64 %n) nounwind {\n ret i64 10\n}\n"
        "define internal i64 @b(i64 %n) nounwind {\n ret i64 20\n}\n"
        "@table = internal constant [3 x ptr] [ptr @a, ptr @b, ptr @a]\n"
        "define i64 @f(i64 %n) nounwind {\n %p = getelementptr ptr, ptr @table, i64 %n\n"
        " %g = load ptr, ptr %p\n %r = call i64 %g(i64 %n)\n ret i64 %r\n}\n",
        [10, 20, 10],
    ),
    "a jump table": (switch(), [0, 1, 4]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_linker_gives_the_functions_that_llvm_links(name):
    text, expected = TEXTS[name]
    (ours,) = link([object_of(text)])
    theirs = by_llvm(text)
    assert [call(ours["f"], n) for n in range(3)] == expected
    assert [call(theirs["f"], n) for n in range(3)] == expected
    assert set(symbols_of(text)) == set(ours)


def test_objects_that_are_linked_together_refer_to_each_other():
    asks = (
        "declare i64 @g(i64)\n@shared = external global i64\ndefine i64 @f(i64 %n) nounwind {\n"
        " %r = call i64 @g(i64 %n)\n %s = load i64, ptr @shared\n %t = add i64 %r, %s\n"
        " ret i64 %t\n}\n"
    )
    answers = (
        "@shared = global i64 100\ndefine i64 @g(i64 %n) nounwind {\n %r = mul i64 %n, 3\n"
        " store i64 50, ptr @shared\n ret i64 %r\n}\n"
    )
    ours = link([object_of(asks), object_of(answers)])
    assert call(ours[0]["f"], 4) == 62 and call(ours[0]["f"], 5) == 65
    assert ctypes.c_int64.from_address(ours[1]["shared"]).value == 50
    with pytest.raises(UnfamiliarError, match="not exported by the process"):
        link([object_of(asks)])
    with pytest.raises(UnfamiliarError, match="two definitions of g"):
        link([object_of(answers), object_of(answers)])


def access(address: int) -> str:
    """What may be done with the memory at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1]
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_code_is_not_writable_and_variables_do_not_run():
    (ours,) = link([object_of(TEXTS["a variable"][0])])
    assert access(ours["f"]) == "r-xp"
    assert access(ours["kept"]) == access(ours["more"]) == "rw-p"
    assert ours["kept"] % 64 == 0


UNFAMILIAR = {
    "tables for unwinding": "define i64 @f(i64 %n) {\n ret i64 %n\n}\n",
    "thread-local variables": (
        "@own = thread_local global i64 1\ndefine i64 @f(i64 %n) nounwind {\n"
        " %r = load i64, ptr @own\n ret i64 %r\n}\n"
    ),
    "weak symbols": "define weak i64 @f(i64 %n) nounwind {\n ret i64 %n\n}\n",
    "hidden symbols": "define hidden i64 @f(i64 %n) nounwind {\n ret i64 %n\n}\n",
    "tentative definitions": "@shared = common global i64 0\n",
    "large alignments": "@large = global i64 1, align 8192\n",
}


@pytest.mark.parametrize("name", UNFAMILIAR)
def test_unfamiliar_object_code_is_refused(name):
    with pytest.raises(UnfamiliarError):
        link([object_of(UNFAMILIAR[name])])


def test_bytes_that_are_no_object_are_refused():
    code = object_of(TEXTS["nothing"][0])
    for damaged in (
        b"",
        b"text",
        code[:18] + b"\xb7\x00" + code[20:],
        code[:4] + b"\x01" + code[5:],
    ):
        with pytest.raises(UnfamiliarError, match="not an object"):
            link([damaged])


@pytest.mark.parametrize("name", ["a variable", "a jump table", "addresses in a table"])
def test_damaged_objects_are_linked_or_refused(name):
    """The cache has checksums; without them, too, nothing but the refusal is raised."""
    code = object_of(TEXTS[name][0])
    rng = np.random.default_rng(len(name))
    for size in rng.integers(len(code), size=100).tolist():
        with pytest.raises(UnfamiliarError):
            link([code[:size]])
    refused = 0
    for _ in range(200):
        damaged = bytearray(code)
        for at in rng.integers(len(code), size=3).tolist():
            damaged[at] = int(rng.choice([0, 255, rng.integers(256)]))
        try:
            link([bytes(damaged)])
        except UnfamiliarError:
            refused += 1
    assert refused > 20


def test_a_section_beyond_the_reach_of_distances_is_refused():
    text = "@large = global [3000000000 x i8] zeroinitializer\n" + TEXTS["nothing"][0]
    with pytest.raises(UnfamiliarError, match="further than distances reach"):
        link([object_of(text)])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_a_link_that_fails_keeps_no_memory(monkeypatch):
    """Where memory may not be made executable, say."""
    monkeypatch.setattr(linker, "_mprotect", lambda *_: -1)
    code = object_of(TEXTS["zeros"][0])
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(50):
        with pytest.raises(UnfamiliarError, match="executable"):
            link([code])
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 20


def test_the_loader_leaves_unfamiliar_code_to_llvm(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "object_cache", ObjectCache(lambda: tmp_path))
    texts = [
        UNFAMILIAR["tables for unwinding"],
        "define i64 @g(i64 %n) nounwind {\n ret i64 7\n}\n",
    ]
    first, second = Loader(), Loader()
    for loader in (first, second):  # the second finds both on the disk
        addresses = loader.compile_texts(texts)
        assert call(addresses["f"], 5) == 5 and call(addresses["g"], 5) == 7
    assert second.compiled == 0


_EVERYTHING = """
import numpy as np, spmd, spmd.numpy as snp
from spmd import lax
from spmd.compile.native.llvm import compiler
from spmd.compile.native.llvm.linker import UnfamiliarError

link, left = compiler.link, []

def noting(*args):
    try:
        return link(*args)
    except UnfamiliarError as error:
        left.append(str(error))
        raise

compiler.link = noting
x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(8, 8)

def turn(h, row):
    h = snp.tanh(h @ x + row)
    return h, lax.cond(snp.sum(h) > 0, snp.sin, snp.exp, row)

def f(x):
    image = lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")
    kept = lax.while_loop(lambda v: snp.sum(v) < 3, lambda v: v * v + 0.7, x[0])
    return lax.scan(turn, x[0], x), image, kept, lax.sort(x @ x), lax.lgamma(x), x**2.5

made = spmd.jit(f)(x)
gradient = spmd.jit(spmd.grad(lambda x: snp.sum(f(x)[1] ** 2)))(x)
assert all(np.all(np.isfinite(a)) for a in spmd.tree.leaves((made[0], gradient)))
print(left)
"""


def test_all_code_of_the_compiler_is_familiar(run_python):
    """Runtime, kernels, products, loops, sorts, convolutions: none of it needs LLVM's linker."""
    done = run_python(["-c", _EVERYTHING], env={"SPMD_CHECK": "0"})
    assert done.stdout.strip() == "[]", done.stderr
