"""The loops around the register tiles: one kernel for products, one for matrix times vector.

The one idea: all sizes, strides and blockings are run-time numbers (`SIZES`), so one module per
dtype serves every product. Each element of C is one chain of multiply-adds over k, in blocks of
`kc`, whatever tile or thread it falls to, so the result does not depend on how the work was split.
"""

from __future__ import annotations

from spmd.compile.cpu.gemm_ir import (
    MICRO_PARAMS,
    STORED,
    Shape,
    declarations,
    function_attributes,
    lane_mask,
    load_vector,
    mangled,
    merge,
    micro,
    micro_name,
    multiply_add,
    narrow,
    pack,
)
from spmd.compile.cpu.runtime_ir import Function, Value

# The run-time numbers of a product, in the order in which the code finds them. Strides in bytes.
SIZES = (
    "m n k a_row a_k b_k b_col c_row c_col mc nc kc nr pack_a pack_b direct_c m_blocks n_blocks "
    "batch1 batch2 a_batch0 a_batch1 a_batch2 b_batch0 b_batch1 b_batch2 c_batch0 c_batch1 c_batch2"
).split()


def product_symbol(shape: Shape) -> str:
    """The kernel that computes C = A B."""
    return f"gemm_{shape.symbol}"


def gemv_symbol(shape: Shape) -> str:
    """The kernel that computes y = A x with the rows of A contiguous."""
    return f"gemv_{shape.symbol}"


def gemm_text(shape: Shape) -> str:
    """The module of one shape."""
    functions = [
        *(micro(shape, rows, vectors, masked=True) for rows, vectors in shape.steps()),
        *(micro(shape, rows, vectors, masked=True) for rows, vectors in shape.narrow_steps()),
        micro(shape, shape.rows, 2, masked=False),
        micro(shape, shape.rows, 2, masked=False, packed=True),
        pack(shape),
        merge(shape),
        _tile(shape),
        _product(shape),
        _gemv(shape),
    ]
    return "\n".join([*declarations(shape), *(f.text() for f in functions)])


# ---- the loops -------------------------------------------------------------------------------


def _tile(shape: Shape) -> Function:
    """Compute the next rows of a column panel; give their number.

    tile(a, a_row, a_k, b, b_k, k, c, c_row, columns, accumulate, rows left, packed).
    """
    params = [*MICRO_PARAMS, "i64", "i64"]
    f = Function("tile", "i64", params, internal=True, attributes=function_attributes(shape))
    operands, (left, packed) = f.params[:10], f.params[10:]
    columns = operands[8]
    full = (left >= shape.rows) & columns.equals(2 * shape.lanes)
    with f.if_(full & packed.differs(0)):
        f.call(micro_name(shape, shape.rows, 2, False, True), "void", *operands)
        f.ret(shape.rows)
    with f.if_(full):
        f.call(micro_name(shape, shape.rows, 2, False, False), "void", *operands)
        f.ret(shape.rows)
    narrow = columns <= shape.lanes
    for steps, fits in ((shape.narrow_steps(), narrow), (shape.steps(), narrow.equals(0))):
        with f.if_(fits):
            for rows, vectors in steps:
                with f.if_(left >= rows):
                    f.call(micro_name(shape, rows, vectors, True, False), "void", *operands)
                    f.ret(rows)
    f.ret(0)
    return f


def _named_sizes(f: Function, sizes: Value) -> dict[str, Value]:
    return {name: f.load("i64", sizes, 8 * i) for i, name in enumerate(SIZES)}


def _batch_addresses(f: Function, of: dict[str, Value], batch: Value) -> list[Value]:
    """The addresses of A, B and C of one product of the batch."""
    args = f.params[0]
    rest = batch // of["batch2"]
    index2 = batch - rest * of["batch2"]
    index0 = rest // of["batch1"]
    index1 = rest - index0 * of["batch1"]
    addresses = []
    for i, name in enumerate("abc"):
        offset = (
            index0 * of[f"{name}_batch0"]
            + index1 * of[f"{name}_batch1"]
            + index2 * of[f"{name}_batch2"]
        )
        addresses.append(f.at(f.load("ptr", args, 8 * i), offset))
    return addresses


