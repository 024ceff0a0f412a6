"""Public functions give arrays or tracers, never NumPy objects or Python numbers.

NumPy's arithmetic on a result would follow NumPy's promotion, silently. Each function is called on
constants (numbers, NumPy arrays, arrays of rank 0), where it has the least to do, eagerly and
inside each transformation.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import partial

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd import lax
from spmd.base.errors import SpmdError
from spmd.base.tree import tree_flatten
from spmd.core.aval import typeof
from spmd.numpy.dtype import ScalarType
from tests.lax.records import RECORDS

MODULES = (
    "numpy numpy.fft numpy.linalg lax lax.linalg random nn scipy.linalg scipy.special scipy.signal "
    "scipy.stats".split()
)

# Functions that answer questions about dtypes and shapes, or that deal with files and printing.
NO_ARRAYS = set(
    "axis_size broadcast_shapes can_cast conv_dimension_numbers einsum_path finfo fromfile "
    "get_printoptions iinfo iscomplexobj isdtype isrealobj isscalar issubdtype iterable load ndim "
    "printoptions result_type save savez savez_compressed set_printoptions shape size".split()
)

# `psum` of a Python number is one, as in JAX; the second result of `cho_factor` is a flag.
OTHERS = {"psum": float, "cho_factor": (bool, int)}


def arguments():
    """Arguments of many kinds, made anew, as some functions write into NumPy arrays."""
    half, scalar, zero_d, one = 0.5, np.float32(0.5), np.full((), 0.5, np.float32), np.int32(1)
    vector, whole = np.array([0.5, 0.25, 0.75], np.float32), np.array([2, 0, 1], np.int32)
    matrix = np.array([[2.0, 0.5], [0.5, 3.0]], np.float32)
    mask, imaginary = np.array([True, False, True]), vector.astype(np.complex64)
    # Those with which a function has nothing to do come first.
    return [
        *[(), ((),), ((), 2), ((), half), ((), half, "float32"), (zero_d,), (half,), (scalar,)],
        *[(one,), (3,), (zero_d, ()), (half, ()), (vector, ()), (zero_d, "float32"), (3, "int32")],
        *[(scalar, "int32"), (zero_d, zero_d), (half, half), (one, one), (3, 3), (vector,)],
        *[(whole,), (matrix,), ((2,),), ((3,), vector), (vector, vector), (matrix, matrix)],
        *[
            (vector, (3,)),
            (vector, (0,)),
            (vector, (0,), (3,)),
            (vector, (3,), (0,)),
            (matrix, [0]),
        ],
        *[(vector, 0), (zero_d, (3,)), (matrix, vector[:2]), (whole, whole), (mask,), (imaginary,)],
        *[([vector, vector],), ([matrix, matrix],), (whole.astype(np.uint32),), ("int32", 3)],
        *[("float32", (2, 2)), (zero_d,) * 3, (half,) * 3, (vector,) * 3, (mask, vector, vector)],
        *[(True, half, half), (vector, whole, 0), (vector, 0, 1), (matrix, 0, 1), (vector, whole)],
        *[(matrix, 0), ((3,), half), (whole, 4), (whole, vector), (vector, [vector, vector])],
        *[("i,i->", vector, vector), (half,) * 4, (vector,) * 4, (0.0, 1.0, 5), (2, 3, 4)],
        *[(vector, vector, 3), (vector, 3, vector), (whole,) * 3, (half, 2), (2, half)],
    ]


MOST = 2  # calls of each function


def fitting(f, leading):
    """The numbers of the first arguments that the function accepts."""
    found = []
    # Random functions compile a program for each shape; the first arguments are shapes.
    for k in range(6 if leading else len(arguments())):
        try:
            f(*leading, *arguments()[k])
        except Exception:
            continue
        found.append(k)
        if len(found) == MOST:
            break
    return found


def inside(f):
    """The results of `f()` by where it was called: eagerly, and under each transformation."""
    results = {}

    def noted(where, x):
        results[where] = f()
        return x

    noted("eager", 0)
    spmd.grad(lambda x: noted("grad", x))(1.0)
    spmd.vmap(lambda x: noted("vmap", x))(np.ones(2, np.float32))
    try:
        spmd.make_jaxpr(lambda: noted("jit", 0))()
        spmd.make_jaxpr(
            lambda: lax.scan(lambda c, x: (noted("scan", c), x), 0.0, np.ones(2, np.float32))
        )()
    except SpmdError:
        assert f.depends_on_values, "raises while traced, and not when called eagerly"
    return results


class Call:
    """A function of no arguments whose result's shape may depend on values."""

    def __init__(self, f, name):
        self.f = f
        self.depends_on_values = name in VALUES_MATTER

    def __call__(self):
        return self.f()


