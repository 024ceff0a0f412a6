"""The result types of functions, for all pairs of dtypes and Python numbers, beside JAX's."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.config import config

jax = pytest.importorskip("jax", reason="the oracle of these tests is JAX")

DTYPES = [
    np.bool_, np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32,
    np.float16, ml_dtypes.bfloat16, np.float32, np.complex64,
]  # fmt: skip
WIDE = [np.bool_, np.uint32, np.uint64, np.int32, np.int64, np.float32, np.float64,
        np.complex64, np.complex128]  # fmt: skip
SCALARS = [True, 1, 1.0, 1j]
UFUNCS = ["subtract", "multiply", "true_divide", "floor_divide", "power", "remainder", "maximum",
          "arctan2", "logaddexp", "bitwise_and", "left_shift", "equal", "less",
          "logical_or", "copysign", "fmax", "where"]  # fmt: skip


def result(lib: Any, name: str, a: Any, b: Any) -> Any:
    """The type of a function's result, or that it refuses these operands."""
    f = getattr(lib.numpy, name)
    # Weakness is a matter of Python numbers: they must stay what they are while traced.
    try:
        if name == "where":
            out = lib.eval_shape(lambda a, b: f(np.array([True, False]), a, b), a, b)
        else:
            out = lib.eval_shape(f, a, b)
    except (TypeError, ValueError):
        return "refused"
    return str(out.dtype), bool(out.weak_type) and out.dtype != np.bool_


# Complex numbers have no angle to each other and no order here; JAX computes something.
REAL = {"arctan2", "max", "argmax"}


@pytest.mark.parametrize("name", UFUNCS)
@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_table_of(name, x64):
    operands = [*(np.zeros(2, d) for d in (WIDE if x64 else DTYPES)), *SCALARS]
    wrong = []
    with config.override("enable_x64", x64), jax.enable_x64(x64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a, b in itertools.product(operands, repeat=2):
            ours, theirs = result(spmd, name, a, b), result(jax, name, a, b)
            if ours == "refused" and name in REAL and any(map(np.iscomplexobj, (a, b))):
                continue
            if ours != theirs:
                shown = [x.dtype.name if isinstance(x, np.ndarray) else x for x in (a, b)]
                wrong.append(f"{name}{tuple(shown)} is {ours}, JAX has {theirs}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["abs", "negative", "sqrt", "exp", "sin", "sign", "floor", "rint",
                                  "reciprocal", "square", "invert", "isnan", "real",
                                  "conjugate", "logical_not", "signbit", "cbrt", "sum", "prod",
                                  "mean", "cumsum", "max", "argmax", "var", "any",
                                  "median"])  # fmt: skip
def test_table_of_one_operand(name):
    wrong = []
    for x in [*(np.ones(3, d) for d in DTYPES), *SCALARS]:
        types = []
        for lib in (spmd, jax):
            try:
                out = lib.eval_shape(getattr(lib.numpy, name), x)
                types.append((str(out.dtype), bool(out.weak_type) and out.dtype != np.bool_))
            except (TypeError, ValueError):
                types.append("refused")
        if types[0] == "refused" and name in REAL and np.iscomplexobj(x):
            continue
        if types[0] != types[1]:
            shown = x.dtype.name if isinstance(x, np.ndarray) else x
            wrong.append(f"{name}({shown}) is {types[0]}, JAX has {types[1]}")
    assert not wrong, "\n".join(wrong)


def test_python_numbers_of_64_bits_are_refused_or_wrapped_as_in_jax():
    with pytest.raises(OverflowError):
        jax.numpy.int32(1) + 2**40
    with pytest.raises(OverflowError):
        snp.int32(1) + 2**40


WEAK = {
    "spacing": lambda lib: lib.numpy.spacing(2.0),
    "spacing of 2": lambda lib: lib.numpy.spacing(2),
    "gcd": lambda lib: lib.numpy.gcd(12, 18),
    "lcm": lambda lib: lib.numpy.lcm(4, 6),
    "a product": lambda lib: lib.numpy.int8(3) * 2.5,
    "a product of bools": lambda lib: lib.numpy.ones((), bool) * 2,
    "of one's own": lambda lib: lib.numpy.full((), 2.5) * lib.numpy.ones((), "int8"),
    "zeros_like": lambda lib: lib.numpy.zeros_like(1.0) + lib.numpy.ones(2, "float16"),
    "cond": lambda lib: lib.lax.cond(lib.numpy.array(True), lambda x: x, lambda x: x * 2, 1.0),
    "cond of constants": lambda lib: lib.lax.cond(lib.numpy.array(True), lambda: 1, lambda: 2),
    "scan": lambda lib: lib.lax.scan(lambda c, _: (c + 1, c * 2.5), 1, None, length=3),
    "while": lambda lib: lib.lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0),
    "fori": lambda lib: lib.lax.fori_loop(0, 3, lambda i, c: c + 1.0, 0.0),
}


@pytest.mark.parametrize("f", WEAK.values(), ids=WEAK)
def test_results_are_as_weak_as_those_of_jax(f):
    def kinds(lib, call):
        return [(x.dtype.name, bool(x.weak_type)) for x in jax.tree.leaves(list_of(call(lib)))]

    def list_of(out):
        return list(out) if isinstance(out, tuple) else [out]

    def under_jit(lib):
        return lib.jit(lambda: f(lib))()

    assert kinds(spmd, f) == kinds(spmd, under_jit) == kinds(jax, f) == kinds(jax, under_jit)
