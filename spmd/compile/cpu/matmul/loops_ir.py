"""The loops around the register tiles: products of blocks, and of one or few rows.

The one idea: all sizes, strides, blockings and the functions to call (tiles, packing, epilogues)
are run-time numbers (`functions_ir.SIZES`), so each of these modules is compiled once and serves
every product.
Each element of C is one chain of multiply-adds over k, in blocks of `kc`, whatever tile or thread
it falls to, so the result does not depend on how the work was split.

Three kernels: `product` for matrices; for few rows of A, which mean one sweep over B, `combine`
adds multiples of the rows of B, and `dots` multiplies rows of A with contiguous columns of B.

A finished block of C that an epilogue changes lies in scratch memory, and the epilogue's kernel
runs on its rows. Code that only some products need is in `functions_ir`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from spmd.compile.cpu.matmul.functions_ir import as_control, product_sizes
from spmd.compile.native.llvm.function_builder import Function, Value, Words
from spmd.compile.native.llvm.vectors import (
    STORED,
    Vectors,
    lane_mask,
    load_vector,
    multiply_add,
    splat,
    store_vector,
)

_KERNEL_PARAMS = ["ptr", "ptr", "i64", "i64"]


def product_symbol(v: Vectors, hot: bool = False) -> str:
    """The kernel that multiplies matrices in tiles."""
    return f"product_{v.symbol}{'_hot' if hot else ''}"


def combine_symbol(v: Vectors, source: str) -> str:
    """The kernel that combines rows of B, stored as `source`, into the one row of C."""
    return f"combine_{source}_{v.symbol}"


def dots_symbol(v: Vectors, source: str, rows: int) -> str:
    """The kernel that multiplies `rows` rows of A at a time with columns of B."""
    return f"dots{rows}_{source}_{v.symbol}"


# ---- the base of kernels -----------------------------------------------------------------------


class _Unit:
    """Addresses and extents of one unit of work: a block of one product of the batch."""

    def __init__(self, f: Function, of: Words, unit: Value):
        self.f, self.of = f, of
        args = f.params[0]
        m, mb, m_blocks, n, nb, n_blocks = of.read("m", "mb", "m_blocks", "n", "nb", "n_blocks")
        blocks, m_block = f.divided(unit, m_blocks)
        batch, n_block = f.divided(blocks, n_blocks)
        self.m_first, self.n_first = m_block * mb, n_block * nb
        self.rows = f.smaller(m - self.m_first, mb)
        self.columns = f.smaller(n - self.n_first, nb)
        batch1, batch2, a_row, b_col = of.read("batch1", "batch2", "a_row", "b_col")
        rest, index2 = f.divided(batch, batch2)
        self.index = (*f.divided(rest, batch1), index2)
        self.a = f.at(self._start("a", 0), self.m_first * a_row)
        self.b = f.at(self._start("b", 1), self.n_first * b_col)
        arguments, epilogue, at_c = of.read("arguments", "epilogue_0", "at_c")
        self.scratch = f.load("ptr", args, (arguments + 2) * 8)
        self.direct = epilogue.equals(0)
        c_first = f.weighted((self.m_first, self.n_first), of.read("c_row", "nbytes"))
        direct = f.at(self._start("c", 2), c_first)
        self.c = f.select(self.direct, direct, f.at(self.scratch, at_c))

    def _start(self, name: str, number: int) -> Value:
        strides = self.of.read(*[f"{name}_batch{i}" for i in range(len(self.index))])
        offset = self.f.weighted(self.index, strides)
        return self.f.at(self.f.load("ptr", self.f.params[0], 8 * number), offset)

    def finish(self, first: Value, rows: Value, c: Value) -> None:
        """Run the epilogue on finished rows of the unit's block, if there is one."""
        f, of = self.f, self.of
        with f.if_(self.direct.equals(0)):
            nb, *kernels, finish = of.read("nb", "epilogue_0", "epilogue_1", "finish")
            kernel = f.select(self.columns.equals(nb), *kernels)
            places = (self.m_first + first, self.n_first, *self.index)
            f.call(finish, "void", *f.params[:2], kernel, c, rows, *places)


# ---- matrices ----------------------------------------------------------------------------------