VALUES_MATTER = set(
    "argwhere bincount compress extract flatnonzero intersect1d nonzero roots setdiff1d setxor1d "
    "trim_zeros union1d unique unique_all unique_counts unique_inverse unique_values where".split()
)


def strangers(out, allowed=()):
    """The leaves of a result that are neither arrays nor tracers."""
    leaves = tree_flatten(out)[0]
    kinds = (np.ndarray, np.generic, bool, int, float, complex)
    return [x for x in leaves if isinstance(x, kinds) and not isinstance(x, allowed)]


def functions(module):
    names = getattr(module, "__all__", None) or dir(module)
    for name in names:
        f = getattr(module, name, None)
        # The dtype names are classes too, which make arrays.
        wanted = callable(f) and (not inspect.isclass(f) or isinstance(f, ScalarType))
        if wanted and not name.startswith("_") and name not in NO_ARRAYS:
            yield name, f


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_give_arrays(name):
    module = importlib.import_module(f"spmd.{name}")
    leading = (spmd.random.key(0),) if name == "random" else ()
    wrong, called = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, f in functions(module):
            for k in fitting(f, leading):
                called += 1
                call = Call(lambda f=f, k=k: f(*leading, *arguments()[k]), function)
                for where, out in inside(call).items():
                    if found := strangers(out, OTHERS.get(function, ())):
                        shown = [type(x).__name__ for x in found]
                        wrong.append(f"{function}{arguments()[k]} gives {shown}, {where}")
    assert called, "no function was called"
    assert not wrong, "\n".join(wrong)


def test_operations_of_the_records_give_arrays():
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for record in RECORDS:
            operands = record.make(record.dtypes[-1] if record.dtypes else np.float32)
            out = []
            call = partial(record.function, lax, *operands)
            spmd.make_jaxpr(lambda out=out, call=call: out.append(call()) or 0)()
            if strangers(out):
                wrong.append(f"{record}: {[type(x).__name__ for x in strangers(out)]}")
    assert not wrong, "\n".join(wrong)


MADE = {
    "zeros": lambda dtype: snp.zeros((), dtype),
    "ones": lambda dtype: snp.ones((), dtype),
    "full": lambda dtype: snp.full((), 3, dtype),
    "full of its own": lambda dtype: snp.full((), dtype.type(3)),
    "zeros_like": lambda dtype: snp.zeros_like(np.ones((), dtype)),
    "ones_like": lambda dtype: snp.ones_like(np.ones((), dtype)),
    "full_like": lambda dtype: snp.full_like(np.ones((), dtype), 3),
    "array": lambda dtype: snp.array(3, dtype),
    "asarray": lambda dtype: snp.asarray(dtype.type(3)),
    "lax.full": lambda dtype: lax.full((), 3, dtype),
    "convert": lambda dtype: lax.convert_element_type(3, dtype),
    "reshape": lambda dtype: lax.reshape(np.full((), 3, dtype), ()),
}
OTHER_OPERANDS = [0, 2, 2.5, 70000, True, np.float16(1.5), np.int8(3)]


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "bfloat16", "bool"])
def test_constants_follow_our_promotion_while_traced(make, dtype):
    dtype = snp.dtype(getattr(snp, dtype if dtype != "bool" else "bool_").dtype)
    uses = [
        lambda x, y: x + y,
        lambda x, y: y * x,
        lambda x, y: x // y,
        lambda x, y: (x * y).reshape(1).at[0].set(4),
        lambda x, y: (x == y).astype("float16"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for y in OTHER_OPERANDS:
            eager = [use(make(dtype), y) for use in uses]
            for out, wanted in zip(
                spmd.jit(lambda y=y: [use(make(dtype), y) for use in uses])(), eager, strict=True
            ):
                assert typeof(out) is typeof(wanted), y
                assert repr(np.asarray(out).tolist()) == repr(np.asarray(wanted).tolist())


def test_constants_stay_literals():
    def f(x):
        return x * snp.ones(()) + snp.full((), 2) + snp.array(3) + snp.zeros_like(2.0)

    closed = spmd.make_jaxpr(f)(np.ones(3, np.float32))
    assert not closed.consts
    assert [eqn.prim.name for eqn in closed.eqns] == ["mul", "add", "add", "add"]
