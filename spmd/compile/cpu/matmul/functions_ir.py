"""The parts of a product that are functions of their own, and the numbers that all parts read.

The one idea: the kernel of a product calls these by address, so that each is compiled only where a
product needs it, beside the others: a small product packs nothing and has no epilogue, and its
first compile need not wait for the code that would.
"""

from __future__ import annotations

from functools import cache

from spmd.compile.native.llvm.function_builder import Function, Value, Words
from spmd.compile.native.llvm.modules import CONTROL
from spmd.compile.native.llvm.vectors import Vectors

# The run-time numbers of a product, in the order in which the code finds them. Strides in bytes.
SIZES = (
    # sizes of the product, of a unit, of a block of A, of a tile
    "m n k mb nb mc kc mr nr m_blocks n_blocks batch1 batch2 "
    # where the operands and a directly written C lie
    "a_row a_k b_k b_col c_row a_batch0 a_batch1 a_batch2 b_batch0 b_batch1 b_batch2 "
    "c_batch0 c_batch1 c_batch2 "
    # packing: functions (or 0), where in the scratch memory, and how a tile finds its rows
    "lay_a lay_b pack_a pack_b whole_a whole_b at_a at_b at_c "
    "tile_a tile_a_row tile_a_k tile_b tile_b_k "
    # the walk over tiles; tiles for whole or last columns
    "tiles tile_whole tile_last "
    # the function of an epilogue, that for whole or last columns (or 0), number of its arguments;
    # five strides each follow
    "finish epilogue_0 epilogue_1 arguments"
).split()

# Strides of an epilogue's argument: along rows, columns and the batch dims.
_PLACES = ("row", "column", "batch0", "batch1", "batch2")
ARGUMENT_STRIDES = len(_PLACES)

# Values of `whole_a`, the packing of A: by panels, all panels in one call, or as rows.
BY_PANELS, ALL_PANELS, AS_ROWS = range(3)

LAY_A, LAY_B, FINISH = "product_lay_a", "product_lay_b", "product_finish"


def tiles_symbol(v: Vectors, hot: bool) -> str:
    """The function that multiplies a block of A with a block of B."""
    return f"tiles_{v.symbol}{'_hot' if hot else ''}"


def as_control(text: str, hot: bool = False) -> str:
    """A text that only calls others: quickly compiled, unless its own time counts too."""
    return text if hot else f"{CONTROL}\n{text}"


def product_sizes(f: Function, where: Value, v: Vectors | None = None) -> Words:
    """The numbers of a product, each read where it is used.

    Read once at the start, forty of them would be kept over five loops: LLVM takes a third more
    time to find that they do not fit into the registers.
    """
    of = Words(f, where, SIZES)
    if v is not None:
        of["nbytes"] = f.value("i64", v.nbytes)
    return of


# ---- operands ----------------------------------------------------------------------------------

# The numbers, the operand, scratch memory, rows or columns, depth; gives where tiles read it.
_LAY_PARAMS = ["ptr", "ptr", "ptr", "i64", "i64"]


@cache
def lay_b_text(attributes: str) -> str:
    """The module that packs columns of B into panels as wide as a tile."""
    f = Function(LAY_B, "ptr", _LAY_PARAMS, attributes=attributes)
    of = product_sizes(f, f.params[0])
    _, source, scratch, columns, depth = f.params
    at, function, whole = of.read("at_b", "pack_b", "whole_b")
    target = f.at(scratch, at)
    with f.if_else(whole.differs(0)) as it:
        tile, nr, b_k, tile_k = of.read("tile_b", "nr", "b_k", "tile_b_k")
        f.call(function, "void", source, tile * nr, b_k, columns, depth, target, tile_k)
        it.otherwise()
        with f.range(0, columns, of["nr"]) as j:
            nr, tile, tile_k, *strides = of.read("nr", "tile_b", "tile_b_k", "b_col", "b_k")
            width = f.smaller(columns - j, nr)
            origin, place = f.at(source, j * strides[0]), f.at(target, j * tile)
            f.call(function, "void", origin, *strides, width, depth, place, tile_k)
    f.ret(target)
    return as_control(f.text())


