"""Passes of transforms: butterflies over points, each a vector of lanes.

The one idea: a point is two registers, the real and the imaginary parts of one element of several
transforms (the lanes), so that no butterfly moves anything between lanes. Passes go from one array
of points to another and put the results in order as they go (Stockham): pass by pass, `m` shrinks
from `size / radix` to one, and `s` grows from one. All are forward; a backward transform is one
whose real and imaginary parts are exchanged when they are read and when they are written.

Every pass is a function `SYMBOL(source, target, m, s, roots)` of a module of its own, which all
sizes share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from spmd.base.record import record
from spmd.compile.native.llvm.function_builder import Function, Value
from spmd.compile.native.llvm.vectors import Vectors, splat, vectors

SIGNATURE = ("ptr", "ptr", "i64", "i64", "ptr")


@record
class Number:
    """A complex number in each lane."""

    real: Value
    imag: Value


class Arithmetic:
    """Operations on vectors; products and sums may become one instruction."""

    def __init__(self, f: Function, v: Vectors):
        self.f = f
        self.v = v

    def _binary(self, op: str, a: Value, b: Value) -> Value:
        return self.f.emit(a.type, f"{op} contract {a.type} {a.text}, {b.text}")

    def add(self, a: Value, b: Value) -> Value:
        """a + b"""
        return self._binary("fadd", a, b)

    def sub(self, a: Value, b: Value) -> Value:
        """a - b"""
        return self._binary("fsub", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """a * b"""
        return self._binary("fmul", a, b)

    def neg(self, a: Value) -> Value:
        """-a"""
        return self.f.emit(a.type, f"fneg {a.type} {a.text}")

    def constant(self, number: float) -> Value:
        """A number in all lanes."""
        return self.f.value(self.v.vector, number)

    # ---- complex ----

    def plus(self, a: Number, b: Number) -> Number:
        """a + b"""
        return Number(self.add(a.real, b.real), self.add(a.imag, b.imag))

    def minus(self, a: Number, b: Number) -> Number:
        """a - b"""
        return Number(self.sub(a.real, b.real), self.sub(a.imag, b.imag))

    def times(self, a: Number, b: Number) -> Number:
        """a * b"""
        real = self.sub(self.mul(a.real, b.real), self.mul(a.imag, b.imag))
        return Number(real, self.add(self.mul(a.real, b.imag), self.mul(a.imag, b.real)))

    def down(self, a: Number) -> Number:
        """-i a"""
        return Number(a.imag, self.neg(a.real))

    # ---- memory: a point's real parts, then its imaginary parts ----

    def point(self, array: Value, number: Value) -> Value:
        """The place of a point."""
        return self.f.at(array, number * (2 * self.v.nbytes_of_vector))

    def load(self, place: Value) -> Number:
        """A point."""
        f, v = self.f, self.v
        width = v.nbytes_of_vector
        return Number(*(f.load(v.vector, place, k * width, align=width) for k in range(2)))

    def store(self, number: Number, place: Value) -> None:
        """Write a point."""
        width = self.v.nbytes_of_vector
        self.f.store(number.real, place, align=width)
        self.f.store(number.imag, place, width, align=width)

    def root(self, roots: Value, offset: Value) -> Number:
        """A number of memory in all lanes."""
        f, v = self.f, self.v
        place = f.at(roots, offset)
        parts = (f.load(v.element, place, k * v.nbytes, align=v.nbytes) for k in range(2))
        return Number(*(splat(f, part, v.lanes) for part in parts))


# ---- butterflies -------------------------------------------------------------------------------


def transformed(a: Arithmetic, x: Sequence[Number]) -> list[Number]:
    """The transform of as many numbers as a radix."""
    match len(x):
        case 1:
            return list(x)
        case 2:
            return [a.plus(*x), a.minus(*x)]
        case 4:
            even, odd = transformed(a, x[::2]), transformed(a, x[1::2])
            turned = [odd[0], a.down(odd[1])]
        case 8:
            even, odd = transformed(a, x[::2]), transformed(a, x[1::2])
            half = a.constant(math.sqrt(0.5))
            # (1 - i) / sqrt(2) and (-1 - i) / sqrt(2) are one sum, one difference, two products.
            one = Number(a.add(odd[1].real, odd[1].imag), a.sub(odd[1].imag, odd[1].real))
            three = Number(a.sub(odd[3].imag, odd[3].real), a.add(odd[3].imag, odd[3].real))
            turned = [
                odd[0],
                Number(a.mul(one.real, half), a.mul(one.imag, half)),
                a.down(odd[2]),
                Number(a.mul(three.real, half), a.neg(a.mul(three.imag, half))),
            ]
        case _:
            return _odd(a, x)
    sums = [a.plus(*pair) for pair in zip(even, turned, strict=True)]
    return sums + [a.minus(*pair) for pair in zip(even, turned, strict=True)]


def _odd(a: Arithmetic, x: Sequence[Number]) -> list[Number]:
    """Of an odd size: numbers at equal distances from the first share cosines and sines."""
    size = len(x)
    half = (size - 1) // 2
    sums = [a.plus(x[j], x[size - j]) for j in range(1, half + 1)]
    differences = [a.minus(x[j], x[size - j]) for j in range(1, half + 1)]
    first = x[0]
    for number in sums:
        first = a.plus(first, number)
    found = [first] + [first] * (size - 1)
    for k in range(1, half + 1):
        angles = [2 * math.pi * (j * k % size) / size for j in range(1, half + 1)]
        cosines, sines = ([a.constant(f(x)) for x in angles] for f in (math.cos, math.sin))
        even = [x[0].real, x[0].imag]
        odd: list[Value] = []
        for j in range(half):
            parts = sums[j].real, sums[j].imag
            even = [a.add(e, a.mul(p, cosines[j])) for e, p in zip(even, parts, strict=True)]
            terms = [a.mul(p, sines[j]) for p in (differences[j].real, differences[j].imag)]
            odd = [a.add(o, t) for o, t in zip(odd, terms, strict=True)] if odd else terms
        # even - i odd, and its mirror image.
        found[k] = Number(a.add(even[0], odd[1]), a.sub(even[1], odd[0]))
        found[size - k] = Number(a.sub(even[0], odd[1]), a.add(even[1], odd[0]))
    return found


# ---- passes ------------------------------------------------------------------------------------


def pass_symbol(v: Vectors, radix: int, turns: bool) -> str:
    """The name of a pass."""
    return f"fourier_pass_{v.symbol}_{radix}{'_turns' if turns else ''}"


@cache
def pass_text(dtype: str, width: int, radix: int, turns: bool) -> str:
    """The module of one pass: `m` groups of `s` butterflies.

    Butterfly q of group p reads points `q + s * (p + m * j)` and writes `q + s * (radix * p + k)`.
    If it `turns`, result k > 0 is multiplied by number `(radix - 1) * p + k - 1` of the roots.
    """
    v = vectors(dtype, width)
    f = Function(pass_symbol(v, radix, turns), "void", SIGNATURE, attributes=v.attributes)
    source, target, m, s, roots = f.params
    a = Arithmetic(f, v)
    distance = m * s
    with f.range(0, m) as p:
        first, group = p * s, p * s * radix
        row = f.at(roots, p * (2 * (radix - 1) * v.nbytes)) if turns else roots
        with f.range(0, s) as q:
            x = [a.load(a.point(source, q + first + distance * j)) for j in range(radix)]
            made = transformed(a, x)
            for k, number in enumerate(made):
                if turns and k:
                    offset = f.value("i64", 2 * (k - 1) * v.nbytes)
                    number = a.times(number, a.root(row, offset))
                a.store(number, a.point(target, q + group + s * k))
    return f.text()


# ---- real arrays -------------------------------------------------------------------------------


def real_symbol(v: Vectors, kind: str) -> str:
    """The name of the pass that ends or begins a transform of a real array."""
    return f"fourier_{kind}_{v.symbol}"


@cache
def real_text(dtype: str, width: int, kind: str) -> str:
    """The module of the pass between `m` complex numbers, two reals each, and m + 1 frequencies.

    With Z of the pairs, W[k] = conj Z[m - k] and r root k of 2 m, frequency k is
    `(Z[k] + W[k]) / 2 - i r (Z[k] - W[k]) / 2`. The way back is its inverse, times two, with real
    and imaginary parts exchanged, as the passes behind it want them.
    """
    v = vectors(dtype, width)
    f = Function(real_symbol(v, kind), "void", SIGNATURE, attributes=v.attributes)
    source, target, m, _, roots = f.params
    a = Arithmetic(f, v)
    half = a.constant(0.5)
    with f.range(0, (m // 2) + 1) as k:
        mirror = m - k
        z = a.load(a.point(source, k))
        if kind == "from_real":
            w = a.load(a.point(source, f.select(k.equals(0), f.value("i64", 0), mirror)))
        else:
            w = a.load(a.point(source, mirror))
            # The first and the last frequency of a real array are real, whatever is given.
            zero, outermost = a.constant(0.0), k.equals(0)
            z, w = (Number(x.real, f.select(outermost, zero, x.imag)) for x in (z, w))
        even = Number(a.add(z.real, w.real), a.sub(z.imag, w.imag))
        odd = Number(a.sub(z.real, w.real), a.add(z.imag, w.imag))
        root = a.root(roots, k * (2 * v.nbytes))
        if kind == "from_real":
            # -i root odd, of which the mirror image has the conjugate with the other sign.
            turned = a.down(a.times(odd, root))
            ends = (
                Number(a.add(even.real, turned.real), a.add(even.imag, turned.imag)),
                Number(a.sub(even.real, turned.real), a.sub(turned.imag, even.imag)),
            )
            for number, place in zip(ends, (k, mirror), strict=True):
                halved = Number(a.mul(number.real, half), a.mul(number.imag, half))
                a.store(halved, a.point(target, place))
        else:
            # i conj(root) odd
            conjugate = Number(root.real, a.neg(root.imag))
            t = a.times(odd, conjugate)
            turned = Number(a.neg(t.imag), t.real)
            back = Number(a.add(even.real, turned.real), a.add(even.imag, turned.imag))
            other = Number(a.sub(even.real, turned.real), a.sub(turned.imag, even.imag))
            # Point m is one past the last: it is written and never read.
            a.store(Number(other.imag, other.real), a.point(target, mirror))
            a.store(Number(back.imag, back.real), a.point(target, k))
    return f.text()
