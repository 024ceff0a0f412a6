"""Random well-formed kernels with inputs, from a seed: the fuel of the renderer's tests.

A case draws an iteration space (with sizes 0, 1, odd tails), accesses with broadcast, transposed,
reversed and gathered maps, chains of operations of random dtypes, and ends in stores, reductions,
row buffers or scans. Operations that amplify rounding are left to tests of their own, so that
results can be compared closely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd.compile.kernel.builder import Builder
from spmd.compile.kernel.dtypes import DTYPES, kind
from spmd.compile.kernel.ir import Kernel
from spmd.compile.kernel.ops import OPS, result_dtype

SIZES = (1, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 70, 130)
SMOOTH_FLOAT_OPS = (
    "add sub mul max min neg abs sqrt exp tanh logistic sin cos atan erf log1p expm1"
).split()
INTEGER_OPS = (
    "add sub mul div rem max min neg abs sign not and or xor shl shr_logical shr_arith clz popcount"
).split()
BOOL_OPS = "not and or xor eq ne lt le max min".split()
COMPLEX_OPS = "add sub mul neg conj".split()
DTYPE_NAMES = tuple(DTYPES)


@dataclass
class Case:
    """A kernel, and a flat array for each of its arguments."""

    kernel: Kernel
    arrays: list[np.ndarray]


def random_case(seed: int) -> Case:
    """Return the case of a seed."""
    return _Generator(seed).case()


class _Generator:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.arrays: list[np.ndarray] = []

    def pick(self, items):
        return items[self.rng.integers(len(items))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def sizes(self, count: int) -> tuple[int, ...]:
        sizes = [int(self.pick(SIZES)) for _ in range(count)]
        while np.prod(sizes) > 20000:
            sizes[int(np.argmax(sizes))] //= 2
        if sizes and self.chance(0.04):
            sizes[self.rng.integers(count)] = 0
        return tuple(sizes)

    def case(self) -> Case:
        outer = self.sizes(self.rng.integers(0, 3))
        inner = self.sizes(self.rng.integers(0, 3))
        if np.prod(outer + inner) > 40000:
            outer = outer[:1]
        self.builder = Builder(outer, inner)
        self.space = outer + inner
        self.dtype = self.pick(DTYPE_NAMES)
        style = self.pick(("elementwise", "reduce", "softmax", "scan", "scatter"))
        getattr(self, "_" + style)()
        return Case(self.builder.build(), self.arrays)

    # ---- accesses ----

    def layout(self, dims: tuple[int, ...], broadcast: bool) -> tuple[tuple[int, ...], int, int]:
        """Return (strides, offset, elements) of an array in random dim order."""
        strides, size = [0] * len(dims), 1
        for dim in self.rng.permutation(len(dims)) if self.chance(0.5) else range(len(dims))[::-1]:
            if broadcast and self.chance(0.25):
                continue
            strides[dim] = size
            size *= max(dims[dim], 1)
        padding = int(self.rng.integers(0, 3))
        offset, size = padding, size + 2 * padding
        for dim, stride in enumerate(strides):
            if stride and self.chance(0.15):
                offset += stride * (max(dims[dim], 1) - 1)
                strides[dim] = -stride
        return tuple(strides), offset, size

    def data(self, dtype: str, size: int) -> np.ndarray:
        numpy_dtype, letter = DTYPES[dtype].numpy, kind(dtype)
        if letter == "b":
            return self.rng.integers(0, 2, size).astype(bool)
        if letter in "iu":
            raw = self.rng.integers(0, 256, size * numpy_dtype.itemsize).astype(np.uint8)
            small = self.rng.integers(0, 5, size).astype(numpy_dtype)
            return np.where(self.rng.random(size) < 0.5, raw.view(numpy_dtype), small)
        values = self.rng.standard_normal(size) * 2
        if letter == "c":
            return (values + 1j * self.rng.standard_normal(size)).astype(numpy_dtype)
        special = self.pick(((), (0.0, -0.0), (np.inf, -np.inf, np.nan)))
        for value in special:
            values[self.rng.random(size) < 0.03] = value
        return values.astype(numpy_dtype)

    def load(self, dtype: str) -> int:
        b = self.builder
        if self.chance(0.2):
            return self.gather(dtype)
        strides, offset, size = self.layout(self.space, broadcast=True)
        arg = b.arg(dtype, size)
        self.arrays.append(self.data(dtype, size))
        if self.chance(0.2) and self.space:
            guard = self.guard()
            fill = b.const(1, dtype) if self.chance(0.5) else None
            return b.load(arg, strides, offset, guard=guard, fill=fill)
        return b.load(arg, strides, offset)

    def guard(self) -> int:
        dim = int(self.rng.integers(len(self.space)))
        limit = self.builder.const(int(self.rng.integers(0, self.space[dim] + 1)), "i32")
        return self.builder.op("lt", self.builder.iota(dim, "i32"), limit)

    def gather(self, dtype: str) -> int:
        """Read table[index[point] * columns + column], the index clamped in the kernel."""
        b, rows, columns = self.builder, int(self.rng.integers(1, 20)), 5
        strides, offset, size = self.layout(self.space, broadcast=True)
        index_dtype = self.pick(("i32", "i64", "u8"))
        indices, table = b.arg(index_dtype, size), b.arg(dtype, rows * columns)
        self.arrays.append(self.rng.integers(0, 25, size).astype(DTYPES[index_dtype].numpy))
        self.arrays.append(self.data(dtype, rows * columns))
        index = b.load(indices, strides, offset)
        index = b.op("min", index, b.const(rows - 1, index_dtype))
        flat = (0,) * len(self.space)
        return b.load(table, flat, int(self.rng.integers(columns)), gathered=((index, columns),))

    def store(self, value: int, dims: tuple[int, ...]) -> None:
        strides, offset, size = self.layout(dims, broadcast=False)
        dtype = self.builder.dtype(value)
        arg = self.builder.arg(dtype, size, "out")
        self.arrays.append(np.zeros(size, DTYPES[dtype].numpy))
        self.builder.store(arg, strides, value, offset)

    # ---- values ----

    def chain(self, length: int) -> int:
        """Return a value of the case's dtype made by random operations on loads."""
        values = [self.load(self.dtype)]
        if self.chance(0.5):
            values.append(self.load(self.dtype))
        if self.chance(0.3) and self.space and kind(self.dtype) in "iuf":
            values.append(self.builder.iota(int(self.rng.integers(len(self.space))), self.dtype))
        for _ in range(length):
            values.append(self.operation(values))
        return values[-1]

    def operation(self, values: list[int]) -> int:
        b, dtype = self.builder, self.dtype
        names = {"f": SMOOTH_FLOAT_OPS, "c": COMPLEX_OPS, "b": BOOL_OPS}.get(
            kind(dtype), INTEGER_OPS
        )
        if self.chance(0.15):
            chosen = b.op("eq", self.pick(values), self.pick(values))
            return b.op("select", chosen, self.pick(values), self.pick(values))
        if self.chance(0.1):
            return self.there_and_back(self.pick(values))
        name = self.pick(names)
        arity = OPS[name].arity
        operands = [self.pick(values) for _ in range(arity)]
        if arity == 2 and self.chance(0.2):
            operands[1] = b.const(self.pick((1, 0, 3)), dtype)
        if result_dtype(name, (dtype,) * arity, "") != dtype:
            return operands[0]
        return b.op(name, *operands)

    def there_and_back(self, value: int) -> int:
        """Convert to another dtype that loses the same on both sides, and back."""
        # A float that differs in its last bit may round to another narrow one.
        exact = ("f64", "c128") if kind(self.dtype) in "fc" else ()
        others = ("i32", "i8", "u16", "f32", "bool", "bf16", "f16", "u64")
        middle = self.pick(exact or others)
        return self.builder.convert(self.builder.convert(value, middle), self.dtype)

    # ---- styles ----

    def _elementwise(self) -> None:
        with self.builder.row():
            for _ in range(self.rng.integers(1, 3)):
                self.store(self.chain(int(self.rng.integers(0, 6))), self.space)

    def _reduce(self) -> None:
        b = self.builder
        letter = kind(self.dtype)
        reducers = {"b": ("and", "or", "xor", "max"), "f": ("add", "max", "min", "argmax")}
        reducers["c"] = ("add",)
        names = reducers.get(letter, ("add", "mul", "max", "min", "and", "or", "xor", "argmin"))
        results = []
        with b.row():
            for _ in range(self.rng.integers(1, 3)):
                value, name = self.chain(int(self.rng.integers(0, 4))), self.pick(names)
                if name == "argmax" and letter == "f":
                    # Computed values that differ in their last bit may change places.
                    value = self.chain(0)
                position = self.pick(("i32", "i64")) if name.startswith("arg") else None
                results.append(b.reduce(name, value, position))
                if self.chance(0.3):
                    self.store(value, self.space)
        with b.point():
            for result in results:
                self.store(result, b.outer)

    def _softmax(self) -> None:
        """A reduction, a row buffer of a value that depends on it, and a second sweep."""
        b = self.builder
        combine = {"b": "xor", "c": "add"}.get(kind(self.dtype), "max")
        buffer = b.buffer(self.dtype)
        with b.row():
            first = b.reduce(combine, self.chain(1))
        with b.row():
            value = self.chain(2)
            name = "xor" if kind(self.dtype) == "b" else "sub"
            kept = b.op(name, value, first)
            b.store_row(buffer, kept)
            total = b.reduce(combine, kept)
        with b.row():
            self.store(b.op(name, b.load_row(buffer), total), self.space)

    def _scan(self) -> None:
        b = self.builder
        if len(b.inner) != 1 or kind(self.dtype) == "b":
            self._elementwise()
            return
        names = {"c": ("add",), "f": ("add", "max", "min")}
        reverse = self.chance(0.4)
        with b.row():
            name = self.pick(names.get(kind(self.dtype), ("add", "mul", "max", "min")))
            result = b.scan(name, self.chain(1), reverse)
            self.store(result, self.space)
        if self.chance(0.3):
            with b.row():
                self.store(self.chain(1), self.space)

    def _scatter(self) -> None:
        """Add or overwrite rows of a table at random places, in order."""
        b = self.builder
        letter = kind(self.dtype)
        if not self.space or letter == "b":
            self._elementwise()
            return
        rows, columns = int(self.rng.integers(1, 10)), max(self.space[-1], 1)
        table = b.arg(self.dtype, rows * columns, "inout")
        self.arrays.append(self.data(self.dtype, rows * columns))
        leading = (1,) * 0 + self.space[:-1]
        indices = b.arg("i32", max(int(np.prod(leading, dtype=int)), 1))
        self.arrays.append(self.rng.integers(0, rows, indices_size(leading)).astype(np.int32))
        combine = self.pick((None, "add", "max" if letter in "iu" else "add"))
        with b.row():
            index = b.load(indices, (*contiguous(leading), 0))
            value = self.load(self.dtype)
            strides = (0,) * len(leading) + (1,)
            guard = self.guard() if self.chance(0.3) else None
            b.store(
                table, strides, value, gathered=((index, columns),), guard=guard, combine=combine
            )


def indices_size(dims: tuple[int, ...]) -> int:
    """Return the elements of an array of these dims, at least one."""
    return max(int(np.prod(dims, dtype=int)), 1)


def contiguous(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides."""
    strides, size = [], 1
    for extent in reversed(dims):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))
