"""The kernel of contractions over windows, as LLVM IR: a product whose rows and depth are tables.

The one idea: an element of A lies at `row offset + depth offset`, and both offsets come from a
table. Then A may be the overlapping windows of an image, and no patch is ever copied: a tile of C
lives in registers while the processor streams, per step of the depth, one element from each of the
tile's rows of A (wherever they are) and one row of B, which is packed into panels that stay in L1.

All sizes and tables are run-time numbers (`HEADER`, then the tables), so one kernel per dtype
serves every contraction; register tiles are texts of their own, compiled when first needed. Each
element of C is one chain of multiply-adds over the depth, in blocks, whatever thread it falls to.
"""

from __future__ import annotations

import platform

from spmd.compile.cpu.matmul.tile_ir import store_tile
from spmd.compile.native.llvm.function_builder import Function, Value, Variable
from spmd.compile.native.llvm.vectors import (
    VECTOR_REGISTER,
    Vectors,
    lane_mask,
    load_vector,
    multiply_add,
    splat,
)

# The run-time numbers, in the order in which the code finds them. `at_*` are the words at which
# tables begin: of (a, c) bytes for each row and outer row, of (a, b) bytes for each step of the
# depth and of the outer depth, of (a, b, c) bytes for each member of the batch, of the bytes from
# row to row in each argument of the epilogue behind C. `narrow` and `wide` are the addresses of the
# tiles for a panel that is not full and for a full one, `epilogue` that of the kernel that runs on
# finished rows, or 0. A panel of B is read where it lies if `pack` is 0, its rows `panel` bytes
# apart.
HEADER = (
    "narrow wide epilogue columns panel pack tiles height group depth block outer_depth outer_rows "
    "row_groups inner_rows row_bytes arguments "
    "at_rows at_outer_rows at_depth at_outer_depth at_batch at_arguments"
).split()
# The first so many are addresses.
ADDRESSES = 3

_WORD = 8


def panel_width(v: Vectors, columns: int) -> int:
    """Vectors side by side in a panel: four where that many registers are, and columns fill them.

    For as many multiply-adds, tiles of 6 by 4 read fewer elements of A than those of 14 by 2, and
    have a register for the place of each row.
    """
    rest = columns % (4 * v.lanes)
    fills = columns > 2 * v.lanes and (rest == 0 or rest > 2 * v.lanes)
    return 4 if fills and v.nbytes_of_vector == 64 else 2


def heights(v: Vectors, width: int) -> tuple[int, ...]:
    """Rows of the register tiles: at full width, they leave room for B and one element of A."""
    return (14, 12, 8, 4, 1) if v.nbytes_of_vector == 64 and width == 2 else (6, 4, 1)


def contract_symbol(v: Vectors) -> str:
    """The kernel that computes a contraction."""
    return f"contract_{v.symbol}"


def contract_text(v: Vectors) -> str:
    """The kernel, which is given the addresses of its tiles."""
    return "\n".join([v.declarations(), _pack(v).text(), _contract(v).text()])


# ---- the register tile -------------------------------------------------------------------------


def tile_symbol(v: Vectors, rows: int, vectors: int) -> str:
    """The register tile of a height and a width in vectors."""
    return f"contract_tile_{v.symbol}_{rows}x{vectors}"


def tile_text(v: Vectors, rows: int, vectors: int) -> str:
    """The module of one register tile."""
    return "\n".join([v.declarations(), _tile(v, rows, vectors).text()])


# a, c, table of the tile's rows; table of the depth, its length; b, bytes between its rows;
# columns; whether to add to c.
_TILE_PARAMS = ["ptr", "ptr", "ptr", "ptr", "i64", "ptr", "i64", "i64", "i64"]


def _tile(v: Vectors, rows: int, vectors: int) -> Function:
    """One tile: C[rows, columns] (+)= sum over the depth of A[rows, k] B[k, columns]."""
    name = tile_symbol(v, rows, vectors)
    f = Function(name, "void", _TILE_PARAMS, attributes=v.attributes)
    a, c, table, steps, depth, b, panel, columns, accumulate = f.params
    starts = [f.at(a, f.load("i64", table, 2 * _WORD * row)) for row in range(rows)]
    totals = [[f.var(v.vector, 0) for _ in range(vectors)] for _ in range(rows)]
    b_now, step = f.var("ptr", b), f.var("ptr", steps)
    with f.range(0, depth):
        along = f.load("i64", step.get())
        b_row = [
            load_vector(f, v, f.at(b_now.get(), n * v.nbytes_of_vector), None)
            for n in range(vectors)
        ]
        for row in range(rows):
            element = splat(f, f.load(v.element, f.at(starts[row], along)), v.lanes)
            for n in range(vectors):
                multiply_add(f, element, b_row[n], totals[row][n])
                keep_in_place(f, v, totals[row][n])
        b_now.set(f.at(b_now.get(), panel))
        step.set(f.at(step.get(), 2 * _WORD))
    masks = [lane_mask(f, v.lanes, columns - n * v.lanes) for n in range(vectors)]
    places = []
    for row in range(rows):
        origin = f.at(c, f.load("i64", table, 2 * _WORD * row + _WORD))
        for n in range(vectors):
            places.append((f.at(origin, n * v.nbytes_of_vector), masks[n], totals[row][n]))
    # Rows that fill up the last tile repeat its last row.
    store_tile(f, v, places, accumulate)
    return f


def keep_in_place(f: Function, v: Vectors, total: Variable) -> None:
    """Do nothing, but do it between the reads before and after, and once `total` is known.

    LLVM would read the elements of all rows first, which pushes the tile out of its registers.
    """
    constraint = VECTOR_REGISTER.get(platform.machine())
    if constraint is None:
        return
    value = total.get()
    text = f'call {value.type} asm sideeffect "", "={constraint},0,~{{memory}}"'
    total.set(f.emit(value.type, f"{text}({value.type} {value.text})"))


