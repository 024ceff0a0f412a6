"""Derivatives where they are special: zeros, ties, infinities, remainders of zero, beside JAX's.

Each function is differentiated at all special points (pairs of them) by grad, by jvp and twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spmd.base.errors import SpmdError
from tests.jax.compare import OURS, THEIRS, jax

POINTS = np.array(
    [-np.inf, -2, -1.5, -1, -0.5, -0.0, 0.0, 0.25, 0.5, 1, 1.5, 2, 2.5, np.inf, np.nan], np.float32
)
PAIRS = np.array(list(itertools.product(POINTS, POINTS)), np.float32).T

UNARY = """exp exp2 expm1 log log1p sqrt log2 log10 sin cos tan arcsin arccos arctan sinh cosh tanh
arcsinh arccosh arctanh reciprocal sinc absolute positive square rint real conj nan_to_num negative
sign floor ceil trunc cbrt fabs deg2rad rad2deg imag angle round modf frexp""".split()
BINARY = """add multiply divide maximum minimum fmax fmin power float_power subtract floor_divide
remainder mod fmod divmod logaddexp logaddexp2 arctan2 hypot copysign heaviside""".split()
OF_ONE: dict[str, Callable[..., Any]] = {
    **{name: (lambda j, x, name=name: getattr(j.np, name)(x)) for name in UNARY},
    **{f"power {k}": (lambda j, x, k=k: j.np.power(x, k)) for k in (-3, -2, -1, 0, 1, 2, 3)},
    **{f"** {k}": (lambda j, x, k=k: x**k) for k in (-2, -1, 0, 1, 2, 3, 0.0, 1.0, 0.5, 3.0)},
    **{f"{k} ** x": (lambda j, x, k=k: k**x) for k in (0.0, 1.0, 2.0)},
    **{f"% {k}": (lambda j, x, k=k: x % k) for k in (0.5, -0.5, 2.0)},
    **{f"{k} % x": (lambda j, x, k=k: k % x) for k in (0.5, -2.0, 0.0)},
    **{f"round {k}": (lambda j, x, k=k: j.np.round(x, k)) for k in (1, -1)},
    "clip": lambda j, x: j.np.clip(x, 0, 1),
    "clip to one value": lambda j, x: j.np.clip(x, 1, 1),
    "clip to itself": lambda j, x: j.np.clip(x, x, x),
    "maximum of itself": lambda j, x: j.np.maximum(x, x),
    "where": lambda j, x: j.np.where(x > 0, j.np.sqrt(x), 0.0),
    "where of a quotient": lambda j, x: j.np.where(x == 0, 1.0, j.np.sin(x) / x),
    "select": lambda j, x: j.np.select([x > 1, x >= 0], [x * 2, j.np.sqrt(x)], x),
    "piecewise": lambda j, x: j.np.piecewise(
        x, [x < 0, x >= 1], [lambda v: -v, lambda v: v * v, 3.0]
    ),
}
OF_TWO: dict[str, Callable[..., Any]] = {
    name: (lambda j, x, y, name=name: getattr(j.np, name)(x, y)) for name in BINARY
}
# The second derivative is a pole at 1, of which JAX makes NaN, and has no meaning beyond.
EXCEPT = {"arctanh": (POINTS != 1) & (POINTS != -1) & ~np.isinf(POINTS)}


def scalar(j: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with its floating results joined in one number."""

    def g(*args: Any) -> Any:
        found = j.tree.leaves(f(j, *args))
        found = [v for v in found if v.dtype == np.float32]
        return sum((k + 1.0) * j.np.sum(v) for k, v in enumerate(found))

    return g


def derivatives(j: Any, f: Callable[..., Any], args: Any) -> dict[str, Any]:
    """What is compared, at each of the points."""
    g, out = scalar(j, f), {}
    for k in range(len(args)):
        first = j.grad(g, k)

        def forward(*at: Any, k: int = k) -> Any:
            def h(v: Any) -> Any:
                return g(*at[:k], v, *at[k + 1 :])

            return j.jvp(h, (at[k],), (np.float32(1),))[1]

        out[f"grad {k}"] = j.vmap(first)(*args)
        out[f"jvp {k}"] = j.vmap(forward)(*args)
        for m in range(k, len(args)):
            out[f"grad of grad {k} {m}"] = j.vmap(j.grad(first, m))(*args)
    return out


def differences(table: dict[str, Callable[..., Any]], args: Any) -> list[str]:
    """The derivatives that are not JAX's."""
    # JAX compiles all of them as one program, which takes a tenth of the time.
    wanted = jax.jit(lambda *a: {n: derivatives(THEIRS, f, a) for n, f in table.items()})(*args)
    wrong = []
    for name, f in table.items():
        found = derivatives(OURS, f, args)
        for what, y in wanted[name].items():
            x, y = np.asarray(found[what]), np.asarray(y)
            same = np.isclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
            if what.startswith("grad of"):
                same |= ~EXCEPT.get(name, np.ones_like(same))
            wrong += [
                f"{name}, {what} at {[float(a[i]) for a in args]}: {x[i]}, JAX has {y[i]}"
                for i in np.flatnonzero(~same)
            ]
    return wrong