def _product(shape: Shape) -> Function:
    """The kernel: unit = (product of the batch, block of columns, block of rows)."""
    f = Function(
        product_symbol(shape),
        "void",
        ["ptr", "ptr", "i64", "i64"],
        attributes=function_attributes(shape),
    )
    args, sizes, begin, end = f.params
    of = _named_sizes(f, sizes)
    scratch = f.load("ptr", args, 24)
    tile = f.stack(shape.vector, max(2 * shape.rows, 8), align=64)
    packed_a = f.at(scratch, of["kc"] * of["nr"] * shape.nbytes)
    with f.range(begin, end) as unit:
        blocks = unit // of["m_blocks"]
        m_first = (unit - blocks * of["m_blocks"]) * of["mc"]
        batch = blocks // of["n_blocks"]
        n_first = (blocks - batch * of["n_blocks"]) * of["nc"]
        a, b, c = _batch_addresses(f, of, batch)
        a = f.at(a, m_first * of["a_row"])
        b = f.at(b, n_first * of["b_col"])
        c = f.at(c, m_first * of["c_row"] + n_first * of["c_col"])
        rows = f.smaller(of["m"] - m_first, of["mc"])
        columns = f.smaller(of["n"] - n_first, of["nc"])
        # At least once: a product over nothing is zero.
        with f.range(0, f.larger(of["k"], 1), of["kc"]) as k_first:
            depth = f.smaller(of["k"] - k_first, of["kc"])
            a_block = f.at(a, k_first * of["a_k"])
            b_block = f.at(b, k_first * of["b_k"])
            with f.if_(of["pack_a"].differs(0)):
                _pack_rows(f, shape, of, a_block, rows, depth, packed_a)
            _panels(
                f, shape, of, (a_block, b_block, c), (rows, columns, depth, k_first), scratch, tile
            )
    return f


def _pack_rows(
    f: Function,
    shape: Shape,
    of: dict[str, Value],
    a: Value,
    rows: Value,
    depth: Value,
    target: Value,
) -> None:
    """Pack a block of A into panels of as many rows as the register tile has."""
    height = shape.rows
    with f.range(0, rows, height) as i:
        width = f.smaller(rows - i, height)
        place = f.at(target, i * depth * shape.nbytes)
        stride = f.value("i64", height * shape.nbytes)
        origin = f.at(a, i * of["a_row"])
        f.call("pack", "void", origin, of["a_row"], of["a_k"], width, depth, place, stride)


def _panels(
    f: Function,
    shape: Shape,
    of: dict[str, Value],
    operands: tuple[Value, Value, Value],
    extents: tuple[Value, Value, Value, Value],
    scratch: Value,
    tile: Value,
) -> None:
    """Multiply a block of A with all column panels of a block of B."""
    a, b, c = operands
    rows, columns, depth, k_first = extents
    packed_a = f.at(scratch, of["kc"] * of["nr"] * shape.nbytes)
    panel_stride = of["nr"] * shape.nbytes
    accumulate = f.convert("zext", k_first > 0, "i64")
    with f.range(0, columns, of["nr"]) as j:
        width = f.smaller(columns - j, of["nr"])
        b_now, b_k = f.var("ptr", f.at(b, j * of["b_col"])), f.var("i64", of["b_k"])
        with f.if_(of["pack_b"].differs(0)):
            strides = of["b_col"], of["b_k"]
            f.call("pack", "void", b_now.get(), *strides, width, depth, scratch, panel_stride)
            b_now.set(scratch)
            b_k.set(panel_stride)
        row = f.var("i64", 0)
        with f.loop():
            i = row.get()
            f.break_if(i >= rows)
            a_now, a_row = f.var("ptr", f.at(a, i * of["a_row"])), f.var("i64", of["a_row"])
            a_k = f.var("i64", of["a_k"])
            with f.if_(of["pack_a"].differs(0)):
                inside = i % shape.rows
                a_now.set(f.at(packed_a, ((i - inside) * depth + inside) * shape.nbytes))
                a_row.set(shape.nbytes)
                a_k.set(shape.rows * shape.nbytes)
            c_now = f.at(c, i * of["c_row"] + j * of["c_col"])
            left = rows - i
            both_packed = of["pack_a"] & of["pack_b"]
            shared = (a_now.get(), a_row.get(), a_k.get(), b_now.get(), b_k.get(), depth)
            with f.if_else(of["direct_c"].differs(0)) as it:
                place = (c_now, of["c_row"], width, accumulate)
                row.set(i + f.call("tile", "i64", *shared, *place, left, both_packed))
                it.otherwise()
                place = (tile, panel_stride, width, f.value("i64", 0))
                done = f.call("tile", "i64", *shared, *place, left, both_packed)
                target = (c_now, of["c_row"], of["c_col"], done, width, accumulate)
                f.call("merge", "void", tile, panel_stride, *target)
                row.set(i + done)