# ---- packing -----------------------------------------------------------------------------------


def _pack(v: Vectors) -> Function:
    """pack(b, table of the depth, its length, columns, target, panel bytes): copy a panel of B."""
    params = ["ptr", "ptr", "i64", "i64", "ptr", "i64"]
    f = Function("pack", "void", params, internal=True, attributes=v.attributes)
    b, steps, depth, columns, target, panel = f.params
    step, place = f.var("ptr", steps), f.var("ptr", target)
    with f.range(0, depth):
        origin = f.at(b, f.load("i64", step.get(), _WORD))
        with f.range(0, panel, v.nbytes_of_vector) as offset:
            mask = lane_mask(f, v.lanes, columns - offset // v.nbytes)
            value = load_vector(f, v, f.at(origin, offset), mask)
            f.store(value, f.at(place.get(), offset), align=v.nbytes)
        place.set(f.at(place.get(), panel))
        step.set(f.at(step.get(), 2 * _WORD))
    return f


# ---- the loops ---------------------------------------------------------------------------------


def _contract(v: Vectors) -> Function:
    """The kernel: unit = (member of the batch, outer row, group of tiles)."""
    f = Function(
        contract_symbol(v),
        "void",
        ["ptr", "ptr", "i64", "i64"],
        attributes=v.attributes,
    )
    args, sizes, begin, end = f.params
    of = {name: f.load("i64", sizes, _WORD * i) for i, name in enumerate(HEADER)}
    scratch = f.load("ptr", f.at(args, of["arguments"] * _WORD), 3 * _WORD)
    arguments = f.stack_bytes((of["arguments"] + 1) * _WORD)

    def entry(table: str, index: Value, width: int, column: int) -> Value:
        word = of[f"at_{table}"] + index * width + column
        return f.load("i64", sizes, word * _WORD)

    with f.range(begin, end) as unit:
        outer = unit // of["row_groups"]
        first = (unit - outer * of["row_groups"]) * of["group"]
        batch = outer // of["outer_rows"]
        outer_row = outer - batch * of["outer_rows"]
        a, b, c = (
            f.at(f.load("ptr", args, _WORD * i), entry("batch", batch, 3, i)) for i in range(3)
        )
        a = f.at(a, entry("outer_rows", outer_row, 2, 0))
        c = f.at(c, entry("outer_rows", outer_row, 2, 1))
        last = f.smaller(first + of["group"], of["tiles"])
        rows = f.at(sizes, of["at_rows"] * _WORD)
        accumulate = f.var("i64", 0)
        with f.range(0, of["outer_depth"]) as outer_step:
            a_part = f.at(a, entry("outer_depth", outer_step, 2, 0))
            b_part = f.at(b, entry("outer_depth", outer_step, 2, 1))
            # At least once: a sum over nothing is zero.
            with f.range(0, f.larger(of["depth"], 1), of["block"]) as start:
                depth = f.smaller(of["depth"] - start, of["block"])
                steps = f.at(sizes, (of["at_depth"] + start * 2) * _WORD)
                block = (a_part, b_part, c, steps, depth, accumulate.get())
                _panels(f, v, of, block, (rows, first, last), scratch)
                accumulate.set(1)
        with f.if_(of["epilogue"].differs(0)):
            begun = first * of["height"]
            count = f.smaller(last * of["height"], of["inner_rows"]) - begun
            row = outer_row * of["inner_rows"] + begun
            _finish(f, of, (args, sizes), arguments, row, count)
    return f


def _finish(
    f: Function,
    of: dict[str, Value],
    given: tuple[Value, Value],
    arguments: Value,
    row: Value,
    count: Value,
) -> None:
    """Run the epilogue on `count` finished rows of C, which lie one behind the other."""
    args, sizes = given
    f.store(f.at(f.load("ptr", args, 2 * _WORD), row * of["row_bytes"]), arguments)
    with f.range(0, of["arguments"]) as number:
        stride = f.load("i64", sizes, (of["at_arguments"] + number) * _WORD)
        origin = f.load("ptr", f.at(args, number * _WORD), 3 * _WORD)
        f.store(f.at(origin, row * stride), f.at(arguments, number * _WORD), _WORD)
    function = f.convert("inttoptr", of["epilogue"], "ptr")
    f.call(function, "void", arguments, f.null(), f.value("i64", 0), count)


def _panels(
    f: Function,
    v: Vectors,
    of: dict[str, Value],
    block: tuple[Value, ...],
    tiles: tuple[Value, Value, Value],
    scratch: Value,
) -> None:
    """Add a block of the depth to a group of tiles, one panel of columns after the other."""
    a, b, c, steps, depth, accumulate = block
    rows, first, last = tiles
    full = of["panel"] // v.nbytes
    with f.range(0, of["columns"], full) as j:
        columns = f.smaller(of["columns"] - j, full)
        origin = f.at(b, j * v.nbytes)
        panel = f.var("ptr", scratch)
        with f.if_else(of["pack"].differs(0)) as it:
            f.call("pack", "void", origin, steps, depth, columns, scratch, of["panel"])
            it.otherwise()
            panel.set(f.at(origin, f.load("i64", steps, _WORD)))
        target = f.at(c, j * v.nbytes)
        tile = f.select(columns < full, of["narrow"], of["wide"])
        function = f.convert("inttoptr", tile, "ptr")
        with f.range(first, last) as number:
            table = f.at(rows, number * of["height"] * (2 * _WORD))
            operands = (a, target, table, steps, depth, panel.get(), of["panel"])
            f.call(function, "void", *operands, columns, accumulate)