@pytest.mark.parametrize("table, args", [(OF_ONE, (POINTS,)), (OF_TWO, tuple(PAIRS))])
def test_elementwise_functions(table, args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = differences(table, args)
    assert not wrong, "\n".join(wrong)


# ---- functions of vectors ----------------------------------------------------------------------

VECTORS = {
    "ties": [1, 1, 2, 2, 0, 0],
    "zeros": [0, 0, 0, 0, 0, 0],
    "one zero": [1, 0, 2, 3, -1, 4],
    "two zeros": [1, 0, 2, 0, 5, 1],
    "one NaN": [1, np.nan, 2, 2, 0, 1],
    "only NaNs": [np.nan] * 6,
    "infinities": [1, np.inf, np.inf, -np.inf, 0, 1],
}
ROWS = np.array([*VECTORS.values()], np.float32)
NODES = np.array([-1, 0, 1, 1, 2], np.float32)
WHERE = np.array([-1.0, 0.0, 0.5, 1.0, 3.0], np.float32)
REDUCTIONS = """max min ptp median nanmax nanmin nanmedian nanmean nanstd prod std var cumprod
sort""".split()
OF_VECTORS: dict[str, Callable[..., Any]] = {
    **{name: (lambda j, x, name=name: getattr(j.np, name)(x)) for name in REDUCTIONS},
    **{
        f"{name} {q}": (lambda j, x, q=q, name=name: getattr(j.np, name)(x, q))
        for name in ("quantile", "nanquantile")
        for q in (0.0, 0.3, 0.5, 1.0)
    },
    **{
        f"norm {k}": (lambda j, x, k=k: j.np.linalg.norm(x, ord=k))
        for k in (None, 0, 1, 2, 3, 0.5, np.inf, -np.inf)
    },
    "interp": lambda j, x: j.np.interp(x, NODES, WHERE),
    "interp of values": lambda j, x: j.np.interp(WHERE, NODES[: x.size], x[:5]),
    "interp with a period": lambda j, x: j.np.interp(x, WHERE / 2, WHERE, period=0.5),
    "interp of the period": lambda j, x: j.np.interp(WHERE, WHERE / 4, WHERE, period=x[0]),
    "top_k": lambda j, x: j.lax.top_k(x, 1)[0],
    "max where": lambda j, x: j.np.max(x, where=x > 0, initial=0.0),
    "at max": lambda j, x: j.np.zeros(3).at[np.zeros(x.shape, int)].max(x),
}
# With infinities the order of multiplication decides which products are NaN. Of the largest among
# NaNs JAX gives NaN op by op, as we do, and 0 compiled.
UNDEFINED = {
    *itertools.product(["prod", "cumprod"], ["infinities", "only NaNs"]),
    *itertools.product(
        ["max", "min", "ptp", "norm inf", "norm -inf", "at max"], ["one NaN", "only NaNs"]
    ),
}


def of_vectors(j: Any, f: Callable[..., Any], rows: Any) -> list[Any]:
    """Gradients and directional derivatives."""

    def g(x: Any) -> Any:
        out = f(j, x)
        return j.np.sum(out * np.arange(1.0, 1 + out.size, dtype=np.float32).reshape(out.shape))

    direction = np.arange(1.0, 1 + rows.shape[1], dtype=np.float32)

    def forward(x: Any) -> Any:
        return j.jvp(g, (x,), (direction,))[1]

    return [j.vmap(h)(rows) for h in (j.grad(g), forward)]


def test_functions_of_vectors():
    wanted = jax.jit(lambda x: {n: of_vectors(THEIRS, f, x) for n, f in OF_VECTORS.items()})(ROWS)
    wrong = []
    for name, f in OF_VECTORS.items():
        found = of_vectors(OURS, f, ROWS)
        for what, ours, theirs in zip(("grad", "jvp"), found, wanted[name], strict=True):
            for kind, a, b in zip(VECTORS, ours, theirs, strict=True):
                same = np.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
                if not same and (name, kind) not in UNDEFINED:
                    wrong.append(f"{what} of {name} at {kind}: {a}, JAX has {b}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["nextafter", "spacing"])
def test_functions_without_a_derivative(name):
    x = np.float32(1.5)
    args = (x, x) if name == "nextafter" else (x,)
    with pytest.raises(NotImplementedError):
        jax.grad(getattr(THEIRS.np, name))(*args)
    with pytest.raises(SpmdError, match="nextafter"):
        OURS.grad(getattr(OURS.np, name))(*args)
