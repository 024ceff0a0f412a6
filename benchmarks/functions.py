"""Functions: calls of NumPy's and SciPy's kind, one a case, beside the same call of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from benchmarks.case import BOTH, Case, array, indices, integers, normal, of
from benchmarks.sides import Side

# spmd and JAX, and NumPy where it has the function under the same name.
WITH_NUMPY = (*BOTH, "numpy")

# A call: its name, the function, its operands, and whether NumPy has it too.
Call = tuple[str, Callable[..., Any], list[Callable[[], numpy.ndarray]], bool]


def definite(*shape: int, seed: int = 0) -> Callable[[], numpy.ndarray]:
    """An operand for `of`: positive definite matrices (..., n, n)."""

    def make() -> numpy.ndarray:
        a = normal(*shape, seed=seed)
        return a @ numpy.swapaxes(a, -1, -2) + shape[-1] * numpy.eye(shape[-1], dtype=a.dtype)

    return make


def cases_of(kind: str, calls: list[Call], tolerance: float) -> list[Case]:
    """The cases of some calls, under a common first word."""
    return [
        Case(
            f"functions/{kind}: {name}",
            of(body, *operands),
            sides=WITH_NUMPY if has_numpy else BOTH,
            tolerance=tolerance,
        )
        for name, body, operands, has_numpy in calls
    ]


# ---- linear algebra ----------------------------------------------------------------------------


def gradient_of_solve(side: Side, a, b):
    """In the matrices."""
    assert side.grad is not None
    return side.grad(lambda a: side.np.linalg.solve(a, b).sum())(a)


def matrix_cases() -> list[Case]:
    """Factorizations of one and of many matrices, and batches of small products."""
    calls: list[Call] = []
    for label, shape in (
        ("8 x 8", (8, 8)),
        ("16 x 16", (16, 16)),
        ("32 x 32", (32, 32)),
        ("64 x 64", (64, 64)),
        ("200 x 200", (200, 200)),
        ("1000 of 4 x 4", (1000, 4, 4)),
        ("1000 of 8 x 8", (1000, 8, 8)),
        ("1000 of 16 x 16", (1000, 16, 16)),
    ):
        a, b = definite(*shape), array(*shape[:-1], 1, seed=1)
        calls += [
            (f"slogdet, {label}", lambda s, a: s.np.linalg.slogdet(a)[1], [a], True),
            (f"inv, {label}", lambda s, a: s.np.linalg.inv(a), [a], True),
            (f"solve, {label}", lambda s, a, b: s.np.linalg.solve(a, b), [a, b], True),
            (f"cholesky, {label}", lambda s, a: s.np.linalg.cholesky(a), [a], True),
            (f"qr, {label}", lambda s, a: s.np.linalg.qr(a)[1], [a], True),
            (f"gradient of solve, {label}", gradient_of_solve, [a, b], False),
        ]
        if label == "16 x 16":
            calls.append((f"cho_solve, {label}", _cho_solve, [a, b], False))
        if len(shape) == 2:
            calls += [
                (f"eigh, {label}", lambda s, a: s.np.linalg.eigh(a)[0], [a], True),
                (f"svd, {label}", lambda s, a: s.np.linalg.svd(a)[1], [a], True),
            ]
    small, vectors = array(4096, 4, 4, scale=0.5), array(4096, 4, seed=1)
    for label, spec, operands in (
        ("4096 of 4 x 4 by 4 x 4", "nij,njk->nik", [small, small]),
        ("4096 of 4 x 4 by 4", "nij,nj->ni", [small, vectors]),
        ("4096 of 8 x 8 by 8", "nij,nj->ni", [array(4096, 8, 8), array(4096, 8, seed=1)]),
        ("4096 quadratic forms of 4 x 4", "ni,nij,nj->n", [vectors, small, vectors]),
        ("4096 inner products of 8", "nj,nj->n", [array(4096, 8), array(4096, 8, seed=1)]),
    ):
        calls.append((f"einsum, {label}", _einsum(spec), list(operands), True))
    cross = [array(100_000, 3), array(100_000, 3, seed=1)]
    calls.append(("cross, 1e+05", lambda s, a, b: s.np.cross(a, b), cross, True))
    many = array(100, 8, 8)
    calls.append(("singular values, 100 of 8 x 8",
                  lambda s, a: s.np.linalg.svd(a, compute_uv=False), [many], True))  # fmt: skip
    return cases_of("linalg", calls, 2e-3) + product_cases()


def _cho_solve(side: Side, a, b):
    linalg = side.top.scipy.linalg
    return linalg.cho_solve(linalg.cho_factor(a), b)


def product_cases() -> list[Case]:
    """Products of matrices that are not real: complex numbers and narrow integers."""
    narrow = lambda: integers(200, 512, 512).astype(numpy.int8)  # noqa: E731

    def wave() -> Any:
        return (normal(256, 256) + 1j * normal(256, 256, seed=1)).astype(numpy.complex64)

    calls: list[Call] = [
        ("int8, 512 x 512",
         lambda s, a: s.lax.dot(a, a, preferred_element_type=s.np.int32), [narrow], False),
        ("complex64, 256 x 256", lambda s, a: a @ a, [wave], True),
    ]  # fmt: skip
    return cases_of("products", calls, 2e-3)


def _einsum(spec: str) -> Callable[..., Any]:
    return lambda side, *operands: side.np.einsum(spec, *operands)


# ---- Fourier transforms ------------------------------------------------------------------------


def fourier_cases() -> list[Case]:
    """Powers of two, other sizes, primes; of real numbers, and in two dims."""
    calls: list[Call] = []
    for label, shape in (
        ("1024", (1024,)),
        ("65536", (65536,)),
        ("1000 rows of 1000", (1000, 1000)),
        ("1009 (a prime)", (1009,)),
        ("32 rows of 1009", (32, 1009)),
    ):
        calls += [
            (f"fft, {label}", lambda s, x: s.np.fft.fft(x), [array(*shape)], True),
            (f"rfft, {label}", lambda s, x: s.np.fft.rfft(x), [array(*shape)], True),
        ]
    plane = [array(512, 512)]
    calls.append(("fft2, 512 x 512", lambda s, x: s.np.fft.fft2(x), plane, True))
    return cases_of("fft", calls, 1e-3)


# ---- order, places, sums -----------------------------------------------------------------------


def order_cases() -> list[Case]:
    """Sorts, quantiles and searches; what is where."""
    x, rows, few = array(100_000), array(256, 1024), array(64, seed=1)
    whole = indices(1000, 100_000)
    calls: list[Call] = [
        ("median, 1e+05", lambda s, x: s.np.median(x), [x], True),
        ("median of rows, 256 x 1024", lambda s, x: s.np.median(x, axis=1), [rows], True),
        ("percentile, 1e+05", lambda s, x: s.np.percentile(x, 30), [x], True),
        ("sort of columns, 256 x 1024", lambda s, x: s.np.sort(x, axis=0), [rows], True),
        ("top_k, 8 of 1e+05", lambda s, x: s.lax.top_k(x, 8), [x], False),
        ("unique, 1000 of 1e+05", lambda s, x: s.np.unique(x, size=1000), [whole], False),
        ("searchsorted, 1e+05 in 64", lambda s, x, f: s.np.searchsorted(s.np.sort(f), x),
         [x, few], True),
        ("isin, 1e+05 in 64", lambda s, x, f: s.np.isin(x, f), [whole, indices(1000, 64)], True),
        ("nonzero, 1e+05", lambda s, x: s.np.nonzero(x > 1, size=20_000), [x], False),
        ("argwhere, 256 x 1024", lambda s, x: s.np.argwhere(x > 1, size=50_000), [rows], False),
        ("where, 256 x 1024", lambda s, x: s.np.where(x > 0, x, 0), [rows], True),
        ("histogram of 20 bins, 1e+05", lambda s, x: s.np.histogram(x, 20)[0], [x], True),
        ("interp, 1e+05 in 64", lambda s, x, f: s.np.interp(x, s.np.sort(f), f), [x, few], True),
    ]  # fmt: skip
    return cases_of("order", calls, 1e-3)


def place_cases() -> list[Case]:
    """Elements that are read or written where an array of integers says."""
    x, rows, places = array(100_000), array(256, 1024), indices(100_000, 100_000)
    classes, along = indices(50, 100_000), indices(1024, 256, 1024)
    calls: list[Call] = [
        ("take, 1e+05", lambda s, x, i: s.np.take(x, i), [x, places], True),
        ("take_along_axis, 256 x 1024", lambda s, x, i: s.np.take_along_axis(x, i, 1),
         [rows, along], True),
        ("at[].set, 1e+05", lambda s, x, i: x.at[i].set(x), [x, places], False),
        ("at[].add, 1e+05", lambda s, x, i: x.at[i].add(x), [x, places], False),
        ("at[].max, 1e+05", lambda s, x, i: x.at[i].max(x), [x, places], False),
        ("at[rows].add, 256 x 1024", lambda s, x: x.at[2:200, 2:].add(1.0), [rows], False),
        ("bincount, 1e+05 in 50", lambda s, c: s.np.bincount(c, length=50), [classes], False),
        ("one_hot, 1e+05 of 50", lambda s, c: s.nn.one_hot(c, 50), [classes], False),
        ("repeat of columns, 256 x 1024", lambda s, x: s.np.repeat(x, 2, axis=1), [rows], True),
        ("roll, 256 x 1024", lambda s, x: s.np.roll(x, (2, 3), (0, 1)), [rows], True),
    ]  # fmt: skip
    return cases_of("places", calls, 1e-3)


def running_cases() -> list[Case]:
    """Running reductions, differences, and convolutions of one dim."""
    x, rows, kernel = array(100_000), array(256, 1024, scale=0.1), array(65, seed=1)
    calls: list[Call] = [
        ("cumprod of rows, 256 x 1024", lambda s, x: s.np.cumprod(1 + x, axis=1), [rows], True),
        ("cummax, 1e+05", lambda s, x: s.lax.cummax(x), [x], False),
        ("diff, 1e+05", lambda s, x: s.np.diff(x), [x], True),
        ("associative_scan of sums, 1e+05", lambda s, x: s.lax.associative_scan(s.np.add, x), [x],
         False),
        ("convolve, 1e+05 by 65", lambda s, x, k: s.np.convolve(x, k), [x, kernel], True),
        ("correlate, 1e+05 by 65", lambda s, x, k: s.np.correlate(x, k), [x, kernel], True),
        ("lax.map of single numbers, 4096",
         lambda s, x: s.lax.map(lambda v: s.np.where(v > 0, v * v, -v), x), [array(4096)], False),
    ]  # fmt: skip
    return cases_of("running", calls, 2e-3)


# ---- random numbers, special functions ---------------------------------------------------------


def random_cases() -> list[Case]:
    """Draws of 1e5."""
    seed, size = indices(1000), (100_000,)
    draws: list[tuple[str, Callable[..., Any]]] = [
        ("bits", lambda s, key: s.random.bits(key, size)),
        ("randint", lambda s, key: s.random.randint(key, size, 0, 100)),
        ("bernoulli", lambda s, key: s.random.bernoulli(key, 0.3, size)),
        ("exponential", lambda s, key: s.random.exponential(key, size)),
        ("truncated_normal", lambda s, key: s.random.truncated_normal(key, -1, 1, size)),
        ("categorical of 8", lambda s, key: s.random.categorical(key, s.np.zeros((12_500, 8)))),
        ("permutation", lambda s, key: s.random.permutation(key, size[0])),
        ("choice", lambda s, key: s.random.choice(key, size[0], (25_000,))),
        ("split", lambda s, key: s.random.key_data(s.random.split(key, 12_500))),
    ]
    calls = [(f"{name}, 1e+05", _with_key(draw), [seed], False) for name, draw in draws]
    return cases_of("random", calls, 1e-3)


def _with_key(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda side, seed: draw(side, side.random.key(seed))


def special_cases() -> list[Case]:
    """Functions that are series and fractions, of few numbers and of many."""
    names = ("gammainc", "betainc", "expi", "zeta", "polygamma", "i0e", "ndtri", "gammaln")
    calls: list[Call] = []
    for size in (64, 100_000):
        for name in names:
            operands = [array(size)]
            calls.append((f"{name}, {size:.0e}", _special(name), operands, False))
    return cases_of("special", calls, 1e-3)


def _special(name: str) -> Callable[..., Any]:
    def call(side: Side, x: Any) -> Any:
        function, size = getattr(side.top.scipy.special, name), abs(x) + 0.1
        first = {
            "gammainc": (2.0,),
            "betainc": (2.0, 3.0),
            "polygamma": (1,),
        }.get(name, ())
        size = side.nn.sigmoid(x) if name in ("betainc", "ndtri") else size
        return function(size + 1, 1.0) if name == "zeta" else function(*first, size)

    return call


def function_cases() -> list[Case]:
    """Calls of NumPy's and SciPy's kind."""
    lists = (
        matrix_cases,
        fourier_cases,
        order_cases,
        place_cases,
        running_cases,
        random_cases,
        special_cases,
    )
    return [case for cases in lists for case in cases()]