@cache
def lay_a_text(attributes: str) -> str:
    """The module that packs rows of A: as rows, or into panels as high as a tile."""
    f = Function(LAY_A, "ptr", _LAY_PARAMS, attributes=attributes)
    of = product_sizes(f, f.params[0])
    _, source, scratch, count, depth = f.params
    target, function = f.at(scratch, of["at_a"]), of["pack_a"]
    with f.if_(of["whole_a"].equals(AS_ROWS)):
        strides = of["a_k"], of["a_row"]
        f.call(function, "void", source, *strides, depth, count, target, of["tile_a_row"])
    with f.if_(of["whole_a"].equals(ALL_PANELS)):
        strides = of["tile_a"] * of["mr"], of["a_k"]
        f.call(function, "void", source, *strides, count, depth, target, of["tile_a_k"])
    with f.if_(of["whole_a"].equals(BY_PANELS)), f.range(0, count, of["mr"]) as i:
        height = f.smaller(count - i, of["mr"])
        origin, place = f.at(source, i * of["a_row"]), f.at(target, i * of["tile_a"])
        strides = of["a_row"], of["a_k"]
        f.call(function, "void", origin, *strides, height, depth, place, of["tile_a_k"])
    f.ret(target)
    return as_control(f.text())


# ---- blocks ------------------------------------------------------------------------------------


@cache
def tiles_text(v: Vectors, hot: bool) -> str:
    """The module that multiplies a block of A with all column panels of a block of B.

    Its parameters: the numbers, A, B, C, rows, columns, depth, whether to add to C.
    """
    params = ["ptr", "ptr", "ptr", "ptr", "i64", "i64", "i64", "i64"]
    f = Function(tiles_symbol(v, hot), "void", params, attributes=v.attributes)
    of = product_sizes(f, f.params[0], v)
    _, a, b, c, rows, columns, depth, accumulate = f.params
    with f.range(0, columns, of["nr"]) as j:
        nr, tile_b, nbytes, *tiles = of.read("nr", "tile_b", "nbytes", "tile_whole", "tile_last")
        width = f.smaller(columns - j, nr)
        tile = f.select(width.equals(nr), *tiles)
        b_now, c_now = f.at(b, j * tile_b), f.at(c, j * nbytes)
        with f.range(0, rows, of["mr"]) as i:
            mr, tile_a, c_row, b_k = of.read("mr", "tile_a", "c_row", "tile_b_k")
            height = f.smaller(rows - i, mr)
            left = f.at(a, i * tile_a), *of.read("tile_a_row", "tile_a_k")
            target = f.at(c_now, i * c_row), c_row, height, width, accumulate
            f.call(tile, "void", *left, b_now, b_k, depth, *target)
    return as_control(f.text(), hot)


@cache
def finish_text(attributes: str) -> str:
    """The module that runs an epilogue's kernel on finished rows of a block of C.

    Its parameters: the arguments and numbers of the product, the kernel, the rows of C and how
    many, and their place along rows, columns and the batch dims.
    """
    params = ["ptr", "ptr", "i64", "ptr", *["i64"] * 6]
    f = Function(FINISH, "void", params, attributes=attributes)
    args, sizes, kernel, c, rows, *places = f.params
    of = product_sizes(f, sizes)
    arguments = f.stack_bytes((of["arguments"] + 1) * 8)
    f.store(c, arguments)
    table = f.at(sizes, 8 * len(SIZES))
    with f.range(0, of["arguments"]) as number:
        strides = f.at(table, number * (8 * ARGUMENT_STRIDES))
        offset = f.weighted(places, Words(f, strides, _PLACES).read(*_PLACES))
        address = f.at(f.load("ptr", f.at(args, 16), number * 8), offset)
        f.store(address, f.at(arguments, 8), number * 8)
    f.call(kernel, "void", arguments, f.null(), f.value("i64", 0), rows)
    return as_control(f.text())
