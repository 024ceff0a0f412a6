"""The code of one thread at one point of the space: instructions and stores as C++ statements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from spmd.compile.cuda.scalar_ops import carrier, combination, convert, literal, operation
from spmd.compile.cuda.text import Text, linear
from spmd.compile.kernel.check import affine_range
from spmd.compile.kernel.ir import (
    ROW,
    Const,
    Instr,
    Iota,
    Kernel,
    Load,
    LoadRow,
    Map,
    Op,
    Pass,
    Scan,
    Store,
    StoreRow,
)

LARGEST_INT = 2**31 - 1


def index_type(kernel: Kernel) -> str:
    """Return `int` if every address and every count of points fits in one, else `i64`."""
    points = 1
    for size in kernel.sizes:
        points *= max(size, 1)
    largest = max([points, *(arg.size for arg in kernel.args)])
    for step in kernel.passes:
        for item in (*step.instrs, *step.stores):
            if isinstance(item, Load | Store) and 0 not in kernel.sizes:
                sizes = kernel.sizes if step.level == ROW else kernel.outer
                low, high = affine_range(item.map, sizes)
                largest = max(largest, high, -low)
    # Index arithmetic may step one block past the end before it is compared.
    return "int" if largest < LARGEST_INT - 2**20 else "i64"


class Body:
    """Writes passes for a thread that knows its index along each dim.

    `names` maps value numbers to C++ expressions, `dims` numbers the dims that have a name in the
    text. Values are named in the order in which they are written, so that the text does not depend
    on the numbers of the IR.
    """

    def __init__(self, kernel: Kernel, text: Text):
        self.kernel = kernel
        self.text = text
        self.index = index_type(kernel)
        self.dims: dict[int, str] = {}
        self.names: dict[int, str] = {}
        self.dtypes: dict[int, str] = {}
        # How a row buffer's element is written here, and loads that a tile in shared memory serves.
        self.row_element: Callable[[int], str] = lambda buffer: f"row{buffer}"
        self.tiles: dict[Load, str] = {}
        self.scan: Callable[[Scan, str], str] | None = None
        self._made = 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget on leaving the names made inside: values of a ROW pass, indices of a loop."""
        kept = dict(self.names), dict(self.dims)
        yield
        self.names, self.dims = kept

    def fresh(self, prefix: str = "v") -> str:
        """Return a new name."""
        self._made += 1
        return f"{prefix}{self._made - 1}"

    def define(self, value: int, dtype: str, expression: str, mutable: bool = False) -> str:
        """Write the definition of a value; returns its name."""
        name = self.fresh()
        self.text.add(f"{'' if mutable else 'const '}{carrier(dtype)} {name} = {expression};")
        self.names[value], self.dtypes[value] = name, dtype
        return name

    def index_of(self, dims: Sequence[int], expressions: Sequence[str]) -> None:
        """Write the indices along some dims."""
        for dim, expression in zip(dims, expressions, strict=True):
            if expression.isidentifier() or expression.isdigit():
                self.dims[dim] = expression
                continue
            self.text.add(f"const {self.index} d{dim} = {expression};")
            self.dims[dim] = f"d{dim}"

    # ---- instructions ----

    def instrs(self, step: Pass) -> None:
        """Write the instructions of a pass."""
        for instr in step.instrs:
            self.instr(instr)

    def instr(self, instr: Instr) -> None:
        """Write one instruction."""
        match instr:
            case Const(out=out, dtype=dtype, bits=bits):
                self.names[out], self.dtypes[out] = literal(bits, dtype), dtype
            case Iota(out=out, dtype=dtype, dim=dim):
                source = "i64" if self.index == "i64" else "i32"
                self.define(out, dtype, convert(self.dims[dim], source, dtype))
            case Op(out=out, dtype=dtype, op=op, operands=operands, attr=attr):
                given = [self.names[value] for value in operands]
                dtypes = [self.dtypes[value] for value in operands]
                self.define(out, dtype, operation(op, given, dtypes, dtype, attr))
            case Load(out=out, dtype=dtype):
                self.define(out, dtype, self.load(instr))
            case LoadRow(out=out, dtype=dtype, buffer=buffer):
                self.define(out, dtype, self.row_element(buffer))
            case Scan(out=out, dtype=dtype, operand=operand):
                assert self.scan is not None, "the plan of a kernel with scans knows how to scan"
                self.define(out, dtype, self.scan(instr, self.names[operand]))

    def load(self, load: Load) -> str:
        """Return the expression of a load."""
        fill = literal(0, load.dtype) if load.fill is None else self.names[load.fill]
        if self.kernel.args[load.arg].size == 0:
            return fill
        read = self.tiles.get(load) or self.element(load.arg, load.map)
        return read if load.guard is None else f"{self.names[load.guard]} ? {read} : {fill}"

    def element(self, arg: int, where: Map) -> str:
        """Return the expression that reads an element of an argument."""
        dtype, address = self.kernel.args[arg].dtype, self.address(where)
        if carrier(dtype) == dtype:
            return f"a{arg}[{address}]"
        return f"load(&a{arg}[{address}])"

    def address(self, where: Map) -> str:
        """Return the expression of an index map; gathered parts are computed in 64 bits."""
        terms = [(self.dims.get(dim, "0"), stride) for dim, stride in enumerate(where.strides)]
        terms += [(f"(i64){self.names[value]}", stride) for value, stride in where.gathered]
        return linear(where.offset, terms)

    # ---- stores ----

    def stores(self, step: Pass, live: str = "") -> None:
        """Write the stores of a pass, only where the condition `live` holds if there is one."""
        for store in step.stores:
            conditions = [live] if live else []
            if isinstance(store, StoreRow):
                line = f"{self.row_element(store.buffer)} = {self.names[store.value]};"
            elif self.kernel.args[store.arg].size == 0:
                continue
            else:
                line = self.store(store)
                if store.guard is not None:
                    conditions.append(self.names[store.guard])
            guard = f"if ({' && '.join(conditions)}) " if conditions else ""
            self.text.add(guard + line)

    def store(self, store: Store) -> str:
        """Return the statement of an unguarded store."""
        dtype = self.kernel.args[store.arg].dtype
        value = self.names[store.value]
        if store.combine is not None:
            old = self.element(store.arg, store.map)
            value = combination(store.combine, dtype, old, value)
        if carrier(dtype) == dtype:
            return f"a{store.arg}[{self.address(store.map)}] = {value};"
        return f"store(&a{store.arg}[{self.address(store.map)}], {value});"