@cache
def product_text(v: Vectors, hot: bool) -> str:
    """The module of the kernel over tiles: unit = (product of the batch, columns, rows)."""
    f = Function(product_symbol(v, hot), "void", _KERNEL_PARAMS, attributes=v.attributes)
    of = product_sizes(f, f.params[1], v)
    with f.range(f.params[2], f.params[3]) as number:
        unit = _Unit(f, of, number)
        # At least once: a product over nothing is zero.
        k, kc = of.read("k", "kc")
        with f.range(0, f.larger(k, 1), kc) as k_first:
            k, kc, b_k = of.read("k", "kc", "b_k")
            depth = f.smaller(k - k_first, kc)
            b = _laid(unit, "lay_b", f.at(unit.b, k_first * b_k), unit.columns, depth)
            with f.range(0, unit.rows, of["mc"]) as i:
                mc, *strides = of.read("mc", "a_row", "a_k")
                rows = f.smaller(unit.rows - i, mc)
                source = f.at(unit.a, f.weighted((i, k_first), strides))
                a = _laid(unit, "lay_a", source, rows, depth)
                c_row, tiles, k, kc = of.read("c_row", "tiles", "k", "kc")
                c = f.at(unit.c, i * c_row)
                extents = rows, unit.columns, depth, f.convert("zext", k_first > 0, "i64")
                f.call(tiles, "void", f.params[1], a, b, c, *extents)
                with f.if_(k_first + kc >= k):
                    unit.finish(i, rows, c)
    return as_control(f.text(), hot)


def _laid(unit: _Unit, name: str, source: Value, count: Value, depth: Value) -> Value:
    """Rows of A or columns of B where tiles read them, packed if they are packed at all."""
    f, function = unit.f, unit.of[name]
    found = f.var("ptr", source)
    with f.if_(function.differs(0)):
        operands = f.params[1], source, unit.scratch, count, depth
        found.set(f.call(function, "ptr", *operands))
    return found.get()


# ---- one row -----------------------------------------------------------------------------------

# Rows of B that are added to C in one pass over it: that many streams are in flight.
COMBINED_ROWS = 8


@cache
def combine_text(v: Vectors, source: str) -> str:
    """The module of the kernel C = A B for one row of A, B with contiguous rows.

    Unit = (product of the batch, columns). C stays in the L1 cache while rows of B stream by.
    """
    symbol = combine_symbol(v, source)
    f = Function(symbol, "void", _KERNEL_PARAMS, attributes=v.attributes)
    of = product_sizes(f, f.params[1], v)
    with f.range(f.params[2], f.params[3]) as number:
        unit = _Unit(f, of, number)
        a, a_k = _row_of_a(f, v, of, unit)
        k, count = of["k"], COMBINED_ROWS
        grouped = k - k % count
        with f.if_(k.equals(0)):
            _combine(f, v, source, unit, (a, a_k), (of["b_k"], f.value("i64", 0)), 0)
        first = f.var("i64", 0)
        for rows, end in ((count, grouped), (1, k)):
            with f.range(first.get(), end, rows) as at:
                _combine(f, v, source, unit, (a, a_k), (of["b_k"], at), rows)
            first.set(grouped)
        unit.finish(f.value("i64", 0), f.value("i64", 1), unit.c)
    return f"{v.declarations(STORED[source])}\n{f.text()}"


def _combine(
    f: Function,
    v: Vectors,
    source: str,
    unit: _Unit,
    a: tuple[Value, Value],
    b: tuple[Value, Value],
    rows: int,
) -> None:
    """Add `rows` multiples of rows of B to C, which the first of them sets; none: C = 0."""
    (x, x_k), (b_k, at) = a, b
    stored, nbytes = STORED[source], _stored_bytes(source)
    factors = [splat(f, f.load(v.element, x, (at + i) * x_k), v.lanes) for i in range(rows)]
    lines = [f.at(unit.b, (at + i) * b_k) for i in range(rows)]
    starts = at.equals(0)

    def step(j: Value, mask: Value | None) -> None:
        place = f.at(unit.c, j * v.nbytes)
        total = f.var(v.vector, 0)
        if rows:
            with f.if_(starts.equals(0)):
                total.set(load_vector(f, v, place, mask))
        for factor, line in zip(factors, lines, strict=True):
            part = load_vector(f, v, f.at(line, j * nbytes), mask, stored)
            multiply_add(f, factor, part, total)
        store_vector(f, v, total.get(), place, mask)

    _along(f, v.lanes, unit.columns, step)


