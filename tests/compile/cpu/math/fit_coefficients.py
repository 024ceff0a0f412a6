"""Fit the polynomials of `spmd/compile/cpu/coefficients*.py` again: minimax, in 45 digits.

    python tests/compile/cpu/math/fit_coefficients.py [NAME ...]

prints each table with its largest weighted error. Remez' exchange on a grid finds the least
maximum; then the coefficients are rounded to the element type one by one, lowest power first, and
what is free is fitted anew each time (where the interval has both signs, all are rounded at once:
without the constant term the powers are no Chebyshev system there).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp
import numpy as np

mp.mp.dps = 45
POINTS = 300
TINY = mp.mpf(10) ** -8
Function = Callable[[mp.mpf], mp.mpf]


@dataclass(frozen=True)
class Fit:
    """A function, its error's weight, the interval, the number of terms, bits of coefficients."""

    function: Function
    low: mp.mpf
    high: mp.mpf
    terms: int
    bits: int
    weight: Function | None = None


def odd(f: Function, top: float, terms: int, bits: int) -> Fit:
    """f(x) = x + x z P(z) with z = x*x up to `top`; the error is relative to f."""

    def tail(z: mp.mpf) -> mp.mpf:
        x = mp.sqrt(z)
        return (f(x) / x - 1) / z

    return Fit(tail, TINY, mp.mpf(top), terms, bits, lambda z: z * mp.sqrt(z) / f(mp.sqrt(z)))


def minimax(fit: Fit, fixed: dict[int, mp.mpf]) -> tuple[dict[int, mp.mpf], mp.mpf]:
    """Return the best coefficients beside the fixed ones, and the largest weighted error."""
    weight = fit.weight or (lambda x: 1 / fit.function(x))
    middle, half = (fit.low + fit.high) / 2, (fit.high - fit.low) / 2
    grid = [middle - half * mp.cos(mp.pi * k / (POINTS - 1)) for k in range(POINTS)]
    weights = [weight(x) for x in grid]
    target = [fit.function(x) - sum(c * x**k for k, c in fixed.items()) for x in grid]
    free = [k for k in range(fit.terms) if k not in fixed]
    if not free:
        return {}, max(abs(w * t) for w, t in zip(weights, target, strict=True))
    count = len(free) + 1
    places = [round((POINTS - 1) * (1 - np.cos(np.pi * k / (count - 1))) / 2) for k in range(count)]
    best: tuple[dict[int, mp.mpf], mp.mpf] = ({}, mp.inf)
    for _ in range(12):
        matrix, right = mp.matrix(count, count), mp.matrix(count, 1)
        for row, place in enumerate(places):
            for column, k in enumerate(free):
                matrix[row, column] = grid[place] ** k * weights[place]
            matrix[row, count - 1] = (-1) ** row
            right[row] = target[place] * weights[place]
        solution = mp.lu_solve(matrix, right)
        found = {k: solution[column] for column, k in enumerate(free)}
        errors = [
            w * (t - sum(c * x**k for k, c in found.items()))
            for w, t, x in zip(weights, target, grid, strict=True)
        ]
        worst = max(map(abs, errors))
        best = min(best, (found, worst), key=lambda each: each[1])
        places = _alternation(errors, count)
        if worst <= abs(solution[count - 1]) * 1.01 or len(places) < count:
            break
    return best


def _alternation(errors: list[mp.mpf], count: int) -> list[int]:
    """Return `count` places of extreme errors with alternating signs."""
    places: list[int] = []
    for place, error in enumerate(errors):
        if places and (error > 0) == (errors[places[-1]] > 0):
            if abs(error) > abs(errors[places[-1]]):
                places[-1] = place
        else:
            places.append(place)
    while len(places) > count:
        if len(places) == count + 1:
            places.pop(0 if abs(errors[places[0]]) < abs(errors[places[-1]]) else -1)
        else:
            sizes = [max(abs(errors[a]), abs(errors[b])) for a, b in itertools.pairwise(places)]
            least = sizes.index(min(sizes))
            del places[least : least + 2]
    return places


