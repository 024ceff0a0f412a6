"""Operators, properties and methods, on arrays and tracers, with NumPy on either side."""

from __future__ import annotations

import inspect
import operator

import numpy as np
import pytest

import spmd
import spmd.numpy as snp
from spmd.base.errors import MutationError, SpmdError
from spmd.core.trace import Tracer
from spmd.numpy.operators import METHODS, OPERATORS, PROPERTIES
from tests.numpy.oracle import assert_agrees, case, jnp, values

X = values(3, 4)
INTS = values(3, 4, dtype=np.int32)
BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, divmod, operator.eq, operator.ne, operator.lt, operator.le, operator.gt,
    operator.ge,
]  # fmt: skip
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]


def cases():
    for f in BINARY:
        name = f.__name__
        yield case(
            f"{name}-array", lambda xp, x, y, f=f: f(xp.asarray(x), y), X + 4, X[:1] + 5, rtol=1e-5
        )
        yield case(f"{name}-left", lambda xp, x, f=f: f(xp.asarray(x), 2), X, rtol=1e-5)
        yield case(f"{name}-right", lambda xp, x, f=f: f(2.5, xp.asarray(x)), X, rtol=1e-5)
        yield case(
            f"{name}-numpy", lambda xp, x, f=f: f(np.float32(2.5), xp.asarray(x)), X, rtol=1e-5
        )
    for f in BITWISE:
        yield case(f"{f.__name__}", lambda xp, x, f=f: f(xp.asarray(x), abs(xp.asarray(x))), INTS)
        yield case(f"{f.__name__}-right", lambda xp, x, f=f: f(3, abs(xp.asarray(x))), INTS)
    for name in (
        "sum",
        "prod",
        "mean",
        "std",
        "var",
        "max",
        "min",
        "argmax",
        "argmin",
        "any",
        "all",
        "ptp",
        "cumsum",
        "cumprod",
        "sort",
        "argsort",
    ):
        yield case(
            name, lambda xp, x, name=name: getattr(xp.asarray(x), name)(axis=1), X, rtol=1e-5
        )
    yield case("unary", lambda xp, x: [-xp.asarray(x), +xp.asarray(x), abs(xp.asarray(x))], X)
    yield case("invert", lambda xp, x: ~xp.asarray(x), INTS)
    yield case("matmul", lambda xp, x: [xp.asarray(x) @ x.T, x.T @ xp.asarray(x)], X, rtol=1e-5)
    yield case("round", lambda xp, x: [round(xp.asarray(x)), xp.asarray(x).round(1)], X)
    yield case(
        "properties",
        lambda xp, x: [xp.asarray(x).T, xp.asarray(x).mT, xp.asarray(x).real, xp.asarray(x).imag],
        X,
    )
    yield case(
        "shapes",
        lambda xp, x: [
            xp.asarray(x).reshape(2, 6),
            xp.asarray(x).reshape((4, -1)),
            xp.asarray(x).ravel(),
            xp.asarray(x).flatten(),
            xp.asarray(x).transpose(1, 0),
            xp.asarray(x).transpose((1, 0)),
            xp.asarray(x).transpose(),
            xp.asarray(x).swapaxes(0, 1),
            xp.asarray(x)[:1].squeeze(0),
        ],
        X,
    )
    yield case(
        "others",
        lambda xp, x: [
            xp.asarray(x).astype(np.int32),
            xp.asarray(x).clip(-1, 1),
            xp.asarray(x).dot(x.T),
            xp.asarray(x).repeat(2),
            xp.asarray(x).take(3),
            xp.asarray(x).trace(),
            xp.asarray(x).diagonal(),
            xp.asarray(x).conj(),
            xp.asarray(x).copy(),
            xp.asarray(x).view(np.int32),
            xp.asarray(x).view(np.uint8),
        ],
        X,
        rtol=1e-5,
    )
    yield case("iteration", lambda xp, x: list(xp.asarray(x)), X)
    yield case("unpacking", lambda xp, x: (lambda a, b, c: [c, a])(*xp.asarray(x)), X)


def test_like_jax():
    assert_agrees(*cases())


@pytest.mark.parametrize("cls", [Tracer, snp.ndarray], ids=lambda c: c.__name__)
def test_everything_is_installed(cls):
    assert [n for n in (*OPERATORS, *METHODS, *PROPERTIES) if not hasattr(cls, n)] == []


def test_methods_of_jax_arrays_are_here():
    # About buffers and devices that are organised otherwise here, or that NumPy has no more.
    left_out = """addressable_data argpartition aval byteswap clone device_buffer device_buffers
    flat
    format global_data global_shards on_device_size_in_bytes platform traceback
    unsafe_buffer_pointer""".split()
    theirs = {n for n in dir(jnp.ones(1)) if not n.startswith("_")}
    assert theirs - set(dir(snp.ones(1))) <= set(left_out)


def test_in_place_operators_rebind():
    x = y = snp.ones(3)
    x += 1
    np.testing.assert_array_equal(x, [2, 2, 2])
    np.testing.assert_array_equal(y, [1, 1, 1])
    with pytest.raises(MutationError, match=r"x = x.at\[i\].set\(v\)"):
        y[0] = 5


def test_numpy_arrays_on_the_left_give_way():
    out = np.ones(3, np.float32) + snp.ones(3)
    assert isinstance(out, snp.ndarray)
    traced = spmd.make_jaxpr(lambda x: np.ones(3, np.float32) * x)(np.ones(3, np.float32))
    assert [str(e.prim) for e in traced.jaxpr.eqns] == ["mul"]


class Foreign:
    """Something that knows how to be added to an array."""

    def __radd__(self, other):
        return "foreign"


@pytest.mark.parametrize("make", [lambda: snp.ones(2)])
def test_unknown_operands_are_asked(make):
    assert make() + Foreign() == "foreign"
    with pytest.raises(TypeError):
        make() + "text"
    assert (make() == "text") is False


@pytest.mark.parametrize("op", [operator.add, operator.mul, operator.eq, operator.sub])
def test_lists_are_errors(op):
    with pytest.raises(SpmdError, match="convert it to an array first"):
        op(snp.ones(2), [1, 2])
    if op is not operator.eq:
        with pytest.raises(TypeError):
            op([1, 2], snp.ones(2))


def test_contains():
    assert 2 in snp.arange(3)
    assert 5 not in snp.arange(3)
    with pytest.raises(SpmdError, match="one dim"):
        2 in snp.ones((2, 2))  # noqa: B015


def test_weak_arrays_stay_weak():
    def f(x):
        return x * 2 + 1

    assert spmd.eval_shape(f, 1.0).weak_type
    assert not spmd.eval_shape(f, np.float32(1)).weak_type
    assert spmd.eval_shape(f, np.float16(1)).dtype == np.float16


def test_methods_have_the_functions_docstrings():
    for name in METHODS:
        method = getattr(snp.ndarray, name)
        assert inspect.getdoc(method), name