def _along(f: Function, lanes: int, count: Value, step) -> None:
    """Call `step(index, mask)` for all whole vectors, then for the rest."""
    whole = count - count % lanes
    with f.range(0, whole, lanes) as j:
        step(j, None)
    with f.if_(whole < count):
        step(whole, lane_mask(f, lanes, count - whole))


def _row_of_a(f: Function, v: Vectors, of: Words, unit: _Unit) -> tuple[Value, Value]:
    """The rows of A as carried elements, packed if they must be, and the bytes between those."""
    a, a_k = f.var("ptr", unit.a), f.var("i64", of["a_k"])
    with f.if_(of["pack_a"].differs(0)):
        target = f.at(unit.scratch, of["at_a"])
        strides = of["a_k"], of["a_row"]
        count = unit.rows
        f.call(of["pack_a"], "void", a.get(), *strides, of["k"], count, target, of["tile_a_row"])
        a.set(target)
        a_k.set(of["nbytes"])
    return a.get(), a_k.get()


def _stored_bytes(source: str) -> int:
    return {"half": 2, "i16": 2, "float": 4, "double": 8}[STORED[source]]


# ---- few rows ----------------------------------------------------------------------------------

# Columns of B that share a pass over the rows of A.
DOT_COLUMNS = {1: 8, 2: 4, 3: 4, 4: 4}


@cache
def dots_text(v: Vectors, source: str, rows: int) -> str:
    """The module of the kernel C = A B, rows of A and columns of B contiguous along k.

    Unit = (product of the batch, columns). Takes `rows` rows of A at a time; m must be a multiple.
    """
    symbol = dots_symbol(v, source, rows)
    f = Function(symbol, "void", _KERNEL_PARAMS, attributes=v.attributes)
    of = product_sizes(f, f.params[1], v)
    group = DOT_COLUMNS[rows]
    with f.range(f.params[2], f.params[3]) as number:
        unit = _Unit(f, of, number)
        a, _ = _row_of_a(f, v, of, unit)
        grouped = unit.columns - unit.columns % group
        first = f.var("i64", 0)
        for count, end in ((group, grouped), (1, unit.columns)):
            with f.range(first.get(), end, count) as j, f.range(0, of["m"], rows) as i:
                left = [f.at(a, (i + row) * of["tile_a_row"]) for row in range(rows)]
                right = [f.at(unit.b, (j + column) * of["b_col"]) for column in range(count)]
                sums = _dots(f, v, source, left, right, of["k"])
                for row, values in enumerate(sums):
                    place = f.at(unit.c, (i + row) * of["c_row"] + j * of["nbytes"])
                    for column, value in enumerate(values):
                        f.store(value, place, column * v.nbytes)
            first.set(grouped)
        unit.finish(f.value("i64", 0), of["m"], unit.c)
    lines = [v.declarations(STORED[source]), f"declare {v.element} @{_sum_name(v)}"]
    lines[-1] += f"({v.element}, {v.vector})"
    return "\n".join([*lines, f.text()])


def _sum_name(v: Vectors) -> str:
    return f"llvm.vector.reduce.fadd.v{v.lanes}{v.carried}"


def _dots(
    f: Function, v: Vectors, source: str, a: Sequence[Value], b: Sequence[Value], k: Value
) -> list[list[Value]]:
    """All dot products of lines of A with lines of B: a vector of partial sums each."""
    stored, nbytes = STORED[source], _stored_bytes(source)
    totals = [[f.var(v.vector, 0) for _ in b] for _ in a]

    def step(at: Value, mask: Value | None) -> None:
        lefts = [load_vector(f, v, f.at(line, at * v.nbytes), mask) for line in a]
        for column, line in enumerate(b):
            right = load_vector(f, v, f.at(line, at * nbytes), mask, stored)
            for row, left in enumerate(lefts):
                multiply_add(f, left, right, totals[row][column])

    _along(f, v.lanes, k, step)

    def summed(total: Value) -> Value:
        operands = f"{v.element} -0.0, {v.vector} {total.text}"
        return f.emit(v.element, f"call reassoc {v.element} @{_sum_name(v)}({operands})")

    return [[summed(total.get()) for total in row] for row in totals]
