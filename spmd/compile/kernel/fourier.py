"""Transforms: the description of discrete Fourier transforms along one dim, many at a time.

The one idea: a transform reads elements at one distance and writes them at another, and beside it
stand others that do the same (*lanes*), so that layouts are only strides. A long transform is two
steps of short ones: one over elements that are far apart, whose results are turned (`turned`), and
one over elements that lie together, which writes them far apart. Two neighbouring reals are read as
one complex number: a real array of an even size is transformed as a complex one of half the size.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from spmd.base.record import record
from spmd.compile.kernel.dtypes import DTYPES

COMPLEX, FROM_REAL, TO_REAL = "complex", "from_real", "to_real"

# Primes up to this one have a pass; other sizes have no transform of this kind.
LARGEST_PRIME = 13


@record
class Along:
    """A number of places with their distance in the operand and in the result.

    Distances count complex numbers.
    """

    count: int
    operand: int
    result: int


@record
class Transform:
    """Transforms of `size` complex numbers, `lanes.count` of them for each of `outer.count`.

    `points` are (distance in operand, distance in result). `kind` says what a transform reads and
    writes: COMPLEX `size` numbers and `size`; FROM_REAL 2 * size reals and size + 1 frequencies;
    TO_REAL the other way round. With `turned` frequency k of lane j is multiplied by root number
    j * k of `size * lanes.count`; COMPLEX only. Nothing is divided: results are times `scale`.
    """

    dtype: str  # of the real parts: "f32" or "f64"
    size: int
    kind: str
    inverse: bool
    scale: float
    outer: Along
    lanes: Along
    points: tuple[int, int]
    turned: bool = False

    @property
    def points_read(self) -> int:
        """Complex numbers that a transform reads."""
        return self.size + (self.kind == TO_REAL)

    @property
    def points_written(self) -> int:
        """Complex numbers that a transform writes."""
        return self.size + (self.kind == FROM_REAL)

    @property
    def count(self) -> int:
        """The number of transforms."""
        return self.outer.count * self.lanes.count


@record
class Pass:
    """One pass over the points: `m` groups of `s` butterflies of a radix, or a real array's pass.

    Its roots begin at number `roots` of those of the transform.
    """

    radix: int  # 0 for the pass of a real array
    m: int
    s: int
    roots: int

    @property
    def turns(self) -> bool:
        """Whether its results are multiplied by roots."""
        return self.m > 1


@cache
def passes_of(transform: Transform) -> tuple[Pass, ...]:
    """The passes of a transform, in their order."""
    t, found, at = transform, [], 1
    if t.kind == TO_REAL:
        found.append(Pass(0, t.size, 1, at))
        at += t.size // 2 + 1
    s, m = 1, t.size
    for radix in radices_of(t.size):
        m //= radix
        found.append(Pass(radix, m, s, at))
        at += m * (radix - 1) if m > 1 else 0
        s *= radix
    if t.kind == FROM_REAL:
        found.append(Pass(0, t.size, 1, at))
    return tuple(found)


def roots_of(transform: Transform) -> np.ndarray:
    """The numbers that a transform's code reads: the scale, then the roots of each pass.

    Those of `turned` results come last: the real parts of each frequency of each lane, then the
    imaginary parts. Passes are forward ones: a backward transform exchanges the parts around them.
    """
    t = transform
    parts = [np.array([t.scale + 0j])]
    for one in passes_of(t):
        if one.radix == 0:
            parts.append(roots(np.arange(t.size // 2 + 1), 2 * t.size))
        elif one.turns:
            turns = np.arange(one.m)[:, None] * np.arange(1, one.radix)
            parts.append(roots(turns, one.m * one.radix).ravel())
    dtype = DTYPES[t.dtype].numpy
    table = np.concatenate(parts).view(np.float64)
    if t.turned:
        turns = roots(np.arange(t.size)[:, None] * np.arange(t.lanes.count), t.size * t.lanes.count)
        turns = np.conj(turns) if t.inverse else turns
        table = np.concatenate([table, np.real(turns).ravel(), np.imag(turns).ravel()])
    return table.astype(dtype)


def turns_at(transform: Transform) -> int:
    """The number of the first real number in `roots_of` that belongs to `turned` results."""
    counts = [
        one.m * (one.radix - 1) if one.turns else 0 for one in passes_of(transform) if one.radix
    ]
    return 2 * (1 + sum(counts))


def radices_of(size: int) -> list[int]:
    """The radices of the passes: primes, and eights and fours of the twos, which come last."""
    primes = factors_of(size)
    twos = primes.count(2)
    odd = [prime for prime in reversed(primes) if prime > 2]
    # Two fours instead of a two and an eight.
    fours = {0: 0, 1: 2 if twos > 1 else 0, 2: 1}[twos % 3]
    alone = [2] * (twos == 1)
    return [*odd, *alone, *[4] * fours, *[8] * ((twos - 2 * fours) // 3)]


def factors_of(size: int) -> list[int]:
    """The prime factors of a size, the smallest first."""
    found, prime = [], 2
    while size > 1:
        while size % prime == 0:
            found.append(prime)
            size //= prime
        prime += 1
        if prime * prime > size > 1:
            found.append(size)
            break
    return found


def roots(turns: np.ndarray, size: int) -> np.ndarray:
    """The roots of unity `exp(-2 pi i turns / size)`, to the last digit of float64.

    Angles are taken from the nearest axis, where sines and cosines are exact.
    """
    eighths = np.asarray(turns, np.int64) % size * 8
    octant = eighths // size
    rest = eighths - octant * size  # of an octant, in parts of `size`
    odd = octant % 2 == 1
    angle = np.where(odd, size - rest, rest) * (np.pi / (4 * size))
    sine, cosine = np.sin(angle), np.cos(angle)
    # In odd octants the angle is counted back from the next axis.
    quarter = (octant + 1) // 2 % 4
    sine = np.where(odd, -sine, sine)
    real = np.choose(quarter, [cosine, -sine, -cosine, sine])
    imag = np.choose(quarter, [sine, cosine, -sine, -cosine])
    return real - 1j * imag


def evaluate(transform: Transform, operand: np.ndarray, result: np.ndarray) -> None:
    """The meaning of a transform over flat complex arrays, in complex128."""
    t = transform
    places = [np.arange(a.count) for a in (t.outer, t.lanes)]
    first = [
        places[0][:, None, None] * a + places[1][:, None] * b
        for a, b in ((t.outer.operand, t.lanes.operand), (t.outer.result, t.lanes.result))
    ]
    read = operand[first[0] + np.arange(t.points_read) * t.points[0]].astype(np.complex128)
    if t.kind == FROM_REAL:
        made = np.fft.rfft(read.view(np.float64))
    elif t.kind == TO_REAL:
        made = np.fft.irfft(read, 2 * t.size).view(np.complex128) * (2 * t.size)
    else:
        made = np.fft.ifft(read) * t.size if t.inverse else np.fft.fft(read)
    if t.turned:
        angles = places[1][:, None] * np.arange(t.size)
        turns = roots(angles, t.size * t.lanes.count)
        made *= np.conj(turns) if t.inverse else turns
    result[first[1] + np.arange(t.points_written) * t.points[1]] = made * t.scale
