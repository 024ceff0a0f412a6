"""The rule for discrete Fourier transforms: one dim after the other, as strides say.

A long transform with few others beside it is two steps of short ones, so that the vectors of each
are full and its points stay in a cache; a real array is then turned into pairs by a kernel of its
own. Short transforms of sizes with a large prime factor stay with NumPy.
"""

from __future__ import annotations

import math

import numpy as np

from spmd.compile.expressions.scalar_ops import storage_dtype
from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.fourier import (
    COMPLEX,
    FROM_REAL,
    LARGEST_PRIME,
    TO_REAL,
    Along,
    Transform,
    factors_of,
    roots,
    roots_of,
)
from spmd.compile.lower.kernels import launch
from spmd.compile.lower.lowering import Lowering, host, rule
from spmd.compile.lower.steps import Fourier, Launch, Ref
from spmd.core.aval import ShapedArray
from spmd.core.ir import Eqn
from spmd.lax.fft import FftType

# From here on a transform without fifteen others beside it is two steps.
_FEW, _SPLIT_FROM = 16, 256
# Points of a transform in one step: two arrays of them, two registers each, stay in the L2 cache.
_MOST_POINTS = 4096

_PARTS = {"c64": "f32", "c128": "f64"}


@rule("fft")
def fft(lowering: Lowering, eqn: Eqn) -> None:
    """A transform along each of the last dims: along the last one first, backward to reals last."""
    lengths = eqn.params["fft_lengths"]
    if any(max(factors_of(n), default=1) > LARGEST_PRIME for n in lengths):
        host(lowering, eqn)
        return
    _Fft(lowering, eqn).write()