# ---- matrix times vector ---------------------------------------------------------------------

# Rows of A that share a pass over x, to have several loads in flight.
GEMV_ROWS = 4


def _gemv(shape: Shape) -> Function:
    """The kernel y = A x, A contiguous along k: unit = (product of the batch, block of rows)."""
    f = Function(
        gemv_symbol(shape),
        "void",
        ["ptr", "ptr", "i64", "i64"],
        attributes=function_attributes(shape),
    )
    args, sizes, begin, end = f.params
    of = _named_sizes(f, sizes)
    scratch = f.load("ptr", args, 24)
    nbytes, k = f.value("i64", shape.nbytes), of["k"]
    with f.range(begin, end) as unit:
        batch = unit // of["m_blocks"]
        first = (unit - batch * of["m_blocks"]) * of["mc"]
        a, x, y = _batch_addresses(f, of, batch)
        # x as a contiguous vector of the carried type, whatever it was.
        f.call(
            "pack", "void", x, f.value("i64", 0), of["b_k"], f.value("i64", 1), k, scratch, nbytes
        )
        last = f.smaller(first + of["mc"], of["m"])
        grouped = last - (last - first) % GEMV_ROWS
        for rows, begin_row, end_row in (
            (GEMV_ROWS, first, grouped),
            (1, grouped, last),
        ):
            with f.range(begin_row, end_row, rows) as i:
                origin = f.at(a, i * of["a_row"])
                for row, total in enumerate(_dot_rows(f, shape, of, origin, scratch, rows)):
                    target = f.at(y, (i + row) * of["c_row"])
                    f.store(narrow(f, shape, total), target)
    return f


def _dot_rows(
    f: Function, shape: Shape, of: dict[str, Value], a: Value, x: Value, rows: int
) -> list[Value]:
    """The dot products of `rows` rows of A with x: a vector of partial sums each, then the rest."""
    stored, lanes = STORED[shape.source], shape.lanes
    k = of["k"]
    totals = [f.var(shape.vector, 0) for _ in range(rows)]

    def step(at: Value, mask: Value | None) -> None:
        x_now = load_vector(f, shape, f.at(x, at * shape.nbytes), mask)
        for row, total in enumerate(totals):
            origin = f.at(f.at(a, of["a_row"] * row), at * shape.source_bytes)
            multiply_add(f, load_vector(f, shape, origin, mask, stored), x_now, total)

    whole = k - k % lanes
    with f.range(0, whole, lanes) as at:
        step(at, None)
    with f.if_(whole < k):
        step(whole, lane_mask(f, shape, k - whole))
    name = f"llvm.vector.reduce.fadd.{mangled(shape)}"
    sums = []
    for total in totals:
        operands = f"{shape.carried} -0.0, {shape.vector} {total.get().text}"
        sums.append(f.emit(shape.carried, f"call reassoc {shape.carried} @{name}({operands})"))
    return sums