def rounded(fit: Fit) -> tuple[list[mp.mpf], mp.mpf]:
    """Return coefficients of the element type, highest power first, and their largest error."""
    narrow = (lambda c: mp.mpf(float(np.float32(float(c))))) if fit.bits == 32 else mp.mpf
    fixed: dict[int, mp.mpf] = {}
    if fit.low < 0:
        found, _ = minimax(fit, {})
        fixed = {k: mp.mpf(float(c)) for k, c in found.items()}
    for k in range(fit.terms):
        if k not in fixed:
            fixed[k] = narrow(float(minimax(fit, fixed)[0][k]))
    return [fixed[k] for k in reversed(range(fit.terms))], minimax(fit, fixed)[1]


# ---- pieces -------------------------------------------------------------------------------------


def nearly_float(f: Function, low: float, high: float) -> tuple[np.float32, np.float32]:
    """Return a float32 near the middle of an interval whose image nearly is one, and that."""
    middle = np.float32((low + high) / 2)
    steps = min(20_000, int((high - low) / 4 / np.spacing(middle)))
    near = (middle.view(np.uint32) + np.arange(-steps, steps)).astype(np.uint32).view(np.float32)
    exact = f(near.astype(np.longdouble))
    image = exact.astype(np.float32)
    off = np.abs(exact - image) / np.spacing(image)
    far = np.abs(near.astype(float) - middle) / (high - low)
    best = np.argmin(np.where(off > 2**-9, off, 0) * 1e3 + far * 1e-3)
    return near[best], image[best]


def piece(f: Function, low: float, high: float, centre: np.longdouble, known: list) -> list:
    """Six coefficients, lowest first, of which some are known: rounded one by one, lowest first.

    Least squares of the relative error at Chebyshev's points, iterated towards the least maximum.
    """
    count = 400
    x = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(count) + 0.5) / count)
    exact = f(x.astype(np.longdouble))
    u = (x - centre).astype(np.longdouble)
    while len(known) < 6:
        powers = np.stack([u**k / exact for k in range(len(known), 6)], 1).astype(float)
        so_far = sum(np.longdouble(c) * u**k for k, c in enumerate(known))
        wanted = ((exact - so_far) / exact).astype(float)
        weights = np.ones(count)
        for _ in range(30):
            free = np.linalg.lstsq(powers * weights[:, None], wanted * weights, rcond=None)[0]
            error = np.abs(powers @ free - wanted)
            weights = np.maximum(weights * (0.5 + 0.5 * error / error.max()), 1e-3)
            weights /= weights.max()
        known = [*known, np.float32(free[0])]
    return known


def pieces(f: Function, least: float, most: float) -> list[list[float]]:
    """The rows of `coefficients_piecewise.py` for a function with f(0) = 0 and f'(0) = 1."""
    zero, one = np.float32(0), np.float32(1)
    rows = [[0.0, *piece(f, 0.0, least, np.longdouble(0), [zero, one])]]
    low = least
    while low < most:
        high = min(low + 2.0 ** (np.frexp(low)[1] - 3), most)
        centre, image = nearly_float(f, low, high)
        rows.append([centre, *piece(f, low, high, np.longdouble(centre), [image])])
        low = high
    return rows


# ---- the functions ------------------------------------------------------------------------------


def erfc_scaled(c: int, top: float, terms: int) -> Fit:
    """(t + c) e**(t*t) erfc(t) in (t - c) / (t + c)."""

    def f(q: mp.mpf) -> mp.mpf:
        t = c * (1 + q) / (1 - q)
        return (t + c) * mp.exp(t * t) * mp.erfc(t)

    return Fit(f, TINY - 1, mp.mpf((top - c) / (top + c)), terms, 64)


