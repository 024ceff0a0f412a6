"""A builder of kernels, which numbers values and keeps track of their dtypes.

    b = Builder(outer=(rows,), inner=(columns,))
    x = b.arg("f32", rows * columns)
    out = b.arg("f32", rows, "out")
    with b.row():
        total = b.reduce("add", b.load(x, (columns, 1)))
    with b.point():
        b.store(out, (1,), b.op("div", total, b.const(columns, "f32")))
    kernel = b.build()

Every method that makes a value returns its number. Constants may be made in any pass; each pass
makes the constants it uses anew, since values of a ROW pass end with it. `build` checks the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from spmd.compile.kernel.check import check_kernel
from spmd.compile.kernel.dtypes import from_bits, kind, to_bits
from spmd.compile.kernel.ir import (
    POINT,
    ROW,
    Arg,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    LoadRow,
    Map,
    Op,
    Pass,
    Reduce,
    Scan,
    Store,
    StoreRow,
)
from spmd.compile.kernel.ops import OPS, result_dtype

Gathered = Sequence[tuple[int, int]]


class Builder:
    """Collects arguments and passes, and gives each value its number."""

    def __init__(self, outer: Sequence[int], inner: Sequence[int], vector_dim: int | None = None):
        self.outer = tuple(outer)
        self.inner = tuple(inner)
        self.vector_dim = vector_dim
        self._args: list[Arg] = []
        self._buffers: list[str] = []
        self._passes: list[Pass] = []
        self._dtypes: list[str] = []
        self._level = ""
        self._instrs: list[Instr] = []
        self._stores: list[Store | StoreRow] = []
        self._reductions: list[Reduce] = []

    # ---- arguments and passes ----

    def arg(self, dtype: str, size: int, role: str = "in") -> int:
        """Add an argument and return its number."""
        self._args.append(Arg(dtype, size, role))
        return len(self._args) - 1

    def buffer(self, dtype: str) -> int:
        """Add a row buffer and return its number."""
        self._buffers.append(dtype)
        return len(self._buffers) - 1

    def row(self) -> AbstractContextManager[None]:
        """Open a pass over the elements of the row."""
        return self._open(ROW)

    def point(self) -> AbstractContextManager[None]:
        """Open a pass that runs once per outer point."""
        return self._open(POINT)

    @contextmanager
    def _open(self, level: str) -> Iterator[None]:
        assert not self._level, "passes do not nest"
        self._level = level
        yield
        done = Pass(level, tuple(self._instrs), tuple(self._stores), tuple(self._reductions))
        self._passes.append(done)
        self._level = ""
        self._instrs, self._stores, self._reductions = [], [], []

    def build(self) -> Kernel:
        """Return the finished kernel, checked."""
        assert not self._level, "a pass is still open"
        kernel = Kernel(
            tuple(self._args),
            self.outer,
            self.inner,
            tuple(self._passes),
            tuple(self._buffers),
            self.vector_dim,
        )
        check_kernel(kernel)
        return kernel

    # ---- values ----

    def dtype(self, value: int) -> str:
        """Return the dtype of a value made before."""
        return self._dtypes[value]

    def dtypes(self, values: Sequence[int]) -> tuple[str, ...]:
        """Return the dtypes of some values."""
        return tuple([self._dtypes[value] for value in values])

    def number(self, value: int) -> int | float | None:
        """Return the number that a value is if it is a real constant of the open pass."""
        for instr in self._instrs:
            if isinstance(instr, Const) and instr.out == value and kind(instr.dtype) in "iuf":
                found = from_bits(instr.bits, instr.dtype)
                return float(found) if kind(instr.dtype) == "f" else int(found)
        return None

    def const(self, value: object, dtype: str) -> int:
        """Make a constant from a Python or NumPy scalar."""
        return self._add(Const(self._next(dtype), dtype, to_bits(value, dtype)))

    def iota(self, dim: int, dtype: str) -> int:
        """Make the index of dim `dim` (outer dims first)."""
        return self._add(Iota(self._next(dtype), dtype, dim))

    def op(self, op: str, *operands: int, attr: int | None = None) -> int:
        """Apply an operation whose result dtype follows from its operands."""
        made = self.op_if_supported(op, *operands, attr=attr)
        assert made is not None, f"{op} does not take {self.dtypes(operands)}"
        return made

    def op_if_supported(self, op: str, *operands: int, attr: int | None = None) -> int | None:
        """Apply an operation; None if it does not take the operands' dtypes."""
        assert OPS[op].result != "free", f"{op} needs a dtype: use convert or bitcast"
        dtype = result_dtype(op, self.dtypes(operands), "")
        if dtype is None:
            return None
        return self._add(Op(self._next(dtype), dtype, op, operands, attr))

    def convert(self, value: int, dtype: str) -> int:
        """Convert a value, keeping its number when it already has the dtype."""
        if self._dtypes[value] == dtype:
            return value
        return self._add(Op(self._next(dtype), dtype, "convert", (value,)))

    def bitcast(self, value: int, dtype: str) -> int:
        """Reinterpret the bits of a value as another dtype of the same width."""
        return self._add(Op(self._next(dtype), dtype, "bitcast", (value,)))

    def load(
        self,
        arg: int,
        strides: Sequence[int],
        offset: int = 0,
        gathered: Gathered = (),
        guard: int | None = None,
        fill: int | None = None,
    ) -> int:
        """Read an argument; see `ir.Load` and `ir.Map`."""
        dtype = self._args[arg].dtype
        where = Map(tuple(strides), offset, tuple(gathered))
        return self._add(Load(self._next(dtype), dtype, arg, where, guard, fill))

    def load_row(self, buffer: int) -> int:
        """Read this element's value from a row buffer that an earlier pass filled."""
        dtype = self._buffers[buffer]
        return self._add(LoadRow(self._next(dtype), dtype, buffer))

    def scan(self, op: str, value: int, reverse: bool = False) -> int:
        """Combine along the row up to and including this element."""
        dtype = self._dtypes[value]
        return self._add(Scan(self._next(dtype), dtype, op, value, reverse))

    # ---- ends ----

    def store(
        self,
        arg: int,
        strides: Sequence[int],
        value: int,
        offset: int = 0,
        gathered: Gathered = (),
        guard: int | None = None,
        combine: str | None = None,
        unique: bool = False,
        apart: bool = False,
    ) -> None:
        """Write a value to an argument; see `ir.Store`."""
        where = Map(tuple(strides), offset, tuple(gathered))
        self._stores.append(Store(arg, where, value, guard, combine, unique, apart))

    def store_row(self, buffer: int, value: int) -> None:
        """Keep a value of this element in a row buffer for later passes."""
        self._stores.append(StoreRow(buffer, value))

    def reduce(self, op: str, value: int, dtype: str | None = None) -> int:
        """Combine a value over the row; the result is usable in later passes.

        `dtype` is the integer type of an argmax's or argmin's position.
        """
        dtype = dtype or self._dtypes[value]
        self._reductions.append(Reduce(self._next(dtype), dtype, op, value))
        return self._reductions[-1].out

    def _next(self, dtype: str) -> int:
        self._dtypes.append(dtype)
        return len(self._dtypes) - 1

    def _add(self, instr: Instr) -> int:
        assert self._level, "values are made inside a pass"
        self._instrs.append(instr)
        return instr.out
