"""Elementwise kernels: a thread for a few points, neighbouring threads along the lanes.

A load that is contiguous along another dim than the lanes would cost a memory transaction an
element. Such kernels walk square tiles: a block reads the tile along memory into shared memory,
meets, and computes along the lanes.
"""

from __future__ import annotations

import math

from spmd.compile.cuda.body import Body
from spmd.compile.cuda.launch import Launch
from spmd.compile.cuda.text import Text, digits, linear
from spmd.compile.kernel.dtypes import itemsize
from spmd.compile.kernel.ir import Instr, Kernel, Load
from spmd.compile.kernel.iteration_space import is_elementwise

THREADS = 256
# Points of a thread once the grid has work for every multiprocessor several times over.
ITEMS = 4
MANY_POINTS = 1 << 20

TILE, TILE_ROWS = 32, 8
# Below this many elements in either direction a tile is mostly edge.
LEAST_EXTENT = 16


def tile_dim(kernel: Kernel) -> int | None:
    """Return the dim along which some load's memory is contiguous though the lanes' is not."""
    last = len(kernel.sizes) - 1
    if len(kernel.passes) != 1 or not is_elementwise(kernel) or last < 1:
        return None
    if kernel.sizes[last] < LEAST_EXTENT:
        return None
    for instr in kernel.passes[0].instrs:
        for dim in range(last):
            if kernel.sizes[dim] >= LEAST_EXTENT and _is_transposed(kernel, instr, dim):
                return dim
    return None


def _is_transposed(kernel: Kernel, instr: Instr, dim: int) -> bool:
    if not isinstance(instr, Load) or instr.guard is not None or instr.map.gathered:
        return False
    # An argument that is also written must be read by the thread that writes it: no tile.
    if kernel.args[instr.arg].role != "in":
        return False
    return instr.map.strides[dim] == 1 and instr.map.strides[-1] not in (0, 1)


# ---- one point after the other ---------------------------------------------------------------


def render_points(kernel: Kernel, text: Text) -> Launch:
    """Write the body of a kernel whose points are independent; returns how to launch it."""
    body = Body(kernel, text)
    points = math.prod(kernel.sizes)
    items = ITEMS if points >= MANY_POINTS else 1
    block = "blockIdx.x" if body.index == "int" else "(i64)blockIdx.x"
    first = f"{block} * {THREADS * items} + threadIdx.x"
    if items == 1:
        text.add(f"const {body.index} point = {first};")
        text.add(f"if (point >= {points}) return;")
        _one_point(body)
    else:
        text.add("#pragma unroll")
        with text.block(f"for (int item = 0; item < {items}; item++)"):
            text.add(f"const {body.index} point = {first} + item * {THREADS};")
            text.add(f"if (point >= {points}) return;")
            _one_point(body)
    return Launch(-(-points // (THREADS * items)), (THREADS, 1))


def _one_point(body: Body) -> None:
    """Write the work of the thread's `point`."""
    kernel = body.kernel
    with body.scope():
        body.index_of(range(len(kernel.sizes)), digits("point", kernel.sizes))
        for step in kernel.passes:
            with body.scope():
                body.instrs(step)
                body.stores(step)


# ---- tiles -----------------------------------------------------------------------------------


def render_tiles(kernel: Kernel, along: int, text: Text) -> Launch:
    """Write the body of a kernel with transposed loads, whose memory runs along dim `along`."""
    body = Body(kernel, text)
    last = len(kernel.sizes) - 1
    across, down = kernel.sizes[last], kernel.sizes[along]
    columns, rows = -(-across // TILE), -(-down // TILE)
    others = [dim for dim in range(last) if dim != along]
    text.add(f"// Tiles of {TILE} points along dim {last} (the lanes) by {TILE} along dim {along}.")
    text.add(f"const {body.index} tile = blockIdx.x;")
    sizes = [kernel.sizes[dim] for dim in others]
    *batch, line, column = digits("tile", (*sizes, rows, columns))
    text.add(f"const {body.index} line = {line} * {TILE}, column = {column} * {TILE};")
    body.index_of(others, batch)
    shared = _fill_tiles(body, along)
    text.add("__syncthreads();")
    with text.block(f"for (int k = threadIdx.y; k < {TILE}; k += {TILE_ROWS})"), body.scope():
        body.index_of((last, along), ("column + threadIdx.x", "line + k"))
        text.add(f"if (d{last} >= {across} || d{along} >= {down}) continue;")
        step = kernel.passes[0]
        body.instrs(step)
        body.stores(step)
    return Launch(columns * rows * math.prod(sizes), (TILE, TILE_ROWS), shared)


def _fill_tiles(body: Body, along: int) -> int:
    """Write the loads of all transposed tiles along memory; returns the shared bytes they take."""
    kernel, text = body.kernel, body.text
    last, used = len(kernel.sizes) - 1, 0
    for instr in kernel.passes[0].instrs:
        if not isinstance(instr, Load) or not _is_transposed(kernel, instr, along):
            continue
        dtype, name = kernel.args[instr.arg].dtype, f"tile{len(body.tiles)}"
        text.add(f"{dtype} *{name} = ({dtype} *)(shared + {used});")
        with text.block(f"for (int k = threadIdx.y; k < {TILE}; k += {TILE_ROWS})"), body.scope():
            body.index_of((last, along), ("column + k", "line + threadIdx.x"))
            inside = f"d{last} < {kernel.sizes[last]} && d{along} < {kernel.sizes[along]}"
            # Rows of TILE + 1 elements: reading across them then touches all banks.
            place = linear(0, [("k", TILE + 1), ("threadIdx.x", 1)])
            text.add(f"if ({inside}) {name}[{place}] = a{instr.arg}[{body.address(instr.map)}];")
        place = linear(0, [("threadIdx.x", TILE + 1), ("k", 1)])
        narrow = dtype in ("f16", "bf16")
        body.tiles[instr] = f"load(&{name}[{place}])" if narrow else f"{name}[{place}]"
        used += -(-TILE * (TILE + 1) * itemsize(dtype) // 16) * 16
    return used