class _Fft:
    """One equation on its way to steps."""

    def __init__(self, lowering: Lowering, eqn: Eqn):
        self.lowering = lowering
        self.eqn = eqn
        self.kind: FftType = eqn.params["fft_type"]
        self.lengths: tuple[int, ...] = eqn.params["fft_lengths"]
        operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
        self.wide = out.dtype if self.kind is not FftType.IRFFT else operand.dtype
        name = storage_dtype(self.wide)
        assert name is not None
        self.complex, self.dtype = name, _PARTS[name]
        self.inverse = self.kind in (FftType.IFFT, FftType.IRFFT)

    def write(self) -> None:
        """All steps."""
        lowering, eqn = self.lowering, self.eqn
        here, target = lowering.ref(eqn.invars[0]), lowering.place(eqn.outvars[0])
        shape = list(eqn.invars[0].aval.shape)
        last = len(shape) - 1
        dims = list(range(last, last - len(self.lengths), -1))
        if self.kind is FftType.IRFFT:
            dims = [*dims[1:], last]
        for number, dim in enumerate(dims):
            is_real = dim == last and self.kind in (FftType.RFFT, FftType.IRFFT)
            size = self.lengths[dim - last - 1]
            after = list(shape)
            if is_real:
                after[dim] = size // 2 + 1 if self.kind is FftType.RFFT else size
            if number == len(dims) - 1:
                there = target
            elif number == 0 or is_real:
                there = self.temp(tuple(after))
            else:
                there = here  # its results are read before they are written over
            if is_real:
                self.real(here, there, math.prod(shape[:-1]), size)
            else:
                self.along(here, there, shape, dim)
            here, shape = there, after

    # ---- steps ----

    def temp(self, shape: tuple[int, ...]) -> Ref:
        """Memory for complex numbers."""
        return self.lowering.temp(ShapedArray(shape, self.wide))

    def step(self, transform: Transform, operand: Ref, result: Ref) -> None:
        """A transform with its roots."""
        table = roots_of(transform)
        at = self.lowering.const(table, ShapedArray(table.shape, table.dtype))
        refs = (operand, at, result)
        self.lowering.steps.append(Fourier(transform, refs, "fft", self.eqn.source))

    def along(self, operand: Ref, result: Ref, shape: list[int], dim: int) -> None:
        """The complex transform along one dim."""
        size, inner = shape[dim], math.prod(shape[dim + 1 :])
        outer = math.prod(shape[:dim])
        scale = 1 / size if self.inverse else 1.0
        if inner == 1:
            self.rows(operand, result, outer, size, scale)
            return
        whole, lanes = Along(outer, size * inner, size * inner), Along(inner, 1, 1)
        made = Transform(
            self.dtype, size, COMPLEX, self.inverse, scale, whole, lanes, (inner, inner)
        )
        self.step(made, operand, result)

    def rows(self, operand: Ref, result: Ref, rows: int, size: int, scale: float) -> None:
        """The complex transforms of rows."""
        dtype, inverse = self.dtype, self.inverse
        first = _split(rows, size)
        if first == 1:
            lanes = Along(rows, size, size)
            made = Transform(dtype, size, COMPLEX, inverse, scale, _ONE, lanes, (1, 1))
            self.step(made, operand, result)
            return
        # Element `second * i + j` goes to frequency `k + first * l`: over i, then over j.
        second = size // first
        whole, middle = Along(rows, size, size), self.temp((rows, size))
        lanes, points = Along(second, 1, 1), (second, second)
        made = Transform(dtype, first, COMPLEX, inverse, 1.0, whole, lanes, points, turned=True)
        self.step(made, operand, middle)
        lanes, points = Along(first, second, 1), (1, first)
        made = Transform(dtype, second, COMPLEX, inverse, scale, whole, lanes, points)
        self.step(made, middle, result)

    def real(self, operand: Ref, result: Ref, rows: int, size: int) -> None:
        """The transforms of rows of reals, or back to them."""
        half, found = size // 2, size // 2 + 1
        forward = self.kind is FftType.RFFT
        if size % 2:
            self.odd(operand, result, rows, size)
        elif _split(rows, half) == 1:
            kind = FROM_REAL if forward else TO_REAL
            lanes = Along(rows, half, found) if forward else Along(rows, found, half)
            scale = 1.0 if forward else 1 / size
            made = Transform(self.dtype, half, kind, not forward, scale, _ONE, lanes, (1, 1))
            self.step(made, operand, result)
        elif forward:
            middle = self.temp((rows, half))
            self.rows(operand, middle, rows, half, 1.0)
            self.pairs(middle, result, rows, half)
        else:
            middle = self.temp((rows, half))
            self.pairs(operand, middle, rows, half)
            self.rows(middle, result, rows, half, 1 / size)

    # ---- kernels ----

    def launch(self, builder: Builder, refs: tuple[Ref, ...]) -> None:
        """Run a kernel."""
        launch(self.lowering, Launch(builder.build(), refs, "fft", self.eqn.source))

    def pairs(self, operand: Ref, result: Ref, rows: int, half: int) -> None:
        """Between the transform of pairs of reals and the frequencies of the reals.

        Forward `(Z[k] + conj Z[half - k]) / 2 - i r (Z[k] - conj Z[half - k]) / 2`, where Z[half]
        is Z[0] and r is root k; backward the inverse, times two.
        """
        forward = self.kind is FftType.RFFT
        read, written = (half, half + 1) if forward else (half + 1, half)
        factors = roots(np.arange(half + 1), 2 * half)
        factors = -0.5j * factors if forward else 1j * np.conj(factors)
        table = factors.astype(self.wide)
        at = self.lowering.const(table, ShapedArray(table.shape, table.dtype))
        # Ranges of k with the places that they read: the first and last ones read the ends.
        ranges = [(0, 1, (0, 0), (0 if forward else half, 0))]
        ranges += [(1, half - 1, (1, 1), (half - 1, -1))] if half > 1 else []
        ranges += [(half, 1, (0, 0), (0, 0))] if forward else []
        for first, count, here, there in ranges:
            b = Builder((rows, count), ())
            args = [b.arg(self.complex, rows * read), b.arg(self.complex, half + 1)]
            target = b.arg(self.complex, rows * written, "out")
            with b.row():
                z = b.load(args[0], [read, here[1]], here[0])
                w = b.load(args[0], [read, there[1]], there[0])
                if not forward and first == 0:
                    z, w = (self.number(b, b.op("real", x), None) for x in (z, w))
                w = b.op("conj", w)
                factor = b.load(args[1], [0, 1], first)
                turned = b.op("mul", b.op("sub", z, w), factor)
                even = b.op("add", z, w)
                if forward:
                    even = b.op("mul", even, b.const(0.5, self.complex))
                b.store(target, [written, 1], b.op("add", even, turned), first)
            self.launch(b, (operand, at, result))

    def number(self, b: Builder, real: int, imag: int | None) -> int:
        """A complex number in a kernel."""
        zero = b.const(0, self.dtype)
        return b.op("complex", real, zero if imag is None else imag)

    def odd(self, operand: Ref, result: Ref, rows: int, size: int) -> None:
        """Reals of an odd size are transformed as complex numbers."""
        found = size // 2 + 1
        before, after = self.temp((rows, size)), self.temp((rows, size))
        if self.kind is FftType.RFFT:
            b = Builder((rows, size), ())
            given = b.arg(self.dtype, rows * size)
            target = b.arg(self.complex, rows * size, "out")
            with b.row():
                b.store(target, [size, 1], self.number(b, b.load(given, [size, 1]), None))
            self.launch(b, (operand, before))
            self.rows(before, after, rows, size, 1.0)
            b = Builder((rows, found), ())
            given = b.arg(self.complex, rows * size)
            target = b.arg(self.complex, rows * found, "out")
            with b.row():
                b.store(target, [found, 1], b.load(given, [size, 1]))
            self.launch(b, (after, result))
            return
        # The first frequency is real, the others stand for their mirror images too.
        for first, count, offset, stride in (
            (0, 1, 0, 0),
            (1, found - 1, 1, 1),
            (found, found - 1, found - 1, -1),
        ):
            if not count:
                continue
            b = Builder((rows, count), ())
            given = b.arg(self.complex, rows * found)
            target = b.arg(self.complex, rows * size, "out")
            with b.row():
                value = b.load(given, [found, stride], offset)
                if first == 0:
                    value = self.number(b, b.op("real", value), None)
                elif stride < 0:
                    value = b.op("conj", value)
                b.store(target, [size, 1], value, first)
            self.launch(b, (operand, before))
        self.rows(before, after, rows, size, 1 / size)
        b = Builder((rows, size), ())
        given = b.arg(self.complex, rows * size)
        target = b.arg(self.dtype, rows * size, "out")
        with b.row():
            b.store(target, [size, 1], b.op("real", b.load(given, [size, 1])))
        self.launch(b, (after, result))


_ONE = Along(1, 0, 0)


def _split(rows: int, size: int) -> int:
    """The size of the first of two steps; one if there is only one step."""
    if size <= _MOST_POINTS and (rows >= _FEW or size < _SPLIT_FROM):
        return 1
    # Both sizes should be alike; with fewer than eight, vectors would not be full.
    best = max((d for d in range(1, math.isqrt(size) + 1) if size % d == 0), default=1)
    return best if best >= 8 else 1
