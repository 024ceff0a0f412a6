"""The structured assembler: arithmetic, control flow, memory, atomics, constants, mistakes."""

import ctypes

import numpy as np
import pytest

from spmd.compile.native.llvm.compiler import compile_texts
from spmd.compile.native.llvm.function_builder import Function, Words

I64 = ctypes.c_int64


def build(f: Function, *types):
    """The function as a ctypes callable; once as it is, once optimised, which must agree."""
    plain = compile_texts([f.text()])[f.name]
    fast = compile_texts([f.text()], optimize=True)[f.name]
    prototype = ctypes.CFUNCTYPE(*types)

    def both(*args):
        first, second = prototype(plain)(*args), prototype(fast)(*args)
        assert first == second
        return first

    return both


def integer(name: str, params: int, body) -> object:
    f = Function(name, "i64", ["i64"] * params)
    f.ret(body(f, *f.params))
    return build(f, I64, *[I64] * params)


@pytest.mark.parametrize(
    "name, body, expected",
    [
        ("add", lambda f, a, b: a + b + 1, lambda a, b: a + b + 1),
        ("rsub", lambda f, a, b: 10 - a, lambda a, b: 10 - a),
        ("mul", lambda f, a, b: a * b, lambda a, b: a * b),
        ("opaque", lambda f, a, b: f.opaque(a + 1) - f.opaque(b), lambda a, b: a + 1 - b),
        ("div", lambda f, a, b: a // 7, lambda a, b: int(a / 7)),
        ("rem", lambda f, a, b: a % 7, lambda a, b: a - 7 * int(a / 7)),
        ("shift", lambda f, a, b: (a << 3) >> 1, lambda a, b: a * 4),
        ("bits", lambda f, a, b: (a & b) ^ (a | b), lambda a, b: a ^ b),
        ("smaller", lambda f, a, b: f.smaller(a, b), min),
        ("larger", lambda f, a, b: f.larger(a, b), max),
        ("choose", lambda f, a, b: f.select(a.equals(b), a, -1), lambda a, b: a if a == b else -1),
    ],
)
def test_integer_arithmetic_is_that_of_python(name, body, expected):
    function = integer(f"ir_{name}", 2, body)
    for a in (-100, -7, 0, 3, 99):
        for b in (-3, 0, 3, 100):
            assert function(a, b) == expected(a, b)


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, 1e-310, 3.5e38, float("inf"), -2.5])
def test_floating_point_constants_are_exact(number):
    f = Function("ir_double", "double", [])
    f.ret(f.value("double", number))
    assert str(build(f, ctypes.c_double)()) == str(number)
    if abs(number) < 3e38:
        g = Function("ir_float", "float", [])
        g.ret(g.value("float", number))
        assert build(g, ctypes.c_float)() == np.float32(number)


def test_branches_and_early_returns_are_taken():
    f = Function("ir_sign", "i64", ["i64"])
    (x,) = f.params
    with f.if_(x.equals(0)):
        f.ret(0)
    result = f.var("i64")
    with f.if_else(x < 0) as it:
        result.set(-1)
        it.otherwise()
        result.set(1)
    f.ret(result.get())
    assert [build(f, I64, I64)(x) for x in (-5, 0, 5)] == [-1, 0, 1]


def test_loops_nest_and_break():
    f = Function("ir_pairs", "i64", ["i64"])
    count = f.var("i64", 0)
    with f.range(0, f.params[0]) as i, f.range(i, f.params[0], 2) as j:
        with f.if_((i + j) > 5):
            count.set(count.get() + 1)
    with f.loop():
        f.break_if(count.get() >= 1000)
        count.set(count.get() + 1000)
    f.ret(count.get())
    expected = sum(i + j > 5 for i in range(9) for j in range(i, 9, 2)) + 1000
    assert build(f, I64, I64)(9) == expected


def test_memory_vectors_and_calls_are_emitted():
    half = Function("ir_half", "double", ["double"], internal=True)
    half.ret(half.params[0] * 0.5)
    f = Function("ir_memory", "double", ["ptr"])
    (p,) = f.params
    four = f.load("<4 x double>", p, align=8)
    doubled = four + four
    f.store(doubled, p, 32, align=8)
    last = f.load("double", f.at(p, 32), 24)
    f.ret(f.call("ir_half", "double", last))
    addresses = compile_texts(["\n".join([half.text(), f.text()])], optimize=True)
    values = np.arange(8.0)
    function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p)(addresses["ir_memory"])
    assert function(values.ctypes.data) == 3.0
    assert values.tolist() == [0, 1, 2, 3, 0, 2, 4, 6]


def test_atomics_give_the_value_before():
    f = Function("ir_atomic", "i64", ["ptr"])
    (p,) = f.params
    before = f.atomic("add", p, 8, f.value("i64", 5))
    f.atomic_store(before * 2, p, 0)
    f.ret(f.atomic_load(p, 8))
    values = np.array([0, 7])
    address = compile_texts([f.text()])["ir_atomic"]
    assert ctypes.CFUNCTYPE(I64, ctypes.c_void_p)(address)(values.ctypes.data) == 12
    assert values.tolist() == [14, 12]


def test_null_and_symbols_are_addresses():
    f = Function("ir_null", "i64", ["ptr"])
    f.ret(f.convert("zext", f.params[0].equals(0), "i64"))
    function = build(f, I64, ctypes.c_void_p)
    assert function(None) == 1
    assert function(16) == 0


def test_numbers_that_lie_in_memory_are_read_and_weighted():
    f = Function("ir_words", "i64", ["ptr", "i64"])
    p, number = f.params
    words = Words(f, p, ("a", "b", "c"))
    b, a = words.read("b", "a")
    quotient, rest = f.divided(number, b)
    second, third = f.apart(p, words["c"], 3)[1:]
    read = [f.load("i64", address) for address in (p, second, third)]
    f.ret(f.weighted((quotient, rest, f.value("i64", 10**6)), (b, a, read[1] * 10 + read[2])))
    values = np.array([7, 3, 8])
    # 8 bytes apart lie all the words.
    assert build(f, I64, ctypes.c_void_p, I64)(values.ctypes.data, 17) == 5 * 3 + 2 * 7 + 38 * 10**6


def test_functions_are_called_at_addresses():
    double = Function("ir_double", "i64", ["i64"])
    double.ret(double.params[0] * 2)
    f = Function("ir_at_address", "i64", ["i64", "ptr"])
    number, pointer = f.params
    f.ret(f.call(number, "i64", f.call(pointer, "i64", f.value("i64", 5))))
    address = compile_texts([double.text()])["ir_double"]
    assert build(f, I64, I64, ctypes.c_void_p)(address, address) == 20


def test_mistakes_are_found_when_they_are_made():
    f = Function("ir_mistake", "i64", ["i64", "i32"])
    with pytest.raises(TypeError, match="i32 %a1 used as i64"):
        f.params[0] + f.params[1]
    with pytest.raises(ValueError, match="ir_mistake ends without returning"):
        f.text()