def erf_inv_ratio(w: mp.mpf) -> mp.mpf:
    """erf_inv(x) / x with w = -log(1 - x*x), by Newton's steps on log(erfc)."""
    x = mp.sqrt(-mp.expm1(-w))
    wanted = mp.log(mp.exp(-w) / (1 + x))
    y = mp.erfinv(x) if w < 2 else mp.sqrt(w - mp.log(mp.pi * w) / 2)
    for _ in range(60):
        tail = mp.erfc(y)
        step = (mp.log(tail) - wanted) * tail * mp.sqrt(mp.pi) / 2 * mp.exp(y * y)
        y += step
        if abs(step) < mp.mpf(10) ** -30 * y:
            break
    return y / x


def erf_tail(z: mp.mpf) -> mp.mpf:
    return mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1


def log_tail(f: mp.mpf) -> mp.mpf:
    return (mp.log1p(f) - f + f * f / 2) / f**3


ROOT = mp.findroot(mp.digamma, 1.46163)
HALF = mp.mpf(1) / 2
FITS = {
    "TANH_SMALL 32": odd(mp.tanh, 0.3136, 5, 32),
    "TANH_SMALL 64": odd(mp.tanh, 0.3136, 11, 64),
    "SINH_SMALL 32": odd(mp.sinh, 1.01, 4, 32),
    "SINH_SMALL 64": odd(mp.sinh, 1.01, 7, 64),
    "TAN_POLY 32": odd(mp.tan, 0.6172, 7, 32),
    "TAN_POLY 64": odd(mp.tan, 0.6172, 15, 64),
    "ASIN_POLY 32": odd(mp.asin, 0.25, 6, 32),
    "ASIN_POLY 64": odd(mp.asin, 0.25, 13, 64),
    "ATAN_POLY 32": odd(mp.atan, 1.0, 9, 32),
    "ATAN_POLY 64": odd(mp.atan, 0.17159, 12, 64),
    "CBRT_START": Fit(lambda x: x ** (-mp.mpf(1) / 3), mp.mpf(1), mp.mpf(2), 5, 32),
    "LOG_WIDE_32": Fit(
        log_tail, mp.sqrt(HALF) - 1, mp.sqrt(2) - 1, 11, 64, lambda f: f**3 / mp.log1p(f)
    ),
    "ERF_SMALL_64": Fit(
        erf_tail, TINY, mp.mpf(1), 13, 64, lambda z: mp.sqrt(z) / mp.erf(mp.sqrt(z))
    ),
    "ERFC_POLY 32": erfc_scaled(2, 10.07, 12),
    "ERFC_POLY 64": erfc_scaled(4, 27.3, 23),
    "ERF_INV_32 centre": Fit(
        lambda w: erf_inv_ratio(w + mp.mpf("2.5")), mp.mpf("-2.499999"), mp.mpf("2.51"), 13, 64
    ),
    "ERF_INV_32 tail": Fit(
        lambda s: erf_inv_ratio((s + 3) ** 2), mp.sqrt(5) - mp.mpf("3.001"), mp.mpf("1.1"), 11, 64
    ),
    "LGAMMA_AT_TWO": Fit(lambda z: mp.loggamma(2 + z).real / z, -HALF, HALF, 19, 64),
    "DIGAMMA_CENTRE": Fit(lambda u: mp.digamma(u + 1.5) / (u + 1.5 - ROOT), -HALF, HALF, 22, 64),
}


PIECES = {"TANH_PIECES": lambda: pieces(np.tanh, 0.0625, 10.0)}


if __name__ == "__main__":
    wanted = sys.argv[1:] or [*PIECES, *FITS]
    for name in [name for name in wanted if name in PIECES]:
        print(name)
        for row in PIECES[name]():
            print("        (" + ", ".join(f"{float(number):.9g}" for number in row) + "),")
    for name in [name for name in wanted if name in FITS]:
        coefficients, error = rounded(FITS[name])
        print(f"{name}: largest error {mp.nstr(error, 3)}, {mp.nstr(mp.log(error, 2), 4)} bits")
        for coefficient in coefficients:
            digits = ".9g" if FITS[name].bits == 32 else ".17g"
            print(f"    {float(coefficient):{digits}},")
